"""What tests of eval get: an interpreter that rounds as a GPU does, and quick collections of garbage."""

import gc

import pytest

from tests.kernels.conftest import gpu_rounding

__all__ = ["gpu_rounding"]


@pytest.fixture(autouse=True)
def stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing dequantized what there is, and would let each later collection look at all of torch and transformers."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
