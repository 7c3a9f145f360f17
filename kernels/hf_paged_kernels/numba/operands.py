"""Tensors as the kernels read them: by an address, and strides in numbers."""

from collections.abc import Sequence

import torch

NOTHING = (0, 0, 0, 0)
"""The operand that is not there."""


def operand(states: torch.Tensor) -> tuple[torch.Tensor, Sequence[int]]:
    """A tensor `[a, b, c, dim]` in which the numbers of the last dimension follow each other.

    Returns:
        The tensor, a copy only if need be, and its address and first three strides.
    """
    a, b, c, last = states.stride()
    if last != 1:
        return operand(states.contiguous())
    return states, (states.data_ptr(), a, b, c)


def address_of(tensor: torch.Tensor | None) -> int:
    """0 for no tensor."""
    return 0 if tensor is None else tensor.data_ptr()
