"""What a cache may allocate: a byte budget shared by its pools, and the count of what they hold."""

import re

from hf_paged_cache.errors import InvalidArgumentError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(memory: int | str) -> int:
    """Bytes of `memory`: a number, or text such as `"2GiB"`, `"512 MB"`.

    Raises:
        InvalidArgumentError: it is neither, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(memory).lower())
    if isinstance(memory, bool) or match is None or match[2] not in _UNITS:
        raise InvalidArgumentError(f"memory={memory!r}: expected bytes as a number, or text such as '2GiB' or '512MB'")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size <= 0:
        raise InvalidArgumentError(f"memory={memory!r}: expected more than 0 bytes")
    return size


class MemoryBudget:
    """Counts the bytes of all pools of a cache and its forks, against a limit.

    Args:
        limit: bytes that the pools may hold together, copies made while growing included; `None` for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.allocated = 0
        self.peak = 0

    @property
    def remaining(self) -> int | None:
        """Bytes that may still be allocated; `None` for no limit."""
        return None if self.limit is None else self.limit - self.allocated

    def add(self, num_bytes: int) -> None:
        """Counts an allocation."""
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)

    def remove(self, num_bytes: int) -> None:
        """Counts a deallocation."""
        self.allocated -= num_bytes
