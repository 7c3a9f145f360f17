"""Block tables: which blocks hold the tokens of which row, and how rows grow, shrink, move and share."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from hf_paged_kernels import StepMetadata

from hf_paged_cache.block_rows import BlockRows
from hf_paged_cache.blocks import BlockAllocator
from hf_paged_cache.hot import HotRows, Moves, Pairs


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
        hot: the hot blocks of the rows, for codecs that quantize whole blocks; `None` if there are none.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        window: int | None = None,
        allocate: Callable[[int], np.ndarray] | None = None,
        hot: HotRows | None = None,
    ) -> None:
        self._allocator = allocator
        self._allocate = allocate or allocator.allocate
        self.block_size = block_size
        self.window = window
        self.num_columns = 0
        self.first_kept_column = 0
        self.generation = 0
        self.hot = hot
        self._rows = BlockRows(allocator)
        self._set_rows(0)

    @property
    def block_ids(self) -> np.ndarray:
        """int32 `[num_rows, width]`, logical block -> block id; 0 where a row has no block."""
        return self._rows.ids

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
        return int((self.block_size - self._filled_slots(self.block_ids)).sum())

    @property
    def num_cold_tokens(self) -> int:
        """Tokens in blocks that some row reads by block id and not in a hot block; shared ones count once."""
        block_ids = self.block_ids if self.hot is None else np.where(self.hot.ids == 0, self.block_ids, 0)
        return int(self._filled_slots(block_ids).sum())

    def _filled_slots(self, block_ids: np.ndarray) -> np.ndarray:
        """Slots filled by the longest row, for each block that is named in `block_ids` (like the table)."""
        first_tokens = np.arange(block_ids.shape[1]) * self.block_size
        filled = np.clip(self.seq_lens[:, None] - first_tokens[None], 0, self.block_size)
        most_filled = np.zeros(self._allocator.num_blocks, dtype=np.int64)
        np.maximum.at(most_filled, block_ids, filled)
        held = np.unique(block_ids)
        return most_filled[held[held != 0]]

    def extend(
        self, num_rows: int, num_new: int, attended: np.ndarray | None = None, *, keep_past: bool = False
    ) -> tuple[StepMetadata, Moves]:
        """Makes room for `num_new` columns in every row.

        Args:
            num_rows: rows of the batch; an empty table takes this number.
            num_new: new columns.
            attended: bool `[num_rows, num_new]`, the 2-D attention mask of the new columns. Only its leading False
                run matters, in rows that have no token yet: padding that is not stored. `None` for no padding.
            keep_past: store all new tokens of a windowed group, so that `crop` can go back into them.

        Returns:
            The step, and what has to be moved before anything is written.

        Raises:
            OutOfBlocks: nothing has changed then.
        """
        if self.num_columns == 0 and self.num_rows != num_rows:
            self._set_rows(num_rows)
        need = self._need(num_new, attended, keep_past)
        # Hot blocks first: to take the others may evict known ones, which cannot be undone.
        hot_ids = np.zeros(0, dtype=np.int32) if self.hot is None else self.hot.allocate(need.hot_count)
        try:
            new_ids = self._allocate(need.count)
        except BaseException:
            if self.hot is not None:
                self.hot.rows.allocator.release(hot_ids)
            raise
        moves = self._moves(need, new_ids, hot_ids)
        self._rows.reserve(need.width)
        self._rows.ids[np.nonzero(need.is_new)] = new_ids[len(need.copying) :]
        if need.copying:
            rows = np.array(need.copying)
            self._rows.replace((rows, need.last_block[rows]), new_ids[: len(rows)])
            self.generation += 1
        if self.hot is not None:
            self.hot.rows.reserve(need.width)
            self.hot.rows.ids[np.nonzero(need.is_new_hot)] = hot_ids[len(need.opening) :]
            rows = np.array(need.opening, dtype=np.int64)
            self.hot.rows.replace((rows, need.last_block[rows]), hot_ids[: len(rows)])
        self.padding = need.padding
        self.num_columns += num_new
        if self.window is not None and not keep_past:
            self.first_kept_column = max(self.first_kept_column, self.num_columns - self.window + 1)
        return self._step(num_new, need), moves

    def blocks_to_extend(self, num_new: int, attended: np.ndarray | None, *, keep_past: bool) -> tuple[int, int]:
        """Blocks and hot blocks that `extend` with these arguments would take."""
        need = self._need(num_new, attended, keep_past)
        return need.count, 0 if self.hot is None else need.hot_count

    def blocks_to_give_up(self) -> tuple[int, int]:
        """Blocks and hot blocks that are free once what has left the window and the hot window is given back."""
        entries = self._unkept_entries()
        freed = self._rows.num_freed_by(entries)
        if self.hot is None:
            return freed, 0
        entries[self.hot.due(self.seq_lens)] = True
        return freed, self.hot.rows.num_freed_by(entries)

    def blocks_to_seal(self) -> tuple[tuple[np.ndarray, np.ndarray], Pairs]:
        """The hot blocks that are to be quantized before the next step: their entries (rows `[n]`, logical blocks
        `[n]`) for `drop_hot`, and their `hot_pairs`."""
        entries = self.hot.due(self.seq_lens)
        return entries, self.hot_pairs(entries)

    def hot_pairs(self, entries: tuple[np.ndarray, np.ndarray]) -> Pairs:
        """For the hot blocks at some entries the place of the hot block and the block id, each pair once."""
        pairs = zip(self.hot.places[entries].tolist(), self.block_ids[entries].tolist(), strict=True)
        return list(dict.fromkeys(pairs))

    def drop_hot(self, entries: tuple[np.ndarray, np.ndarray]) -> None:
        """Lets rows read the codes of these blocks from now on."""
        if len(entries[0]):
            self.hot.rows.replace(entries, np.zeros(len(entries[0]), dtype=np.int32))
            self.generation += 1

    def snapshot(self, num_columns: int) -> StepMetadata:
        """A step without new tokens, to read the first `num_columns` columns."""
        return StepMetadata(
            block_table=self.block_ids.copy(),
            hot_table=None if self.hot is None else self.hot.places,
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
        unkept = self._unkept_blocks()
        if (unkept > self._freed_blocks).any():
            self._release(self._unkept_entries())
            self._freed_blocks = np.maximum(self._freed_blocks, unkept).astype(np.int32)
            self.generation += 1

    def _unkept_blocks(self) -> np.ndarray:
        """How many blocks of each row, int32 `[num_rows]`, are before `first_kept_column`."""
        return np.maximum(self.first_kept_column - self.padding, 0) // self.block_size

    def _unkept_entries(self) -> np.ndarray:
        """These blocks as bool `[num_rows, width]`."""
        return np.arange(self.block_ids.shape[1])[None] < self._unkept_blocks()[:, None]

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
        self._release(np.arange(self.block_ids.shape[1])[None] >= kept[:, None])
        self._freed_blocks = np.minimum(self._freed_blocks, kept)
        if num_columns == 0:
            self.first_kept_column = 0

    def select(self, rows: np.ndarray) -> None:
        """Replaces the rows by `rows` (indices of present rows, repeated or left out at will)."""
        if np.array_equal(rows, np.arange(self.num_rows)):
            return
        self._rows.select(rows)
        if self.hot is not None:
            self.hot.rows.select(rows)
        self.padding = self.padding[rows]
        self._freed_blocks = self._freed_blocks[rows]
        self.generation += 1

    def fork(self, copies: int) -> "BlockTable":
        """A table in which every row stands `copies` times in a row, sharing all blocks with this one."""
        hot = None if self.hot is None else self.hot.fork(copies)
        other = BlockTable(self._allocator, self.block_size, self.window, self._allocate)
        other.hot = hot
        other._rows = self._rows.fork(copies)
        other.padding = self.padding.repeat(copies)
        other._freed_blocks = self._freed_blocks.repeat(copies)
        other.num_columns = self.num_columns
        other.first_kept_column = self.first_kept_column
        return other

    def adopt(self, num_columns: int, padding: np.ndarray, block_ids: np.ndarray, hot_ids: np.ndarray | None) -> None:
        """Lets an empty table begin with blocks that are known, which it holds from now on like others do.

        Args:
            num_columns: columns of every row.
            padding: int32 `[num_rows]`, leading columns of each row that are not tokens.
            block_ids: int32 `[num_rows, width]`, the blocks of each row's tokens; 0 where there is none, or it has
                left the window.
            hot_ids: int32 `[num_rows, width]`, hot blocks; 0 where a row is to read codes. `None` if there are none.
        """
        self._set_rows(len(padding))
        self._rows.adopt(block_ids)
        if self.hot is not None:
            self.hot.rows.adopt(hot_ids)
        self.num_columns, self.padding = num_columns, padding
        if self.window is not None:
            self.first_kept_column = max(num_columns - self.window + 1, 0)
            self._freed_blocks = np.maximum(self.first_kept_column - padding, 0) // self.block_size
        self.generation += 1

    def exchange(self, entries: tuple[np.ndarray, np.ndarray], block_ids: np.ndarray) -> None:
        """Takes blocks `[n]` of the same content in the place of those at the entries (rows `[n]`, logical blocks
        `[n]`)."""
        self._allocator.acquire(block_ids)
        self._rows.replace(entries, block_ids)
        self.generation += 1

    def reset(self) -> None:
        """Gives all blocks back; the table is empty and takes any number of rows again."""
        self.num_columns = self.first_kept_column = 0
        self.generation += 1
        self._set_rows(0)

    def _set_rows(self, num_rows: int) -> None:
        self._rows.reset(num_rows)
        if self.hot is not None:
            self.hot.rows.reset(num_rows)
        self.padding = np.zeros(num_rows, dtype=np.int32)
        self._freed_blocks = np.zeros(num_rows, dtype=np.int32)

    def _release(self, entries: np.ndarray) -> None:
        """Gives back the blocks where the bool `[num_rows, width]` says so."""
        self._rows.release(entries)
        if self.hot is not None:
            self.hot.rows.release(entries)

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
        end_block = np.maximum(-(-new_lens // size), first_block)
        writes_on = (old_lens % size != 0) & (new_lens > old_lens) & (store_from == old_lens)
        copying = self._rows_to_copy(np.flatnonzero(writes_on), old_lens)
        block = np.arange(max(int(end_block.max()), self.block_ids.shape[1]))[None]
        is_new = (block >= first_block[:, None]) & (block < end_block[:, None])
        is_new_hot, opening = is_new, copying
        if self.hot is not None:
            is_new_hot = is_new & ~self.hot.are_cold(new_lens, is_new.shape[1])
            last_hot = self.hot.ids[np.arange(self.num_rows), old_lens // size * writes_on]
            opening = sorted({*copying, *np.flatnonzero(writes_on & (last_hot == 0)).tolist()})
        return _Need(padding, old_lens, store_from, is_new, copying, is_new_hot, opening, old_lens // size)

    def _padding_after(self, num_new: int, attended: np.ndarray | None) -> np.ndarray:
        """Leading padding of each row once `num_new` columns have come."""
        if attended is None:
            return self.padding
        empty = self.padding == self.num_columns
        leading = np.where(attended.any(axis=1), attended.argmax(axis=1), num_new)
        return np.where(empty, self.padding + leading, self.padding).astype(np.int32)

    def _rows_to_copy(self, rows: np.ndarray, old_lens: np.ndarray) -> list[int]:
        """Those of `rows`, which write on in their last block, that share it with others. The last of several such
        rows keeps the block, unless its content is to stay known."""
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

    def _moves(self, need: "_Need", new_ids: np.ndarray, hot_ids: np.ndarray) -> Moves:
        """What to move from the present blocks to these new ones."""
        sources = {row: int(self.block_ids[row, need.last_block[row]]) for row in {*need.copying, *need.opening}}
        copies = [(sources[row], target) for row, target in zip(need.copying, new_ids.tolist(), strict=False)]
        moves = Moves(copies, [], [])
        for row, target in zip(need.opening, (hot_ids - 1).tolist(), strict=False):
            hot_source = int(self.hot.places[row, need.last_block[row]])
            if hot_source >= 0:
                moves.hot_copies.append((hot_source, target))
            else:
                moves.thaws.append((sources[row], target))
        return moves

    def _step(self, num_new: int, need: "_Need") -> StepMetadata:
        size = self.block_size
        seq_lens = self.seq_lens
        width = max(1, -(-int(seq_lens.max()) // size))
        tokens = (seq_lens - num_new)[:, None] + np.arange(num_new, dtype=np.int32)[None]
        is_stored = tokens >= need.store_from[:, None]

        def slots(table: np.ndarray, first_block_id: int) -> np.ndarray:
            block_ids = table[np.arange(self.num_rows)[:, None], np.maximum(tokens, 0) // size]
            return np.where(is_stored & (block_ids >= first_block_id), block_ids * size + tokens % size, -1)

        block_table = self.block_ids[:, :width].copy()
        hot_table = hot_slots = quantized = None
        if self.hot is not None:
            hot_table = self.hot.places[:, :width]
            hot_slots = slots(hot_table, 0)
            rows, blocks = np.nonzero(need.is_new[:, :width] & ~need.is_new_hot[:, :width])
            first_columns = blocks * size - (seq_lens - num_new)[rows]
            quantized = np.stack([rows, first_columns, block_table[rows, blocks]], axis=1)
        return StepMetadata(
            block_table=block_table,
            hot_table=hot_table,
            seq_lens=seq_lens,
            padding=self.padding,
            slots=slots(block_table, 1),
            hot_slots=hot_slots,
            quantized=quantized,
            num_columns=self.num_columns,
            block_size=size,
            new_tokens_stored=bool((need.store_from <= need.old_lens).all()),
        )


class _Need(NamedTuple):
    """What it takes to extend a table. Arrays without a stated shape are `[num_rows]`.

    Attributes:
        padding: leading padding of each row afterwards.
        old_lens: tokens of each row before.
        store_from: first new token that is stored.
        is_new: bool `[num_rows, width]`, which logical blocks are new.
        copying: rows whose last block has to be copied first.
        is_new_hot: bool `[num_rows, width]`, which of the new blocks are hot.
        opening: rows whose last block needs a new hot block.
        last_block: logical block in which each row goes on.
    """

    padding: np.ndarray
    old_lens: np.ndarray
    store_from: np.ndarray
    is_new: np.ndarray
    copying: list[int]
    is_new_hot: np.ndarray
    opening: list[int]
    last_block: np.ndarray

    @property
    def count(self) -> int:
        """Blocks to be allocated."""
        return int(self.is_new.sum()) + len(self.copying)

    @property
    def hot_count(self) -> int:
        """Hot blocks to be allocated."""
        return int(self.is_new_hot.sum()) + len(self.opening)

    @property
    def width(self) -> int:
        """Logical blocks of the rows afterwards."""
        return self.is_new.shape[1]
