"""`paged_attention` over the tables of a `BlockTable`, step after step: chunks, decode, beams, drafts."""

import math

import numpy as np
import pytest
import torch
from hf_paged_kernels import copy_blocks, paged_attention, write_kv

from hf_paged_cache.blocks.allocator import BlockAllocator
from hf_paged_cache.blocks.tables import BlockTable
from tests.kernels import oracle
from tests.kernels.hostile import POISONS, poisoned_blocks
from tests.support.combinations import combined
from tests.support.small_tables import extend


class Batch:
    """Rows as a model feeds them, step by step: in the blocks of a `BlockTable`, and as plain rows for the oracle.

    Blocks that nobody holds are poisoned before each step, so that one that is handed out again holds no old tokens.
    """

    heads, dims = (4, 2), (16, 24)

    def __init__(self, num_rows: int, block_size: int, window: int | None, poison: float) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.window, self.poison = window, poison
        self.allocator = BlockAllocator(40)
        shuffled = np.random.default_rng(0).permutation(self.allocator.allocate(39))
        self.allocator.release(shuffled)
        self.table = BlockTable(self.allocator, block_size, window)
        self.blocks = poisoned_blocks(40, self.heads[1], block_size, self.dims, torch.float64, poison)
        empty = oracle.Row(*(torch.zeros(self.heads[1], 0, dim, dtype=torch.float64) for dim in self.dims))
        self.rows = [empty] * num_rows
        self.seen = [[] for _ in range(num_rows)]  # the attention mask of each row's tokens

    def feed(self, num_new: int, attended: list[str] | None = None, *, record_past: bool = False) -> None:
        """A forward pass; `attended` draws the attention mask of the new columns, `"..xxx.x"`."""
        num_rows = len(self.rows)
        mask = np.array([[mark == "x" for mark in row] for row in attended or ["x" * num_new] * num_rows])
        self.table.commit(self.table.before_next_step()[0])
        is_free = torch.from_numpy(self.allocator.references(np.arange(40)) == 0)
        self.step, moves = extend(self.table, num_rows, num_new, mask, record_past=record_past)
        for plane in self.blocks.planes:
            plane[:, is_free] = self.poison
        if moves.copies:
            copy_blocks([self.blocks], moves.copies)
        self.new_kv = (
            self.random(self.heads[1], num_new, self.dims[0]),
            self.random(self.heads[1], num_new, self.dims[1]),
        )
        write_kv(self.blocks, *self.new_kv, self.step)
        for b, row in enumerate(self.rows):
            first = 0 if row.length else int(mask[b].argmax()) if mask[b].any() else num_new
            self.rows[b] = row.then(*(states[b, :, first:] for states in self.new_kv))
            self.seen[b] = self.seen[b] + mask[b, first:].tolist()

    def select(self, rows: list[int]) -> None:
        self.table.commit(self.table.selected(np.array(rows)))
        self.rows, self.seen = [self.rows[row] for row in rows], [self.seen[row] for row in rows]

    def crop(self, num_columns: int) -> None:
        removed = self.table.num_columns - num_columns
        self.table.commit(self.table.cropped(num_columns))
        kept = [max(row.length - removed, 0) for row in self.rows]
        self.rows = [oracle.Row(row.key[:, :n], row.value[:, :n]) for row, n in zip(self.rows, kept, strict=True)]
        self.seen = [seen[:n] for seen, n in zip(self.seen, kept, strict=True)]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(len(self.rows), *shape, dtype=torch.float64, generator=self.generator)

    def check(self) -> None:
        """Attention of the last step is that of the oracle, with the new tokens from `new_kv` and from the blocks."""
        query = self.random(self.heads[0], self.step.query_length, self.dims[0])
        key_mask = torch.zeros(len(self.rows), self.step.max_seq_len, dtype=torch.bool)
        for b, seen in enumerate(self.seen):
            key_mask[b, : len(seen)] = torch.tensor(seen, dtype=torch.bool)
        has_holes = any(False in seen for seen in self.seen)
        options = {"scale": 0.4, "window": self.window, "key_mask": key_mask if has_holes else None}
        for extra in ({}, {"softcap": 2.0, "sinks": torch.tensor([-1.0, 0.0, 1.0, 2.0])}):
            expected, _ = oracle.attention(query, self.rows, **options, **extra)
            for new_kv in (self.new_kv, None) if self.step.new_tokens_stored else (self.new_kv,):
                out = paged_attention(query, self.blocks, self.step, **options, **extra, new_kv=new_kv)
                torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


@combined(poison=POISONS, window=[None, 3, 16, 20, 100], block_size=[16, 32])
def test_prefill_in_chunks_then_decode(poison, window, block_size):
    """Left padding that fills no, some, all of the first chunk, and goes on into the second; then any chunk length."""
    batch = Batch(4, block_size, window, poison)
    batch.feed(9, ["xxxxxxxxx", "...xxxxxx", ".........", "........."])
    batch.check()
    batch.feed(5, ["xxxxx", "xxxxx", "xxxxx", "...xx"])
    batch.check()
    for num_new in (1, 1, 33, 2, 8, 40, 1, 1, 1):
        batch.feed(num_new)
        batch.check()


@pytest.mark.parametrize("window", [None, 12])
def test_holes_in_the_mask_stay_holes(window):
    batch = Batch(3, 16, window, math.nan)
    batch.feed(10, ["xx..xxxxx.", "..xx.x.xxx", "......x..."])
    batch.check()
    for attended in (["x", ".", "."], [".x.x.x.x.x"] * 3, ["x"] * 3, ["xx", "..", ".x"]):
        batch.feed(len(attended[0]), attended)
        batch.check()


@pytest.mark.parametrize("window", [None, 5, 16])
def test_long_decode_reuses_the_blocks_that_left_the_window(window):
    batch = Batch(2, 16, window, math.nan)
    batch.feed(7, ["xxxxxxx", "....xxx"])
    for _ in range(70):
        batch.feed(1)
        batch.check()
    assert batch.allocator.num_referenced == (2 * 5 if window is None else 2 * 2 if window == 16 else 2)


@pytest.mark.parametrize("window", [None, 20])
def test_rows_that_share_blocks_and_part(window):
    """Beam search: rows are repeated, reordered and dropped, and each goes on with tokens of its own."""
    batch = Batch(2, 16, window, math.nan)
    batch.feed(21, ["x" * 21, "." * 6 + "x" * 15])
    for rows in ([0, 0, 1, 1], [0, 0, 0, 3], [3, 0, 1, 2], [2, 2], [1, 1, 0, 0], [0, 1, 2, 3]):
        batch.select(rows)
        for _ in range(5):
            batch.feed(1)
            batch.check()


@pytest.mark.parametrize("window", [None, 6, 18])
def test_a_draft_that_is_taken_back(window):
    """Assisted decoding: past the window nothing is lost while it is kept, and the next tokens replace the draft."""
    batch = Batch(2, 16, window, math.nan)
    batch.feed(14, ["x" * 14, "..." + "x" * 11])
    for accepted in (0, 3, 5, 1):
        before = batch.table.num_columns
        batch.feed(6, record_past=True)
        batch.check()
        batch.crop(before + accepted)
    batch.feed(1)
    batch.check()
