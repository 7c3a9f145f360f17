"""Block tables: which blocks hold the tokens of which row, and how rows grow, shrink, move and share."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from hf_paged_kernels import StepMetadata

from hf_paged_cache.blocks import BlockAllocator

Copies = list[tuple[int, int]]


class BlockTable:
    """The rows of one cache in one layer group. It knows sequences and block ids, no tensors.

    Every row has the same number of columns (`num_columns`: tokens seen, padding included, as transformers counts).
    Leading padding takes no slots: row `b` holds the tokens of the columns from `padding[b]` on, token `t` in
    logical block `t // block_size`, so that blocks align to real tokens whatever the padding.

        padding = [0, 3]     columns   0 1 2 3 4 5 6          block_size = 4
        row 0                tokens    0 1 2 3 4 5 6          block_ids[0] = [5, 2]
        row 1                tokens    - - - 0 1 2 3          block_ids[1] = [7, 0]

    A block is written only by a row that holds its only reference. Rows that share one (after beam reordering, `fork`
    or `repeat`) get a copy of it when they write to it, which can only be their last, partly filled block.

    Args:
        allocator: where block ids come from; other tables may share it.
        block_size: tokens a block.
        window: tokens that the layers of the group look back, the current one included; `None` for all. Blocks that
            have left the window are given back.
        allocate: takes block ids, `allocator.allocate` unless something has to grow first.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        window: int | None = None,
        allocate: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        self._allocator = allocator
        self._allocate = allocate or allocator.allocate
        self.block_size = block_size
        self.window = window
        self.num_columns = 0
        self.first_kept_column = 0
        self.generation = 0
        self._set_rows(0)

    def __del__(self) -> None:
        if hasattr(self, "block_ids"):
            self._allocator.release_later(self.block_ids.reshape(-1))

    @property
    def num_rows(self) -> int:
        return len(self.padding)

    @property
    def seq_lens(self) -> np.ndarray:
        """int32 `[num_rows]`, tokens of each row."""
        return self.num_columns - self.padding

    @property
    def wasted_slots(self) -> int:
        """Slots, in the blocks that the rows hold, behind the last token of every row that holds the block."""
        first_tokens = np.arange(self.block_ids.shape[1]) * self.block_size
        filled = np.clip(self.seq_lens[:, None] - first_tokens[None], 0, self.block_size)
        most_filled = np.zeros(self._allocator.num_blocks, dtype=np.int64)
        np.maximum.at(most_filled, self.block_ids, filled)
        held = np.unique(self.block_ids)
        held = held[held != 0]
        return int((self.block_size - most_filled[held]).sum())

    def extend(
        self, num_rows: int, num_new: int, attended: np.ndarray | None = None, *, keep_past: bool = False
    ) -> tuple[StepMetadata, Copies]:
        """Makes room for `num_new` columns in every row.

        Args:
            num_rows: rows of the batch; an empty table takes this number.
            num_new: new columns.
            attended: bool `[num_rows, num_new]`, the 2-D attention mask of the new columns. Only its leading False
                run matters, in rows that have no token yet: padding that is not stored. `None` for no padding.
            keep_past: store all new tokens of a windowed group, so that `crop` can go back into them.

        Returns:
            The step, and the `(source, target)` blocks to be copied before anything is written.

        Raises:
            OutOfBlocks: nothing has changed then.
        """
        if self.num_columns == 0 and self.num_rows != num_rows:
            self._set_rows(num_rows)
        need = self._need(num_new, attended, keep_past)
        new_ids = self._allocate(need.count)

        copies = []
        for row, target in zip(need.copying, new_ids.tolist(), strict=False):
            block = int(need.old_lens[row]) // self.block_size
            source = int(self.block_ids[row, block])
            self.block_ids[row, block] = target
            copies.append((source, target))
        if copies:
            self._allocator.release(np.array([source for source, _ in copies], dtype=np.int32))
            self.generation += 1
        self._reserve(int((need.first_block + need.blocks).max()))
        unused = new_ids[len(need.copying) :]
        for row in np.flatnonzero(need.blocks).tolist():
            first, count = int(need.first_block[row]), int(need.blocks[row])
            self.block_ids[row, first : first + count] = unused[:count]
            unused = unused[count:]
        self.padding = need.padding
        self.num_columns += num_new
        if self.window is not None and not keep_past:
            self.first_kept_column = max(self.first_kept_column, self.num_columns - self.window + 1)
        return self._step(num_new, need), copies

    def blocks_to_extend(self, num_new: int, attended: np.ndarray | None, *, keep_past: bool) -> int:
        """Blocks that `extend` with these arguments would take."""
        return self._need(num_new, attended, keep_past).count

    def snapshot(self, num_columns: int) -> StepMetadata:
        """A step without new tokens, to read the first `num_columns` columns."""
        return StepMetadata(
            block_table=self.block_ids.copy(),
            seq_lens=np.maximum(num_columns - self.padding, 0),
            padding=self.padding,
            slots=np.zeros((self.num_rows, 0), dtype=np.int32),
            num_columns=num_columns,
            block_size=self.block_size,
            new_tokens_stored=True,
        )

    def release_unkept(self) -> None:
        """Gives back the blocks before `first_kept_column`. Done before a step, so that the step can be undone."""
        if self.window is None:
            return
        unkept = np.maximum(self.first_kept_column - self.padding, 0) // self.block_size
        for row in np.flatnonzero(unkept > self._freed_blocks).tolist():
            span = slice(int(self._freed_blocks[row]), int(unkept[row]))
            self._allocator.release(self.block_ids[row, span])
            self.block_ids[row, span] = 0
            self._freed_blocks[row] = unkept[row]
            self.generation += 1

    def restrict_to_window(self) -> None:
        """Gives up the columns that no later step looks back at; `crop` cannot return to them any more."""
        if self.window is not None:
            self.first_kept_column = max(self.first_kept_column, self.num_columns - self.window + 1)
            self.release_unkept()

    def can_crop(self, num_columns: int) -> bool:
        """Whether the columns that a step after cropping to `num_columns` looks back at are still there."""
        if self.window is None:
            return True
        return max(num_columns - self.window + 1, 0) >= self.first_kept_column

    def crop(self, num_columns: int, first_kept_column: int | None = None) -> None:
        """Removes the columns from `num_columns` on. Blocks that no row needs any more are given back.

        Args:
            num_columns: columns to keep.
            first_kept_column: what `first_kept_column` was at that time, to undo the last step.
        """
        if first_kept_column is not None:
            self.first_kept_column = first_kept_column
        if num_columns >= self.num_columns:
            return
        self.num_columns = num_columns
        self.padding = np.minimum(self.padding, num_columns)
        self.generation += 1
        kept = -(-self.seq_lens // self.block_size)
        surplus = np.arange(self.block_ids.shape[1])[None] >= kept[:, None]
        self._allocator.release(self.block_ids[surplus])
        self.block_ids[surplus] = 0
        self._freed_blocks = np.minimum(self._freed_blocks, kept)
        if num_columns == 0:
            self.first_kept_column = 0

    def select(self, rows: np.ndarray) -> None:
        """Replaces the rows by `rows` (indices of present rows, repeated or left out at will)."""
        if np.array_equal(rows, np.arange(self.num_rows)):
            return
        extra = np.bincount(rows, minlength=self.num_rows) - 1
        # Acquire before release, so that no block that stays is ever without a holder.
        for row in np.flatnonzero(extra > 0).tolist():
            self._allocator.acquire(self.block_ids[row], int(extra[row]))
        for row in np.flatnonzero(extra < 0).tolist():
            self._allocator.release(self.block_ids[row])
        self.block_ids = self.block_ids[rows]
        self.padding = self.padding[rows]
        self._freed_blocks = self._freed_blocks[rows]
        self.generation += 1

    def fork(self, copies: int) -> "BlockTable":
        """A table in which every row stands `copies` times in a row, sharing all blocks with this one."""
        other = BlockTable(self._allocator, self.block_size, self.window, self._allocate)
        self._allocator.acquire(self.block_ids.reshape(-1), copies)
        other.block_ids = self.block_ids.repeat(copies, axis=0)
        other.padding = self.padding.repeat(copies)
        other._freed_blocks = self._freed_blocks.repeat(copies)
        other.num_columns = self.num_columns
        other.first_kept_column = self.first_kept_column
        return other

    def reset(self) -> None:
        """Gives all blocks back; the table is empty and takes any number of rows again."""
        self._allocator.release(self.block_ids.reshape(-1))
        self.num_columns = self.first_kept_column = 0
        self.generation += 1
        self._set_rows(0)

    def _set_rows(self, num_rows: int) -> None:
        self.block_ids = np.zeros((num_rows, 1), dtype=np.int32)
        self.padding = np.zeros(num_rows, dtype=np.int32)
        self._freed_blocks = np.zeros(num_rows, dtype=np.int32)

    def _reserve(self, num_blocks: int) -> None:
        """Widens the table to at least `num_blocks` columns."""
        width = self.block_ids.shape[1]
        if num_blocks > width:
            self.block_ids = np.pad(self.block_ids, ((0, 0), (0, max(num_blocks, 2 * width) - width)))

    def _need(self, num_new: int, attended: np.ndarray | None, keep_past: bool) -> "_Need":
        size = self.block_size
        padding = self._padding_after(num_new, attended)
        old_lens = np.maximum(self.num_columns - padding, 0)
        new_lens = self.num_columns + num_new - padding
        store_from = old_lens
        if self.window is not None and not keep_past:
            # Tokens that no later step can see are not stored; whole blocks of them, to keep blocks aligned.
            store_from = np.maximum(old_lens, (new_lens - self.window + 1) // size * size)
        first_block = np.maximum(-(-old_lens // size), store_from // size)
        blocks = np.maximum(-(-new_lens // size) - first_block, 0)
        copying = self._rows_to_copy(old_lens, new_lens, store_from)
        return _Need(padding, old_lens, store_from, first_block, blocks, copying)

    def _padding_after(self, num_new: int, attended: np.ndarray | None) -> np.ndarray:
        """Leading padding of each row once `num_new` columns have come."""
        if attended is None:
            return self.padding
        empty = self.padding == self.num_columns
        leading = np.where(attended.any(axis=1), attended.argmax(axis=1), num_new)
        return np.where(empty, self.padding + leading, self.padding).astype(np.int32)

    def _rows_to_copy(self, old_lens: np.ndarray, new_lens: np.ndarray, store_from: np.ndarray) -> list[int]:
        """Rows that write into a block which others hold too. The last of several such rows keeps the block, unless
        its content is to stay known."""
        writes = (old_lens % self.block_size != 0) & (new_lens > old_lens) & (store_from == old_lens)
        rows = np.flatnonzero(writes)
        blocks = self.block_ids[rows, old_lens[rows] // self.block_size]
        shared = self._allocator.must_be_copied(blocks)
        if not shared.any():
            return []
        copying, copied = [], dict.fromkeys(blocks.tolist(), 0)
        for row, block in zip(rows[shared].tolist(), blocks[shared].tolist(), strict=True):
            is_last_holder = self._allocator.references(np.array(block)) - copied[block] == 1
            if not is_last_holder or self._allocator.is_retained(block):
                copied[block] += 1
                copying.append(row)
        return copying

    def _step(self, num_new: int, need: "_Need") -> StepMetadata:
        size = self.block_size
        seq_lens = self.seq_lens
        width = max(1, -(-int(seq_lens.max()) // size))
        block_table = self.block_ids[:, :width].copy()
        tokens = (seq_lens - num_new)[:, None] + np.arange(num_new, dtype=np.int32)[None]
        rows = np.arange(self.num_rows)[:, None]
        slots = block_table[rows, np.maximum(tokens, 0) // size] * size + tokens % size
        return StepMetadata(
            block_table=block_table,
            seq_lens=seq_lens,
            padding=self.padding,
            slots=np.where(tokens >= need.store_from[:, None], slots, -1),
            num_columns=self.num_columns,
            block_size=size,
            new_tokens_stored=bool((need.store_from <= need.old_lens).all()),
        )


class _Need(NamedTuple):
    """What it takes to extend a table. Arrays are `[num_rows]`.

    Attributes:
        padding: leading padding of each row afterwards.
        old_lens: tokens of each row before.
        store_from: first new token that is stored.
        first_block: first logical block that is new.
        blocks: new blocks.
        copying: rows whose last block has to be copied first.
    """

    padding: np.ndarray
    old_lens: np.ndarray
    store_from: np.ndarray
    first_block: np.ndarray
    blocks: np.ndarray
    copying: list[int]

    @property
    def count(self) -> int:
        """Blocks to be allocated."""
        return int(self.blocks.sum()) + len(self.copying)
