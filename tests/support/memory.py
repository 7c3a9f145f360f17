"""Counts what pools allocate, independently of their own count."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class Memory:
    """The bytes of all planes that are alive, and the most there ever were.

    Attributes:
        fail_at: width and blocks of the first plane that there is no room for; `None` for room without end.
    """

    def __init__(self) -> None:
        self.alive = self.peak = self.allocations = 0
        self.fail_at: tuple[int, int] | None = None

    def check(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Raises MemoryError if a plane of this shape is refused."""
        if self.fail_at is not None and (shape[-1], shape[1]) >= self.fail_at:
            raise MemoryError

    def add(self, plane: Tensor) -> None:
        """Counts a plane for as long as it is alive."""
        self.alive += plane.nbytes
        self.allocations += 1
        self.peak = max(self.peak, self.alive)
        weakref.finalize(plane, self._remove, plane.nbytes)

    def _remove(self, num_bytes: int) -> None:
        self.alive -= num_bytes
