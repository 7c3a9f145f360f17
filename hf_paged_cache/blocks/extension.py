"""What it takes for the rows of a block table to have more columns, and what they hold then."""

from typing import NamedTuple

import numpy as np
from hf_paged_kernels import StepMetadata

from hf_paged_cache.blocks.exact import Moves
from hf_paged_cache.blocks.table_state import TableState

NO_MOVES = Moves([], [], [])


class Extension(NamedTuple):
    """Rows that are about to have more columns.

    Attributes:
        state: what they hold then.
        step: the new columns.
        moves: what has to be moved before the state is committed.
    """

    state: TableState
    step: StepMetadata
    moves: Moves


class Need(NamedTuple):
    """What it takes to extend a table. Arrays without a stated shape are `[num_rows]`.

    Attributes:
        padding: leading padding of each row afterwards.
        old_lens: tokens of each row before.
        store_from: first new token that is stored.
        is_new: bool `[num_rows, width]`, which logical blocks are new.
        copying: rows whose last block has to be copied first.
        is_new_exact: bool `[num_rows, width]`, which of the new blocks are exact.
        opening: rows whose last block needs a new exact block.
        last_block: logical block in which each row goes on.
        has_exact: whether there are exact blocks at all.
    """

    padding: np.ndarray
    old_lens: np.ndarray
    store_from: np.ndarray
    is_new: np.ndarray
    copying: list[int]
    is_new_exact: np.ndarray
    opening: list[int]
    last_block: np.ndarray
    has_exact: bool

    @property
    def count(self) -> int:
        """Blocks to be allocated."""
        return int(self.is_new.sum()) + len(self.copying)

    @property
    def exact_count(self) -> int:
        """Exact blocks to be allocated."""
        return int(self.is_new_exact.sum()) + len(self.opening) if self.has_exact else 0

    @property
    def width(self) -> int:
        """Logical blocks of the rows afterwards."""
        return self.is_new.shape[1]


def padding_after(state: TableState, num_new: int, attended: np.ndarray | None) -> np.ndarray:
    """Leading padding of each row once `num_new` columns have come."""
    if attended is None:
        return state.padding
    empty = state.padding == state.num_columns
    leading = np.where(attended.any(axis=1), attended.argmax(axis=1), num_new)
    return np.where(empty, state.padding + leading, state.padding).astype(np.int32)


def filled(ids: np.ndarray, need: Need, is_new: np.ndarray, replaced: list[int], taken: np.ndarray) -> np.ndarray:
    """`ids` with blocks that were taken: first those of rows whose last one is replaced, then the new ones."""
    if not taken.size:
        return ids
    ids = ids.copy()
    ids[:, : is_new.shape[1]][is_new] = taken[len(replaced) :]
    if replaced:
        rows = np.array(replaced)
        ids[rows, need.last_block[rows]] = taken[: len(replaced)]
    return ids


def moves_into(state: TableState, need: Need, new_ids: np.ndarray, exact_ids: np.ndarray) -> Moves:
    """What to move from the present blocks to these new ones."""
    if not need.copying and not need.opening:
        return NO_MOVES
    sources = {row: int(state.block_ids[row, need.last_block[row]]) for row in {*need.copying, *need.opening}}
    copies = [(sources[row], target) for row, target in zip(need.copying, new_ids.tolist(), strict=False)]
    moves = Moves(copies, [], [])
    for row, target in zip(need.opening, (exact_ids - 1).tolist(), strict=False):
        exact_source = int(state.exact_ids[row, need.last_block[row]]) - 1
        if exact_source >= 0:
            moves.exact_copies.append((exact_source, target))
        else:
            moves.dequantized.append((sources[row], target))
    return moves
