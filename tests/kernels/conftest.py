"""What tests of kernels get: an interpreter that rounds as a GPU does."""

from __future__ import annotations

import importlib.util

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def gpu_rounding() -> None:
    if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
        from tests.kernels.interpreter import round_as_a_gpu

        round_as_a_gpu()
