"""What tests of kernels get: an interpreter that rounds as a GPU does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from hf_paged_kernels import api


@pytest.fixture(autouse=True, scope="session")
def gpu_rounding() -> None:
    if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
        from eval.kernels.interpreter import round_as_a_gpu

        round_as_a_gpu()


@pytest.fixture
def in_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls that name no backend are done by plain PyTorch."""
    monkeypatch.setenv(api.ENVIRONMENT, "reference")
    api._named_by_environment.cache_clear()
    yield
    api._named_by_environment.cache_clear()
