"""PyTorch's modes belong to the caller. What is kept for later calls, or is float32 by contract, ignores them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Tensors made inside are ordinary ones, whatever mode the caller is in: for tables of the process.

    A tensor of inference mode could not be used in training later, one of a `FakeTensorMode` has no numbers at all.
    Dtype and device have to be named all the same.
    """
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        yield


def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`torch.matmul` in the dtype of its operands, also under autocast."""
    kind = left.device.type
    if not torch.is_autocast_enabled(kind):
        return torch.matmul(left, right)
    with torch.autocast(kind, enabled=False):
        return torch.matmul(left, right)
