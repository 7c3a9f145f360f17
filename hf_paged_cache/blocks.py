"""Block ids: who holds which, which are free, and which may be taken back."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import numpy as np

from hf_paged_cache.errors import OutOfBlocks

NULL_BLOCK = 0


class Clock:
    """Numbers events in their order."""

    def __init__(self) -> None:
        self._now = 0

    def tick(self) -> int:
        """The number of the next event."""
        self._now += 1
        return self._now


class BlockAllocator:
    """Hands out block ids and counts their references. It knows ids only: no tensors, no sequences.

    A block is in one of three states, and `free + reusable + referenced == num_blocks - 1` always holds:

    - referenced: held by at least one row of a block table;
    - reusable: held by none, but its content is known (`retain`) and may be wanted again. Such blocks are kept in
      the order they were released and are taken back, oldest first, when no free block is left;
    - free: neither.

    Block 0 is the null block. It stands in table entries that must not be read and is never handed out.

    Args:
        num_blocks: number of ids, the null block included.
        on_evict: called with the id of a reusable block when it is taken back, so that an index can forget it.

    Attributes:
        clock: numbers releases. Allocators that share one can tell whose reusable blocks were released longest ago.
    """

    def __init__(self, num_blocks: int = 1, on_evict: Callable[[int], None] | None = None) -> None:
        self._references = np.zeros(num_blocks, dtype=np.int32)
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        # By id, in their order: the number of the release.
        self._reusable: OrderedDict[int, int] = OrderedDict()
        self._retained: set[int] = set()
        self.on_evict = on_evict
        self.clock = Clock()
        self._released_later: deque[tuple[np.ndarray, int]] = deque()
        self.evictions = 0

    @property
    def num_blocks(self) -> int:
        """Number of ids, the null block included."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        self._release_pending()
        return len(self._free)

    @property
    def num_reusable(self) -> int:
        self._release_pending()
        return len(self._reusable)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and reusable ones."""
        return self.num_free + self.num_reusable

    @property
    def num_retained(self) -> int:
        """Blocks whose content is known, held or not."""
        return len(self._retained)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - 1 - self.num_available

    def references(self, block_ids: np.ndarray) -> np.ndarray:
        """Reference counts of `block_ids` (any shape), int32."""
        self._release_pending()
        return self._references[block_ids]

    def must_be_copied(self, block_ids: np.ndarray) -> np.ndarray:
        """Which of `block_ids` `[n]` a row may not write to, bool `[n]`: others hold them, or know their content."""
        must = self.references(block_ids) > 1
        if self._retained:
            must |= np.array([block_id in self._retained for block_id in block_ids.tolist()], dtype=bool)
        return must

    def is_retained(self, block_id: int) -> bool:
        """Whether the content of a block is known, see `retain`."""
        return block_id in self._retained

    def grow(self, num_blocks: int) -> None:
        """Adds free ids up to `num_blocks` in total, the null block included."""
        old = self.num_blocks
        self._references = np.concatenate([self._references, np.zeros(num_blocks - old, dtype=np.int32)])
        self._free[:0] = range(num_blocks - 1, old - 1, -1)

    def shrink(self) -> bool:
        """Gives up all ids but the null block's if every one is free; whether it did."""
        if self.num_free < self.num_blocks - 1:
            return False
        self._references = self._references[:1].copy()
        self._free.clear()
        return True

    def allocate(self, count: int) -> np.ndarray:
        """Takes `count` blocks, each with one reference: all of them, or none.

        Returns:
            int32 `[count]`. Free blocks come first, then the reusable ones that were released longest ago.

        Raises:
            OutOfBlocks: fewer than `count` blocks are available. Nothing has changed then.
        """
        available = self.num_available
        if count > available:
            raise OutOfBlocks(
                needed=count,
                free=available,
                total=self.num_blocks - 1,
                block_bytes=0,
                limit="the pool is full",
            )
        taken: list[int] = []
        while len(taken) < count:
            if not self._free:  # an eviction may free more than one
                self.evict()
            taken.append(self._free.pop())
        block_ids = np.array(taken, dtype=np.int32)
        self._references[block_ids] = 1
        return block_ids

    def evict(self) -> None:
        """Makes the reusable block that was released longest ago a free one."""
        block_id, _ = self._reusable.popitem(last=False)
        self._retained.discard(block_id)
        self._free.append(block_id)
        self.evictions += 1
        if self.on_evict is not None:
            self.on_evict(block_id)

    def acquire(self, block_ids: np.ndarray, times: int = 1) -> None:
        """Adds `times` references to each of `block_ids`, which may repeat. Null blocks are passed over.

        A reusable block becomes referenced again; this is how a known prefix is picked up.
        """
        block_ids = block_ids[block_ids != NULL_BLOCK]
        for block_id in block_ids[self._references[block_ids] == 0].tolist() if self._reusable else ():
            self._reusable.pop(block_id, None)
        np.add.at(self._references, block_ids, times)

    @property
    def oldest(self) -> int:
        """The number of the longest ago release of a reusable block, of which there is one."""
        return next(iter(self._reusable.values()))

    def release(self, block_ids: np.ndarray) -> None:
        """Drops one reference of each of `block_ids`, which may repeat. Null blocks are passed over."""
        self._release_pending()
        self._release(block_ids, self.clock.tick())

    def _release(self, block_ids: np.ndarray, released: int) -> None:
        block_ids = block_ids[block_ids != NULL_BLOCK]
        if not block_ids.size:
            return
        np.subtract.at(self._references, block_ids, 1)
        unheld = block_ids[self._references[block_ids] == 0].tolist()
        # The tail of a sequence goes first, so that the head of a retained run is the last to be evicted.
        for block_id in reversed(dict.fromkeys(unheld)):
            if block_id in self._retained:
                self._reusable[block_id] = released
            else:
                self._free.append(block_id)

    def release_later(self, block_ids: np.ndarray) -> None:
        """`release`, safe to call from a finalizer: it takes effect when the allocator is next used.

        The garbage collector may run a finalizer in the middle of any call of this class, also in another thread.
        """
        self._released_later.append((block_ids, self.clock.tick()))

    def retain(self, block_ids: Sequence[int]) -> None:
        """Marks blocks whose content may be wanted again: released, they become reusable instead of free."""
        self._retained.update(block_ids)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Undoes `retain`. Reusable blocks among them become free."""
        for block_id in block_ids:
            self._retained.discard(block_id)
            if block_id in self._reusable:
                del self._reusable[block_id]
                self._free.append(block_id)

    def _release_pending(self) -> None:
        while self._released_later:
            self._release(*self._released_later.popleft())
