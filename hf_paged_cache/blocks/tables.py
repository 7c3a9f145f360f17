"""Block tables: which blocks hold the tokens of which row, and how rows grow, shrink, move and share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from hf_paged_kernels import StepMetadata

from hf_paged_cache.blocks.allocator import BlockAllocator, Holding
from hf_paged_cache.blocks.exact import ExactBlocks, Pairs
from hf_paged_cache.blocks.extension import Extension, Need, filled, moves_into, padding_after
from hf_paged_cache.blocks.table_state import TableState
from hf_paged_cache.ledger import Change, Ledger

_NOTHING = np.zeros(0, dtype=np.int32)


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
        take: takes block ids, `allocator.take` unless something has to grow first.
        exact_blocks: where exact blocks come from, for codecs that quantize whole blocks; `None` if there are none.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        window: int | None = None,
        take: Callable[[int], np.ndarray] | None = None,
        exact_blocks: ExactBlocks | None = None,
    ) -> None:
        self._allocator = allocator
        self._take = take or allocator.take
        self.block_size = block_size
        self.window = window
        self.exact_blocks = exact_blocks
        self._holding = Holding(TableState.empty(0, 0))
        self._register()

    def __del__(self) -> None:
        if hasattr(self, "_holding"):
            for allocator, _ in self._kinds():
                allocator.release_later(self._holding)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._register()

    @property
    def ledger(self) -> Ledger:
        """Knows the changes in progress."""
        return self._allocator.ledger

    @property
    def state(self) -> TableState:
        """What the rows hold now."""
        return self._holding.state

    @property
    def block_ids(self) -> np.ndarray:
        """int32 `[num_rows, width]`, logical block -> block id; 0 where a row has no block. Not to be modified."""
        return self.state.block_ids

    @property
    def exact_ids(self) -> np.ndarray:
        """int32 `[num_rows, width]`, logical block -> exact block; 0 where a row reads codes, or has no block."""
        return self.state.exact_ids

    @property
    def padding(self) -> np.ndarray:
        """int32 `[num_rows]`, leading columns of each row that are not tokens."""
        return self.state.padding

    @property
    def num_rows(self) -> int:
        return self.state.num_rows

    @property
    def num_columns(self) -> int:
        """Tokens seen, padding included."""
        return self.state.num_columns

    @property
    def first_kept_column(self) -> int:
        """The first column that can still be read."""
        return self.state.first_kept_column

    @property
    def generation(self) -> int:
        """Another number whenever blocks were given back or replaced."""
        return self.state.generation

    @property
    def seq_lens(self) -> np.ndarray:
        """int32 `[num_rows]`, tokens of each row."""
        return self.state.seq_lens

    @property
    def wasted_slots(self) -> int:
        """Slots, in the blocks that the rows hold, behind the last token of every row that holds the block."""
        return int((self.block_size - self._filled_slots(self.block_ids)).sum())

    @property
    def num_quantized_tokens(self) -> int:
        """Tokens in blocks that some row reads by block id and not in an exact block; shared ones count once."""
        block_ids = self.block_ids if self.exact_blocks is None else np.where(self.exact_ids == 0, self.block_ids, 0)
        return int(self._filled_slots(block_ids).sum())

    def _filled_slots(self, block_ids: np.ndarray) -> np.ndarray:
        """Slots filled by the longest row, for each block that is named in `block_ids` (like the table)."""
        first_tokens = np.arange(block_ids.shape[1]) * self.block_size
        filled = np.clip(self.seq_lens[:, None] - first_tokens[None], 0, self.block_size)
        most_filled = np.zeros(self._allocator.num_blocks, dtype=np.int64)
        np.maximum.at(most_filled, block_ids, filled)
        held = np.unique(block_ids)
        return most_filled[held[held != 0]]

    def change_to(self, state: TableState) -> Change:
        """The change after which the rows hold `state`."""
        return Change(self._holding, {"state": state}, partial(self._count, self.state, state))

    def commit(self, state: TableState) -> None:
        """Lets the rows hold `state`."""
        self.ledger.commit([self.change_to(state)])

    def extend(
        self, num_rows: int, num_new: int, attended: np.ndarray | None = None, *, record_past: bool = False
    ) -> Extension:
        """Takes what it needs to have `num_new` columns more in every row. The rows stay as they are until `commit`.

        Args:
            num_rows: rows of the batch; an empty table takes this number.
            num_new: new columns.
            attended: bool `[num_rows, num_new]`, the 2-D attention mask of the new columns. Only its leading False
                run matters, in rows that have no token yet: padding that is not stored. `None` for no padding.
            record_past: store all new tokens of a windowed group, so that `crop` can go back into them.

        Raises:
            OutOfBlocksError: nothing has changed then, once the ledger has recovered.
        """
        state = self.state
        if state.num_columns == 0 and state.num_rows != num_rows:
            state = TableState.empty(num_rows, state.generation)
        need = self._need(state, num_new, attended, record_past)
        # Exact blocks first: to take the others may evict cached ones, which cannot be undone.
        exact_count, count = need.exact_count, need.count
        exact_ids = self.exact_blocks.take(exact_count) if exact_count else _NOTHING
        new_ids = self._take(count) if count else _NOTHING
        first_kept_column, num_columns = state.first_kept_column, state.num_columns + num_new
        if self.window is not None and not record_past:
            first_kept_column = max(first_kept_column, num_columns - self.window + 1)
        wide = state.widened(need.width)
        after = TableState(
            block_ids=filled(wide.block_ids, need, need.is_new, need.copying, new_ids),
            exact_ids=filled(wide.exact_ids, need, need.is_new_exact, need.opening, exact_ids),
            padding=need.padding,
            given_up=state.given_up,
            num_columns=num_columns,
            first_kept_column=first_kept_column,
            generation=state.generation + bool(need.copying),
        )
        return Extension(after, self._step(after, num_new, need), moves_into(state, need, new_ids, exact_ids))

    def blocks_to_extend(
        self, num_new: int, attended: np.ndarray | None, *, record_past: bool, state: TableState | None = None
    ) -> tuple[int, int]:
        """Blocks and exact blocks that `extend` with these arguments would take, of rows that hold `state`."""
        need = self._need(self.state if state is None else state, num_new, attended, record_past)
        return need.count, need.exact_count

    def blocks_let_go(self, state: TableState) -> tuple[int, int]:
        """Blocks and exact blocks that nobody would hold any more if the rows held `state`."""
        present = self.state
        num_blocks = self._allocator.num_let_go(present.block_ids, state.block_ids)
        return num_blocks, 0 if self.exact_blocks is None else self.exact_blocks.allocator.num_let_go(
            present.exact_ids, state.exact_ids
        )

    def before_next_step(self, *, record_past: bool = True) -> tuple[TableState, Pairs]:
        """What the rows hold when the next step begins: without what it cannot read exactly, or at all.

        Blocks before `first_kept_column` go then and not before, so that the last step can be undone.

        Args:
            record_past: keep the columns that no later step looks back at, if they are there still.

        Returns:
            The state, the present one if nothing goes, and the exact blocks to be quantized first (`exact_pairs`).
        """
        state = self.state if record_past else self._within_window(self.state)
        if self.window is not None:
            state = state.without_unkept(self.block_size)
        if self.exact_blocks is None:
            return state, []
        entries = self._due(state, state.seq_lens)
        return (state.without_exact(entries), self.exact_pairs(entries)) if len(entries[0]) else (state, [])

    def exact_pairs(self, entries: tuple[np.ndarray, np.ndarray]) -> Pairs:
        """The place of the exact block and the block id at some entries (rows `[n]`, logical blocks `[n]`), each pair
        once."""
        pairs = zip((self.exact_ids[entries] - 1).tolist(), self.block_ids[entries].tolist(), strict=True)
        return list(dict.fromkeys(pairs))

    def snapshot(self, num_columns: int) -> tuple[StepMetadata, Pairs]:
        """A step without new tokens, to read the first `num_columns` columns as a next step would.

        Returns:
            The step, and the exact blocks whose codes it reads, which have to be made first (`exact_pairs`).
        """
        # Blocks that are to go may lack tokens, and so are not to be quantized.
        state = self.state if self.window is None else self.state.without_unkept(self.block_size)
        seq_lens = np.maximum(num_columns - state.padding, 0)
        exact_table, pairs = None, []
        if self.exact_blocks is not None:
            entries = self._due(state, seq_lens)
            exact_table, pairs = state.exact_ids - 1, self.exact_pairs(entries)
            exact_table[entries] = -1
        step = StepMetadata(
            block_table=state.block_ids,
            exact_table=exact_table,
            seq_lens=seq_lens,
            padding=state.padding,
            slots=np.zeros((state.num_rows, 0), dtype=np.int32),
            num_columns=num_columns,
            block_size=self.block_size,
            new_tokens_stored=True,
        )
        return step, pairs

    def can_crop(self, num_columns: int) -> bool:
        """Whether the columns that a step after cropping to `num_columns` looks back at are still there."""
        if self.window is None:
            return True
        return max(num_columns - self.window + 1, 0) >= self.first_kept_column

    def cropped(self, num_columns: int, first_kept_column: int | None = None) -> TableState:
        """The rows without the columns from `num_columns` on.

        Args:
            num_columns: columns to keep.
            first_kept_column: what `first_kept_column` was at that time, to undo the last step. Without it the columns
                that no later step looks back at go too.
        """
        if first_kept_column is None:
            return self._within_window(self.state.cropped(num_columns, self.block_size))
        return self.state._replace(first_kept_column=first_kept_column).cropped(num_columns, self.block_size)

    def within_window(self) -> TableState:
        """The rows without the columns that no later step looks back at."""
        return self._within_window(self.state)

    def selected(self, rows: np.ndarray) -> TableState:
        """`rows` (indices of present rows, repeated or left out at will) in the place of the present ones."""
        if np.array_equal(rows, np.arange(self.num_rows)):
            return self.state
        return self.state.selected(rows).renewed()

    def fork(self, copies: int) -> "BlockTable":
        """A table in which every row stands `copies` times in a row, sharing all blocks with this one."""
        other = BlockTable(self._allocator, self.block_size, self.window, self._take, self.exact_blocks)
        rows = np.arange(self.num_rows).repeat(copies)
        other.commit(self.state.selected(rows)._replace(generation=0))
        return other

    def adopted(
        self, num_columns: int, padding: np.ndarray, block_ids: np.ndarray, exact_ids: np.ndarray | None
    ) -> TableState:
        """An empty table that begins with cached blocks, which it holds from then on.

        Args:
            num_columns: columns of every row.
            padding: int32 `[num_rows]`, leading columns of each row that are not tokens.
            block_ids: int32 `[num_rows, width]`, the blocks of each row's tokens; 0 where there is none, or it has
                left the window.
            exact_ids: int32 `[num_rows, width]`, exact blocks; 0 where a row is to read codes. `None` for none.
        """
        first_kept_column, given_up = 0, np.zeros_like(padding)
        if self.window is not None:
            first_kept_column = max(num_columns - self.window + 1, 0)
            given_up = np.maximum(first_kept_column - padding, 0) // self.block_size
        exact_ids = np.zeros_like(block_ids) if exact_ids is None else exact_ids
        return TableState(block_ids, exact_ids, padding, given_up, num_columns, first_kept_column, self.generation + 1)

    def emptied(self) -> TableState:
        """No rows; the table takes any number of them again."""
        return TableState.empty(0, self.generation + 1)

    def _kinds(self) -> list[tuple[BlockAllocator, str]]:
        """Each allocator, and the ids of a state that are its own."""
        exact = [] if self.exact_blocks is None else [(self.exact_blocks.allocator, "exact_ids")]
        return [(self._allocator, "block_ids"), *exact]

    def _register(self) -> None:
        for allocator, attribute in self._kinds():
            allocator.register(self._holding, attribute)

    def _count(self, old: TableState, new: TableState) -> None:
        self._allocator.count_change(old.block_ids, new.block_ids)
        if self.exact_blocks is not None:
            self.exact_blocks.allocator.count_change(old.exact_ids, new.exact_ids)

    def _within_window(self, state: TableState) -> TableState:
        if self.window is None:
            return state
        first_kept_column = max(state.first_kept_column, state.num_columns - self.window + 1)
        return state._replace(first_kept_column=first_kept_column).without_unkept(self.block_size)

    def _due(self, state: TableState, seq_lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The exact entries (rows `[n]`, logical blocks `[n]`) that rows of these lengths read as codes."""
        return np.nonzero((state.exact_ids != 0) & self.exact_blocks.are_quantized(seq_lens, state.width))

    def _need(self, state: TableState, num_new: int, attended: np.ndarray | None, record_past: bool) -> Need:
        size = self.block_size
        padding = padding_after(state, num_new, attended)
        old_lens = np.maximum(state.num_columns - padding, 0)
        new_lens = state.num_columns + num_new - padding
        store_from = old_lens
        if self.window is not None and not record_past:
            # Tokens that no later step can see are not stored; whole blocks of them, to keep blocks aligned.
            store_from = np.maximum(old_lens, (new_lens - self.window + 1) // size * size)
        first_block = np.maximum(-(-old_lens // size), store_from // size)
        end_block = np.maximum(-(-new_lens // size), first_block)
        writes_on = (old_lens % size != 0) & (new_lens > old_lens) & (store_from == old_lens)
        copying = self._rows_to_copy(state, np.flatnonzero(writes_on), old_lens)
        block = np.arange(max(int(end_block.max()), state.width))[None]
        is_new = (block >= first_block[:, None]) & (block < end_block[:, None])
        is_new_exact, opening = is_new, []
        if self.exact_blocks is not None:
            is_new_exact = is_new & ~self.exact_blocks.are_quantized(new_lens, is_new.shape[1])
            last_exact = state.exact_ids[np.arange(state.num_rows), old_lens // size * writes_on]
            opening = sorted({*copying, *np.flatnonzero(writes_on & (last_exact == 0)).tolist()})
        has_exact = self.exact_blocks is not None
        return Need(padding, old_lens, store_from, is_new, copying, is_new_exact, opening, old_lens // size, has_exact)

    def _rows_to_copy(self, state: TableState, rows: np.ndarray, old_lens: np.ndarray) -> list[int]:
        """Those of `rows`, which write on in their last block, that share it with others. The last of several such
        rows keeps the block, unless it is cached."""
        blocks = state.block_ids[rows, old_lens[rows] // self.block_size]
        shared = self._allocator.must_be_copied(blocks)
        if not shared.any():
            return []
        copying, copied = [], dict.fromkeys(blocks.tolist(), 0)
        for row, block in zip(rows[shared].tolist(), blocks[shared].tolist(), strict=True):
            is_last_holder = self._allocator.references(np.array(block)) - copied[block] == 1
            if not is_last_holder or self._allocator.is_cached(block):
                copied[block] += 1
                copying.append(row)
        return copying

    def _step(self, state: TableState, num_new: int, need: Need) -> StepMetadata:
        size = self.block_size
        seq_lens = state.seq_lens
        width = max(1, -(-int(seq_lens.max()) // size))
        tokens = (seq_lens - num_new)[:, None] + np.arange(num_new, dtype=np.int32)[None]
        is_stored = tokens >= need.store_from[:, None]

        def slots(table: np.ndarray, first_block_id: int) -> np.ndarray:
            block_ids = table[np.arange(state.num_rows)[:, None], np.maximum(tokens, 0) // size]
            return np.where(is_stored & (block_ids >= first_block_id), block_ids * size + tokens % size, -1)

        block_table = state.block_ids[:, :width]
        exact_table = exact_slots = quantized = None
        if self.exact_blocks is not None:
            exact_table = state.exact_ids[:, :width] - 1
            exact_slots = slots(exact_table, 0)
            rows, blocks = np.nonzero(need.is_new[:, :width] & ~need.is_new_exact[:, :width])
            first_columns = blocks * size - (seq_lens - num_new)[rows]
            quantized = np.stack([rows, first_columns, block_table[rows, blocks]], axis=1)
        return StepMetadata(
            block_table=block_table,
            exact_table=exact_table,
            seq_lens=seq_lens,
            padding=state.padding,
            slots=slots(block_table, 1),
            exact_slots=exact_slots,
            quantized=quantized,
            num_columns=state.num_columns,
            block_size=size,
            new_tokens_stored=bool((need.store_from <= need.old_lens).all()),
        )
