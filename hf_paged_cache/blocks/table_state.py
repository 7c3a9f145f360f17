"""What the rows of a block table hold at one time, and what they hold after each operation; nothing is changed."""

from typing import NamedTuple

import numpy as np


class TableState(NamedTuple):
    """Rows of block ids. Nobody modifies the arrays: every operation gives a new state.

    Attributes:
        block_ids: int32 `[num_rows, width]`, logical block -> block id; 0 where a row has no block.
        exact_ids: int32 `[num_rows, width]`, logical block -> exact block; 0 where a row reads codes, or has no block.
            All 0 without exact blocks.
        padding: int32 `[num_rows]`, leading columns of each row that are not tokens.
        given_up: int32 `[num_rows]`, leading logical blocks of each row that were given back.
        num_columns: tokens seen, padding included.
        first_kept_column: the first one that can still be read.
        generation: another number whenever blocks were given back or replaced.
    """

    block_ids: np.ndarray
    exact_ids: np.ndarray
    padding: np.ndarray
    given_up: np.ndarray
    num_columns: int
    first_kept_column: int
    generation: int

    @classmethod
    def empty(cls, num_rows: int, generation: int) -> "TableState":
        """Rows without tokens."""
        ids, zeros = np.zeros((num_rows, 1), dtype=np.int32), np.zeros(num_rows, dtype=np.int32)
        return cls(ids, ids, zeros, zeros, 0, 0, generation)

    @property
    def num_rows(self) -> int:
        return len(self.padding)

    @property
    def width(self) -> int:
        """Logical blocks of a row."""
        return self.block_ids.shape[1]

    @property
    def seq_lens(self) -> np.ndarray:
        """int32 `[num_rows]`, tokens of each row."""
        return self.num_columns - self.padding

    def widened(self, width: int) -> "TableState":
        """With room for at least `width` logical blocks a row."""
        if width <= self.width:
            return self
        more = ((0, 0), (0, max(width, 2 * self.width) - self.width))
        return self._replace(block_ids=np.pad(self.block_ids, more), exact_ids=np.pad(self.exact_ids, more))

    def without(self, entries: np.ndarray) -> "TableState":
        """Without the blocks where the bool `[num_rows, width]` says so."""
        return self._replace(
            block_ids=np.where(entries, 0, self.block_ids), exact_ids=np.where(entries, 0, self.exact_ids)
        ).renewed()

    def without_exact(self, entries: tuple[np.ndarray, np.ndarray]) -> "TableState":
        """Reading the codes of blocks (rows `[n]`, logical blocks `[n]`)."""
        exact_ids = self.exact_ids.copy()
        exact_ids[entries] = 0
        return self._replace(exact_ids=exact_ids).renewed()

    def exchanged(self, entries: tuple[np.ndarray, np.ndarray], block_ids: np.ndarray) -> "TableState":
        """With blocks `[n]` of the same content in the place of those at entries (rows `[n]`, logical blocks `[n]`)."""
        ids = self.block_ids.copy()
        ids[entries] = block_ids
        return self._replace(block_ids=ids).renewed()

    def without_unkept(self, block_size: int) -> "TableState":
        """Without the blocks before `first_kept_column`."""
        unkept = np.maximum(self.first_kept_column - self.padding, 0) // block_size
        if not (unkept > self.given_up).any():
            return self
        state = self.without(np.arange(self.width)[None] < unkept[:, None])
        return state._replace(given_up=np.maximum(self.given_up, unkept).astype(np.int32))

    def cropped(self, num_columns: int, block_size: int) -> "TableState":
        """Without the columns from `num_columns` on, and the blocks that no row needs any more."""
        if num_columns >= self.num_columns:
            return self
        shorter = self._replace(num_columns=num_columns, padding=np.minimum(self.padding, num_columns))
        kept = -(-shorter.seq_lens // block_size)
        return shorter.without(np.arange(self.width)[None] >= kept[:, None])._replace(
            given_up=np.minimum(self.given_up, kept),
            first_kept_column=self.first_kept_column if num_columns else 0,
        )

    def selected(self, rows: np.ndarray) -> "TableState":
        """With `rows`, indices of present ones, in their place."""
        return self._replace(
            block_ids=self.block_ids[rows],
            exact_ids=self.exact_ids[rows],
            padding=self.padding[rows],
            given_up=self.given_up[rows],
        )

    def renewed(self) -> "TableState":
        """Known to be another state."""
        return self._replace(generation=self.generation + 1)
