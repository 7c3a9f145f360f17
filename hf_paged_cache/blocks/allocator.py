"""Block ids: who holds which, which are free, and which may be taken back."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hf_paged_cache.errors import OutOfBlocksError
from hf_paged_cache.ledger import Ledger

NULL_BLOCK = 0


class Holding:
    """What a block table holds now. Allocators count references from it.

    Attributes:
        state: named tuple with int32 arrays of block ids, which nobody modifies; each entry but 0 is one reference.
    """

    def __init__(self, state: Any) -> None:
        self.state = state


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

    A block is in one of three states, and `free + evictable + referenced == num_blocks - 1` always holds:

    - referenced: held by at least one row of a block table;
    - evictable: cached (`mark_cached`) and held by none. When no free block is left, such blocks are taken back, the
      one that was released longest ago first;
    - free: neither.

    Block 0 is the null block. It stands in table entries that must not be read and is never handed out.

    What tables hold stands in the tables alone, and the reference counts follow from it. So an operation may be
    interrupted anywhere: `settle` counts anew.

    Args:
        num_blocks: number of ids, the null block included.
        on_evict: called with the id of an evictable block before it is taken back, so that an index can forget it.
        ledger: notes changes in progress; shared by all that changes together.

    Attributes:
        clock: numbers releases. Allocators that share one can tell whose evictable blocks were released longest ago.
    """

    def __init__(
        self, num_blocks: int = 1, on_evict: Callable[[int], None] | None = None, ledger: Ledger | None = None
    ) -> None:
        self.ledger = ledger or Ledger()
        self.on_evict = on_evict
        self.reclaimed_blocks = 0
        self._references = np.zeros(num_blocks, dtype=np.int32)
        self._other_references = np.zeros(num_blocks, dtype=np.int32)  # of holders that are no tables
        self._holdings: dict[Holding, str] = {}
        self._dropped: deque[tuple[Holding, int]] = deque()
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        # By id, in their order: the number of the release.
        self._evictable: OrderedDict[int, int] = OrderedDict()
        self._cached: set[int] = set()
        self.clock = Clock()

    def __getstate__(self) -> dict[str, Any]:
        # Tables register anew: a copy of one cache is not to count what its forks hold.
        return vars(self) | {"_holdings": {}, "_dropped": deque()}

    @property
    def num_blocks(self) -> int:
        """Number of ids, the null block included."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        self._release_dropped()
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        self._release_dropped()
        return len(self._evictable)

    @property
    def oldest(self) -> int:
        """The number of the longest ago release of an evictable block, of which there is one."""
        return next(iter(self._evictable.values()))

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out: free ones and evictable ones."""
        return self.num_free + self.num_evictable

    @property
    def num_cached(self) -> int:
        """Cached blocks, held or not."""
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - 1 - self.num_available

    def references(self, block_ids: np.ndarray) -> np.ndarray:
        """Reference counts of `block_ids` (any shape), int32."""
        self._release_dropped()
        return self._references[block_ids]

    def must_be_copied(self, block_ids: np.ndarray) -> np.ndarray:
        """Which of `block_ids` `[n]` a row may not write to, bool `[n]`: others hold them, or know their content."""
        must = self.references(block_ids) > 1
        if self._cached:
            must |= np.array([block_id in self._cached for block_id in block_ids.tolist()], dtype=bool)
        return must

    def num_let_go(self, old: np.ndarray, new: np.ndarray) -> int:
        """Blocks that nobody would hold any more if a table held `new` instead of `old` (like each other)."""
        block_ids, counts = np.unique(old[(old != new) & (old != NULL_BLOCK)], return_counts=True)
        return int((self.references(block_ids) == counts).sum())

    def is_cached(self, block_id: int) -> bool:
        """Whether a block is cached, see `mark_cached`."""
        return block_id in self._cached

    def grow(self, num_blocks: int) -> None:
        """Adds free ids up to `num_blocks` in total, the null block included."""
        self._resize(num_blocks)

    def shrink(self) -> bool:
        """Gives up all ids but the null block's if every one is free; whether it did."""
        if self.num_free < self.num_blocks - 1:
            return False
        self._resize(NULL_BLOCK + 1)
        return True

    def take(self, count: int) -> np.ndarray:
        """Takes `count` blocks for the change in progress: all of them, or none.

        Nobody holds them until a table that names them is committed. If the change is given up they are free again.

        Returns:
            int32 `[count]`. Free blocks come first, then the evictable ones that were released longest ago.

        Raises:
            OutOfBlocksError: fewer than `count` blocks are available. Nothing has changed then.
        """
        if count == 0:
            return np.zeros(0, dtype=np.int32)
        available = self.num_available
        if count > available:
            raise OutOfBlocksError(
                needed=count,
                free=available,
                total=self.num_blocks - 1,
                block_bytes=0,
                limit="the pool is full",
            )
        self.ledger.open(self)
        taken: list[int] = []
        while len(taken) < count:
            if not self._free:  # an eviction may free more than one
                self.evict()
            taken.append(self._free.pop())
        return np.array(taken, dtype=np.int32)

    def allocate(self, count: int) -> np.ndarray:
        """`take` for a holder that is no table: each block has one reference, until `release`."""
        block_ids = self.take(count)
        self.acquire(block_ids)
        if count:
            self.ledger.close(self)
        return block_ids

    def evict(self) -> None:
        """Makes the evictable block that was released longest ago a free one."""
        block_id = next(iter(self._evictable))
        if self.on_evict is not None:
            self.on_evict(block_id)
        self.reclaimed_blocks += 1
        self.forget([block_id])

    def register(self, holding: Holding, attribute: str) -> None:
        """Counts the references of a table from now on. It holds nothing yet.

        Args:
            holding: what the table holds.
            attribute: of its `state`, the ids that are this allocator's.
        """
        self._holdings[holding] = attribute

    def count_change(self, old: np.ndarray, new: np.ndarray) -> None:
        """Counts that a table holds `new` instead of `old`, int32 `[num_rows, width]` each."""
        if old is new:
            return
        if old.shape == new.shape:
            changed = old != new
            old, new = old[changed], new[changed]
        self.ledger.open(self)
        # In this order no block that stays is ever without a holder.
        self._acquire(new.reshape(-1), 1)
        if old.any():
            self._release(old.reshape(-1), self.clock.tick())

    def release_later(self, holding: Holding) -> None:
        """Lets go of all that a table holds, safe to call from a finalizer: done when the allocator is next used.

        The garbage collector may run a finalizer in the middle of any call of this class, also in another thread.
        """
        self._dropped.append((holding, self.clock.tick()))

    def acquire(self, block_ids: np.ndarray, times: int = 1) -> None:
        """Adds `times` references to each of `block_ids`, which may repeat, for a holder that is no table.

        Null blocks are passed over. An evictable block becomes referenced again: so a cached prefix is picked up.
        """
        opened = self.ledger.open(self)
        np.add.at(self._other_references, block_ids, times)
        self._acquire(block_ids, times)
        if opened:
            self.ledger.close(self)

    def release(self, block_ids: np.ndarray) -> None:
        """Undoes `acquire`: drops one reference of each of `block_ids`, which may repeat."""
        opened = self.ledger.open(self)
        np.subtract.at(self._other_references, block_ids, 1)
        self._release(block_ids, self.clock.tick())
        if opened:
            self.ledger.close(self)

    def mark_cached(self, block_ids: Sequence[int]) -> None:
        """Marks blocks whose content may be wanted again: released, they become evictable instead of free."""
        self._cached.update(block_ids)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Undoes `mark_cached`. Reusable blocks among them become free."""
        opened = self.ledger.open(self)
        for block_id in block_ids:
            self._cached.discard(block_id)
            if block_id in self._evictable:
                del self._evictable[block_id]
                self._free.append(block_id)
        if opened:
            self.ledger.close(self)

    def hold_only_tables(self) -> None:
        """Lets go of what others than tables hold or know: of a copy that came without them."""
        self._other_references = np.zeros_like(self._other_references)
        self._cached = set()
        self.settle()

    def settle(self) -> None:
        """Counts anew what tables and others hold, after a change that was interrupted."""
        for holding, _ in tuple(self._dropped):
            self._holdings.pop(holding, None)
        num_blocks = len(self._other_references)
        references = self._other_references.copy()
        for holding, attribute in tuple(self._holdings.items()):
            held = getattr(holding.state, attribute).reshape(-1)
            references += np.bincount(held, minlength=num_blocks).astype(np.int32)
        references[NULL_BLOCK] = 0
        unheld = set(np.flatnonzero(references == 0).tolist()) - {NULL_BLOCK}
        unheld_and_cached = self._cached & unheld
        now = self.clock.tick()
        evictable = OrderedDict(
            (block_id, released) for block_id, released in self._evictable.items() if block_id in unheld_and_cached
        )
        for block_id in sorted(unheld_and_cached - evictable.keys()):
            evictable[block_id] = now
        free = unheld - unheld_and_cached
        still_free = dict.fromkeys(block_id for block_id in self._free if block_id in free)
        self._free = [*still_free, *sorted(free - still_free.keys(), reverse=True)]
        self._references, self._evictable = references, evictable

    def _resize(self, num_blocks: int) -> None:
        opened = self.ledger.open(self)
        kept = min(num_blocks, len(self._other_references))
        more = np.zeros(num_blocks - kept, dtype=np.int32)
        self._other_references = np.concatenate([self._other_references[:kept], more])
        self._references = np.concatenate([self._references[:kept], more])
        self._free = [*range(num_blocks - 1, kept - 1, -1), *(block_id for block_id in self._free if block_id < kept)]
        if opened:
            self.ledger.close(self)

    def _acquire(self, block_ids: np.ndarray, times: int) -> None:
        block_ids = block_ids[block_ids != NULL_BLOCK]
        for block_id in block_ids[self._references[block_ids] == 0].tolist() if self._evictable else ():
            self._evictable.pop(block_id, None)
        if block_ids.size == 1:
            self._references[block_ids] += times
        else:
            np.add.at(self._references, block_ids, times)

    def _release(self, block_ids: np.ndarray, released: int) -> None:
        block_ids = block_ids[block_ids != NULL_BLOCK]
        if not block_ids.size:
            return
        np.subtract.at(self._references, block_ids, 1)
        unheld = block_ids[self._references[block_ids] == 0].tolist()
        # The tail of a sequence goes first, so that the head of a cached run is the last to be evicted.
        for block_id in reversed(dict.fromkeys(unheld)):
            if block_id in self._cached:
                self._evictable[block_id] = released
            else:
                self._free.append(block_id)

    def _release_dropped(self) -> None:
        while self._dropped and not self.ledger.is_open(self):
            holding, released = self._dropped[0]
            if holding in self._holdings:
                self.ledger.open(self)
                attribute = self._holdings.pop(holding)
                self._release(getattr(holding.state, attribute).reshape(-1), released)
                self.ledger.close(self)
            self._dropped.popleft()
