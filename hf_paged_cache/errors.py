"""Exceptions of the package. All derive from `PagedCacheError`, and from the built-in a caller would catch."""

from functools import partial
from typing import Any


class PagedCacheError(Exception):
    """Base of every error the package raises on purpose. The cache is unchanged and usable after one."""


class InvalidArgumentError(PagedCacheError, ValueError):
    """An argument, input shape or mask does not fit the cache."""


class CacheStateError(PagedCacheError, RuntimeError):
    """The cache is not in a state in which this call has a right answer."""


class CropError(CacheStateError, ValueError):
    """`crop` was asked for something it cannot give back."""


class UnsupportedError(PagedCacheError, NotImplementedError):
    """A feature that the paged cache does not have."""


class UnsupportedAccessError(UnsupportedError, AttributeError, TypeError):
    """Content of the cache was asked for, or was to be set, in a way that blocks do not allow."""


class StoreFileError(PagedCacheError, ValueError):
    """A file of a `BlockStore` is damaged, is something else, or has the blocks of another model."""


class OutOfBlocksError(PagedCacheError, MemoryError):
    """The pool has no block left and may not grow.

    Args:
        needed: blocks that the step asked for.
        free: blocks that were free or could have been evicted.
        total: blocks of the pool, the null block left out.
        block_bytes: bytes of one block, over all layers of its group.
        limit: what keeps the pool from growing, in words.
    """

    def __init__(self, *, needed: int, free: int, total: int, block_bytes: int, limit: str) -> None:
        self._arguments = {"needed": needed, "free": free, "total": total, "block_bytes": block_bytes, "limit": limit}
        self.needed = needed
        self.free = free
        self.total = total
        self.block_bytes = block_bytes
        super().__init__(
            f"out of KV blocks: this step needs {needed} more ({needed * block_bytes:,} bytes), {free} of {total} are "
            f"free, and {limit}. The cache is as it was before the step. Raise the limit, shorten the prompt, use a "
            "smaller batch, or free blocks with `crop`, `reset` or by deleting forks."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(OutOfBlocksError, **self._arguments), ()


def other_batch_size(num_cached: int, num_given: int, what: str) -> str:
    """The message for `what`, which has not the rows that the cache holds."""
    message = f"{what} has {_rows(num_given)}, but the cache holds {_rows(num_cached)}. "
    copies, rest = divmod(num_given, num_cached)
    if copies > 1 and not rest:
        return (
            f"{message}For {copies} beams or samples of each row use `cache.fork({copies})`, or with a BlockStore "
            f"`cache_for(.., copies={copies})`"
        )
    return message + (
        "Fork the prefilled cache for as many beams or samples as `generate` is asked for; for another batch take a "
        "new cache, or `reset()` this one"
    )


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number} rows"
