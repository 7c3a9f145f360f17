"""Memory that a kernel works in, kept from one call to the next."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Workspaces(Generic[T]):
    """Lends memory to one call at a time. As much is made as calls run at once, in threads of Python.

    A call that does not give back what it took, because of an exception, costs the memory and nothing else.

    Args:
        make: makes the memory for a call.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._free: list[T] = []

    def take(self) -> T:
        """Memory that no other call has."""
        # One operation, so that no two threads are given the same.
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def give_back(self, workspace: T) -> None:
        """Lets other calls have the memory."""
        self._free.append(workspace)
