"""The block ids of the rows of a table, and the references that they hold."""

import numpy as np

from hf_paged_cache.blocks import BlockAllocator


class BlockRows:
    """Block ids by row and logical block; each entry but 0 holds one reference.

    Attributes:
        ids: int32 `[num_rows, width]`, 0 where a row has no block.

    Args:
        allocator: counts the references; other tables may share it.
    """

    def __init__(self, allocator: BlockAllocator, num_rows: int = 0) -> None:
        self.allocator = allocator
        self.ids = np.zeros((num_rows, 1), dtype=np.int32)

    def __del__(self) -> None:
        if hasattr(self, "ids"):
            self.allocator.release_later(self.ids.reshape(-1))

    def reserve(self, width: int) -> None:
        """Widens the rows to at least `width` logical blocks."""
        present = self.ids.shape[1]
        if width > present:
            self.ids = np.pad(self.ids, ((0, 0), (0, max(width, 2 * present) - present)))

    def release(self, entries: np.ndarray) -> None:
        """Gives back the entries where the bool `[num_rows, width]` says so."""
        self.allocator.release(self.ids[entries])
        self.ids[entries] = 0

    def num_freed_by(self, entries: np.ndarray) -> int:
        """Blocks that nobody holds any more after `release(entries)`."""
        block_ids, given_back = np.unique(self.ids[entries], return_counts=True)
        is_freed = (block_ids != 0) & (self.allocator.references(block_ids) == given_back)
        return int(is_freed.sum())

    def replace(self, entries: tuple[np.ndarray, np.ndarray], block_ids: np.ndarray) -> None:
        """Puts `block_ids` `[n]`, which the caller has taken, in the place of the entries (rows `[n]`, logical blocks
        `[n]`)."""
        replaced = self.ids[entries]
        self.ids[entries] = block_ids
        self.allocator.release(replaced)

    def adopt(self, block_ids: np.ndarray) -> None:
        """Has these entries, int32 `[num_rows, width]`, in the place of empty ones, with references of its own."""
        self.allocator.acquire(block_ids.reshape(-1))
        self.ids = block_ids

    def select(self, rows: np.ndarray) -> None:
        """Replaces the rows by `rows`, indices of present ones, repeated or left out at will."""
        extra = np.bincount(rows, minlength=len(self.ids)) - 1
        # Acquire before release, so that no block that stays is ever without a holder.
        for row in np.flatnonzero(extra > 0).tolist():
            self.allocator.acquire(self.ids[row], int(extra[row]))
        for row in np.flatnonzero(extra < 0).tolist():
            self.allocator.release(self.ids[row])
        self.ids = self.ids[rows]

    def fork(self, copies: int) -> "BlockRows":
        """Every row `copies` times in a row, with references of their own."""
        other = BlockRows(self.allocator)
        self.allocator.acquire(self.ids.reshape(-1), copies)
        other.ids = self.ids.repeat(copies, axis=0)
        return other

    def reset(self, num_rows: int) -> None:
        """Gives everything back, and has `num_rows` empty rows."""
        self.allocator.release(self.ids.reshape(-1))
        self.ids = np.zeros((num_rows, 1), dtype=np.int32)
