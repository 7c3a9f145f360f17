"""What a cache may allocate: a byte budget shared by its pools, and the count of what they hold."""

import threading
from typing import Any, Protocol
from weakref import WeakSet

from hf_paged_cache.ledger import Ledger


class CountsBytes(Protocol):
    """A pool as its budget sees it."""

    num_bytes: int
    promised: int


class MemoryBudget:
    """Counts the bytes of all pools of a cache and its forks, against a limit.

    Forks may be used in several threads, so whoever hands out, gives back or moves blocks holds `lock` meanwhile.

    Args:
        limit: bytes that the pools may hold together, copies made while growing included; `None` for no limit.

    Attributes:
        ledger: knows the changes in progress of all that shares the lock.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.lock = threading.RLock()
        self.ledger = Ledger()
        self.allocated = 0
        self.promised = 0
        self.peak = 0
        self._pools: WeakSet[CountsBytes] = WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("lock", "_pools")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock(), _pools=WeakSet())

    def register(self, pool: CountsBytes) -> None:
        """Knows a pool, to `count` what it holds."""
        self._pools.add(pool)

    def count(self) -> None:
        """Counts anew what the pools hold, after a change that was interrupted."""
        pools = list(self._pools)
        self.allocated = sum(pool.num_bytes for pool in pools)
        self.promised = sum(pool.promised for pool in pools)

    @property
    def remaining(self) -> int | None:
        """Bytes that may still be allocated and are promised to nobody; `None` for no limit."""
        return None if self.limit is None else self.limit - self.allocated - self.promised

    def add(self, num_bytes: int) -> None:
        """Counts an allocation."""
        with self.lock:
            self.allocated += num_bytes
            self.peak = max(self.peak, self.allocated)

    def promise(self, num_bytes: int) -> None:
        """Keeps bytes free for an allocation that is going to come; fewer if negative."""
        with self.lock:
            self.promised += num_bytes

    def remove(self, num_bytes: int) -> None:
        """Counts a deallocation."""
        with self.lock:
            self.allocated -= num_bytes
