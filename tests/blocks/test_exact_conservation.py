"""`test_conservation` for codecs that quantize whole blocks: no exact block is lost either, and each row reads codes or
exact numbers as its own length and history say, whatever the rows that share its blocks do.

The code of a number is that number and `CODE`; the code of a code is itself, as for blocks that were dequantized.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hf_paged_kernels import StepMetadata
from hypothesis import settings
from hypothesis.stateful import invariant

from hf_paged_cache.blocks.allocator import BlockAllocator
from hf_paged_cache.blocks.exact import ExactBlocks, ExactPolicy, Moves, Pairs
from hf_paged_cache.blocks.tables import BlockTable
from tests.blocks.test_conservation import GONE, NUM_BLOCKS, PROFILE, SIZE, Cache, Conservation

NUM_EXACT = 16
CODE = 1 << 40


class ExactConservation(Conservation):
    """The pool of numbers is that of a layer that stores them as they are; beside it are codes and exact blocks."""

    policy = ExactPolicy(recent=5, sinks=3)

    def __init__(self) -> None:
        super().__init__()
        self.exact_allocator = BlockAllocator(NUM_EXACT + 1, ledger=self.allocator.ledger)
        self.exact_pool = np.full((NUM_EXACT + 1) * SIZE, GONE)
        self.codes = np.full((NUM_BLOCKS + 1) * SIZE, GONE)

    def new_table(self, window: int | None) -> BlockTable:
        exact = ExactBlocks(self.policy, SIZE, self.exact_allocator)
        return BlockTable(self.allocator, SIZE, window, exact_blocks=exact)

    def give_up_old_tokens(self, cache: Cache) -> None:
        before, pairs = cache.table.before_next_step()
        self.quantize(pairs)
        cache.table.commit(before)
        self.mark_codes(cache, [0] * len(cache.rows))

    def quantize(self, pairs: Pairs) -> None:
        tables = [live.table for live in self.live]
        for exact_block, block in pairs:
            before = block_of(self.codes, block).copy()
            self.quantize_block(block, block_of(self.exact_pool, exact_block))
            if any(((table.block_ids == block) & (table.exact_ids == 0)).any() for table in tables):
                assert (block_of(self.codes, block) == before).all(), "codes changed under a row that reads them"

    def move(self, moves: Moves) -> None:
        super().move(moves)
        for block, exact_block in moves.dequantized:
            assert GONE not in block_of(self.codes, block)
            block_of(self.exact_pool, exact_block)[:] = block_of(self.codes, block)
        for source, target in moves.exact_copies:
            block_of(self.exact_pool, target)[:] = block_of(self.exact_pool, source)

    def write(self, cache: Cache, step: StepMetadata, leading: list[int], num_new: int) -> None:
        old_lens = [len(cache.tokens(row)) for row in range(len(cache.rows))]
        super().write(cache, step, leading, num_new)
        references = self.exact_references()
        new = [row[-num_new:] for row in cache.rows]
        for row, column in np.argwhere(step.exact.slots >= 0).tolist():
            slot = int(step.exact.slots[row, column])
            assert references[slot // SIZE + 1] == 1, "an exact block was written that others hold"
            self.exact_pool[slot] = new[row][column]
        for row, first, block in step.quantized.tolist():
            self.quantize_block(block, np.array(new[row][first : first + SIZE]))
        self.mark_codes(cache, old_lens)

    def quantize_block(self, block: int, numbers: np.ndarray) -> None:
        assert GONE not in numbers
        block_of(self.codes, block)[:] = CODE + numbers % CODE

    def mark_codes(self, cache: Cache, first_tokens: list[int]) -> None:
        """In the model: the blocks from these tokens on that the newest ones have moved on from are codes now."""
        for row, first in enumerate(first_tokens):
            tokens = cache.tokens(row)
            padding = len(cache.rows[row]) - len(tokens)
            for token in range(len(tokens)):
                if token // SIZE * SIZE >= first and self.is_quantized(token // SIZE, len(tokens)):
                    tokens[token] = CODE + tokens[token] % CODE
            cache.rows[row] = [None] * padding + tokens

    def is_quantized(self, block: int, length: int) -> bool:
        return block * SIZE >= self.policy.sinks and (block + 1) * SIZE <= length - self.policy.recent

    def expected_refusal(
        self, cache: Cache, num_new: int, leading: list[int], record_past: bool
    ) -> tuple[int, int, int] | None:
        needed, available = (
            self.exact_needed(cache, num_new, leading, record_past),
            NUM_EXACT - len(self.exact_references()),
        )
        if needed > available:
            return needed, available, NUM_EXACT
        return super().expected_refusal(cache, num_new, leading, record_past)

    def exact_needed(self, cache: Cache, num_new: int, leading: list[int], record_past: bool) -> int:
        """New blocks that stay exact, and blocks that are written to and shared or codes."""
        references, writers, needed = self.references(), {}, 0
        for row, skipped in enumerate(leading):
            old = len(cache.tokens(row))
            new = old + num_new - skipped
            stored_from = old
            if cache.table.window is not None and not record_past:
                stored_from = max(old, (new - cache.table.window + 1) // SIZE * SIZE)
            blocks = {token // SIZE for token in range(stored_from, new)}
            needed += len([block for block in blocks if block * SIZE >= old and not self.is_quantized(block, new)])
            if stored_from == old and new > old and old % SIZE:
                writers.setdefault(int(cache.table.block_ids[row, old // SIZE]), []).append((row, old // SIZE))
        for block, entries in writers.items():
            keeps = entries[-1:] if references[block] == len(entries) else []
            needed += len([entry for entry in entries if entry not in keeps or cache.table.exact_ids[entry] == 0])
        return needed

    def exact_references(self) -> dict[int, int]:
        ids = [cache.table.exact_ids.reshape(-1) for cache in self.live]
        blocks, counts = np.unique(np.concatenate([np.zeros(1, dtype=np.int32), *ids]), return_counts=True)
        return dict(zip(blocks[1:].tolist(), counts[1:].tolist(), strict=True))

    def state(self, cache: Cache) -> tuple:
        return *super().state(cache), cache.table.exact_ids.reshape(-1).tolist() if cache.table.num_columns else []

    def poison_unheld(self) -> None:
        super().poison_unheld()
        held, exact_held = self.references(), self.exact_references()
        for block in set(range(NUM_BLOCKS + 1)) - set(held):
            block_of(self.codes, block)[:] = GONE
        for exact_block in set(range(1, NUM_EXACT + 1)) - set(exact_held):
            block_of(self.exact_pool, exact_block - 1)[:] = GONE

    @invariant()
    def every_exact_block_is_held_or_free(self) -> None:
        references = self.exact_references()
        counts = self.exact_allocator.references(np.arange(NUM_EXACT + 1))
        assert {block: int(counts[block]) for block in counts.nonzero()[0].tolist()} == references
        probe = copy.deepcopy(self.exact_allocator)
        assert sorted([*probe.allocate(probe.num_available).tolist(), *references]) == list(range(1, NUM_EXACT + 1))

    @invariant()
    def every_exact_block_belongs_to_one_held_block(self) -> None:
        owners: dict[int, int] = {}
        for cache in self.live:
            ids, exact_ids = cache.table.block_ids, cache.table.exact_ids
            assert ids.shape == exact_ids.shape
            for exact_block, block in zip(
                exact_ids[exact_ids != 0].tolist(), ids[exact_ids != 0].tolist(), strict=True
            ):
                assert block != 0
                assert owners.setdefault(exact_block, block) == block

    @invariant()
    def every_token_reads_back(self) -> None:
        self.poison_unheld()
        for cache in self.live:
            if not cache.num_columns:
                continue
            snapshot, pairs = cache.table.snapshot(cache.num_columns)
            self.quantize(pairs)
            assert cache.table.first_kept_column == cache.kept_from
            for row, columns in enumerate(cache.rows):
                tokens = cache.tokens(row)
                first = max(cache.kept_from - (len(columns) - len(tokens)), 0)
                wanted = np.arange(first, len(tokens))
                slots, exact_slots = (step.slots_of(wanted[None])[row] for step in (snapshot, snapshot.exact))
                assert (slots >= 0).all()
                assert self.pool[slots].tolist() == [number % CODE for number in tokens[first:]]
                # The row itself, which reads exactly what it can, and a reader, who sees what a next step would.
                exact_ids = cache.table.exact_ids[row, wanted // SIZE]
                own_slots = np.where(exact_ids > 0, (exact_ids - 1) * SIZE + wanted % SIZE, -1)
                assert self.read(slots, own_slots) == tokens[first:]
                seen = [
                    CODE + number % CODE if self.is_quantized(token // SIZE, len(tokens)) else number
                    for token, number in enumerate(tokens)
                ]
                assert self.read(slots, exact_slots) == seen[first:]

    def read(self, slots: np.ndarray, exact_slots: np.ndarray) -> list[int]:
        """Exact blocks where there are some, codes elsewhere."""
        return np.where(exact_slots >= 0, self.exact_pool[np.maximum(exact_slots, 0)], self.codes[slots]).tolist()


class ExactConservationWithoutExactTokens(ExactConservation):
    policy = ExactPolicy(recent=0, sinks=0)


def block_of(pool: np.ndarray, block: int) -> np.ndarray:
    return pool[block * SIZE : (block + 1) * SIZE]


class TestExactConservation(ExactConservation.TestCase):
    settings = settings(PROFILE, max_examples=20, stateful_step_count=50)


class TestExactConservationWithoutExactTokens(ExactConservationWithoutExactTokens.TestCase):
    settings = settings(PROFILE, max_examples=20, stateful_step_count=50)


@pytest.mark.slow
class TestExactConservationAtLength(ExactConservation.TestCase):
    settings = settings(PROFILE, max_examples=600, stateful_step_count=120)


@pytest.mark.slow
class TestExactConservationWithoutExactTokensAtLength(ExactConservationWithoutExactTokens.TestCase):
    settings = settings(PROFILE, max_examples=600, stateful_step_count=120)
