"""What tests of eval get: an interpreter that rounds as a GPU does."""

from tests.kernels.conftest import gpu_rounding

__all__ = ["gpu_rounding"]
