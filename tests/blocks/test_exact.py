"""The exact side of a `BlockTable`: which blocks a row reads exactly, when one is quantized, and how it gets back."""

from __future__ import annotations

import numpy as np
import pytest
from hf_paged_kernels import StepMetadata

from hf_paged_cache.blocks.allocator import BlockAllocator
from hf_paged_cache.blocks.exact import ExactBlocks, ExactPolicy, Moves, Pairs
from hf_paged_cache.blocks.tables import BlockTable
from hf_paged_cache.errors import OutOfBlocksError
from tests.support.small_tables import SIZE, extend, mask, slots, state

POLICY = ExactPolicy(recent=4, sinks=4)


class Rows:
    """A table with few blocks and few exact blocks, used as a layer group uses one."""

    def __init__(
        self,
        policy: ExactPolicy = POLICY,
        window: int | None = None,
        num_blocks: int = 60,
        num_exact: int = 60,
    ) -> None:
        self.allocator = BlockAllocator(num_blocks + 1)
        self.exact_allocator = BlockAllocator(num_exact + 1, ledger=self.allocator.ledger)
        self.table = BlockTable(
            self.allocator, SIZE, window, exact_blocks=ExactBlocks(policy, SIZE, self.exact_allocator)
        )

    def feed(self, num_new: int, *marks: str, num_rows: int = 1) -> tuple[StepMetadata, Moves, Pairs]:
        """The step, what it moves, and what was quantized before it."""
        pairs = self.quantize()
        attended = mask(*marks) if marks else None
        num_rows = self.table.num_rows or len(marks) or num_rows
        step, moves = extend(self.table, num_rows, num_new, attended)
        return step, moves, pairs

    def quantize(self) -> Pairs:
        """Quantizes what is to be quantized before the next step."""
        before, pairs = self.table.before_next_step()
        self.table.commit(before)
        return pairs

    @property
    def exact(self) -> list[list[bool]]:
        """Which of the held blocks each row reads exactly."""
        held = -(-self.table.seq_lens // SIZE)
        return [(row[:end] != 0).tolist() for row, end in zip(self.table.exact_ids, held, strict=True)]


def exact_state(rows: Rows) -> tuple:
    blocks = np.arange(rows.allocator.num_blocks), np.arange(rows.exact_allocator.num_blocks)
    return (
        *state(rows.table),
        rows.table.exact_ids.tolist(),
        rows.allocator.references(blocks[0]).tolist(),
        rows.exact_allocator.references(blocks[1]).tolist(),
    )


class TestWhatIsExact:
    @pytest.mark.parametrize(
        ("policy", "length", "quantized"),
        [
            (POLICY, 11, []),
            (POLICY, 12, [1]),
            (POLICY, 15, [1]),
            (POLICY, 16, [1, 2]),
            (ExactPolicy(0, 0), 3, []),
            (ExactPolicy(0, 0), 4, [0]),
            (ExactPolicy(0, 5), 20, [2, 3, 4]),
            (ExactPolicy(5, 0), 12, [0]),
            (ExactPolicy(5, 0), 13, [0, 1]),
            (ExactPolicy(100, 100), 90, []),
        ],
    )
    def test_the_first_and_the_newest_tokens(self, policy: ExactPolicy, length: int, quantized: list[int]) -> None:
        """Whole blocks: sinks are rounded up, and a block is quantized when all of it has left the exact window."""
        exact = ExactBlocks(policy, SIZE, BlockAllocator())
        assert exact.are_quantized(np.array([length]), 30)[0].nonzero()[0].tolist() == quantized

    def test_the_picture_of_the_module(self) -> None:
        exact = ExactBlocks(ExactPolicy(recent=64, sinks=64), 64, BlockAllocator())
        assert exact.are_quantized(np.array([350]), 6)[0].tolist() == [False, True, True, True, False, False]

    @pytest.mark.parametrize("chunk", [1, 3, 4, 7])
    def test_it_is_so_at_every_length_however_the_tokens_came(self, chunk: int) -> None:
        rows = Rows()
        for length in range(chunk, 60, chunk):
            rows.feed(chunk)
            rows.quantize()
            blocks = -(-length // SIZE)
            quantized = rows.table.exact_blocks.are_quantized(np.array([length]), blocks)[0]
            assert rows.exact == [(~quantized).tolist()]
            assert rows.exact_allocator.num_referenced == blocks - int(quantized.sum())
            assert rows.allocator.num_referenced == blocks


class TestQuantizing:
    def test_a_block_is_quantized_once_at_the_begin_of_the_step_after_it_left_the_window(self) -> None:
        rows, quantized = Rows(), {}
        for length in range(1, 30):
            _, moves, pairs = rows.feed(1)
            assert moves == Moves([], [], [])
            quantized |= {(length - 1, block): exact_block for exact_block, block in pairs}
        assert list(quantized) == [(12, 2), (16, 3), (20, 4), (24, 5), (28, 6)]  # tokens held at the time, block id
        assert rows.exact == [[True] + [False] * 5 + [True, True]]

    def test_whole_blocks_of_a_long_prompt_are_quantized_as_they_come(self) -> None:
        """They get no exact block, and their new tokens no exact slot."""
        rows = Rows()
        step, _, pairs = rows.feed(19)
        assert pairs == []
        assert step.block_table.tolist() == [[1, 2, 3, 4, 5]]
        assert step.quantized.tolist() == [[0, 4, 2], [0, 8, 3]]  # row, first column, block id
        assert step.exact.block_table.tolist() == [[0, -1, -1, 1, 2]]
        assert slots(step) == [list(range(4, 23))]
        assert slots(step.exact) == [[0, 1, 2, 3, *[-1] * 8, 4, 5, 6, 7, 8, 9, 10]]
        assert rows.table.before_next_step()[1] == []

    def test_a_block_that_a_chunk_only_completes_is_quantized_later(self) -> None:
        rows = Rows()
        rows.feed(6)
        step, _, _ = rows.feed(13)
        assert step.quantized.tolist() == [[0, 2, 3]]
        assert rows.exact == [[True, True, False, True, True]]
        _, _, pairs = rows.feed(1)
        assert pairs == [(1, 2)]
        assert rows.exact == [[True, False, False, True, True]]

    def test_rows_of_unequal_length_are_quantized_each_in_its_time(self) -> None:
        rows = Rows()
        step, _, _ = rows.feed(18, "x" * 18, "." * 5 + "x" * 13, "." * 16 + "xx")
        assert rows.exact == [[True, False, False, True, True], [True, False, True, True], [True]]
        assert step.quantized.tolist() == [[0, 4, 2], [0, 8, 3], [1, 9, 7]]
        quantized = [pairs for _ in range(8) for _, _, pairs in [rows.feed(1)] if pairs]
        assert [len(pairs) for pairs in quantized] == [1, 1, 1, 1]

    def test_rows_that_share_a_block_quantize_it_together(self) -> None:
        rows = Rows()
        rows.feed(11)
        rows.feed(1)
        rows.table.commit(rows.table.selected(np.zeros(3, dtype=np.int64)))
        _, _, pairs = rows.feed(1)
        assert pairs == [(1, 2)]
        assert rows.exact == [[True, False, True, True]] * 3

    def test_the_generation_tells_that_a_block_is_read_in_another_way(self) -> None:
        rows = Rows()
        rows.feed(11)
        rows.feed(1)
        before = rows.table.generation
        rows.feed(1)
        assert rows.table.generation != before

    @pytest.mark.parametrize("length", [3, 12, 13, 30])
    def test_tokens_read_as_codes_are_counted_once(self, length: int) -> None:
        rows = Rows()
        rows.feed(length)
        rows.quantize()
        rows.table.commit(rows.table.selected(np.zeros(3, dtype=np.int64)))
        assert rows.table.num_quantized_tokens == max((length - 4) // SIZE - 1, 0) * SIZE


class TestForks:
    @pytest.mark.parametrize("num_more", [1, 5, 9, 20])
    def test_each_reads_what_it_would_read_alone(self, num_more: int) -> None:
        """One fork goes on and quantizes blocks that the other still reads exactly."""
        rows, alone = Rows(), Rows()
        rows.feed(14)
        longer = Rows()
        longer.allocator, longer.exact_allocator = rows.allocator, rows.exact_allocator
        longer.table = rows.table.fork(2)
        before = rows.table.exact_ids.copy()
        for _ in range(num_more):
            longer.feed(1)
        assert np.array_equal(rows.table.exact_ids, before)
        alone.feed(14)
        for _ in range(num_more):
            alone.feed(1)
        assert longer.exact == alone.exact * 2
        assert np.array_equal(longer.table.block_ids[:, :3], rows.table.block_ids[[0, 0], :3])

    def test_a_shared_last_block_is_copied_on_both_sides(self) -> None:
        rows = Rows()
        rows.feed(6)
        rows.table.commit(rows.table.selected(np.zeros(3, dtype=np.int64)))
        _, moves, _ = rows.feed(1)
        assert moves == Moves(copies=[(2, 3), (2, 4)], exact_copies=[(1, 2), (1, 3)], dequantized=[])
        assert rows.table.block_ids[:, :2].tolist() == rows.table.exact_ids[:, :2].tolist() == [[1, 3], [1, 4], [1, 2]]

    def test_blocks_live_as_long_as_one_table_holds_them(self) -> None:
        rows = Rows()
        rows.feed(19)
        fork = rows.table.fork(2)
        rows.table.commit(rows.table.emptied())
        assert (rows.allocator.num_referenced, rows.exact_allocator.num_referenced) == (5, 3)
        del fork
        assert (rows.allocator.num_referenced, rows.exact_allocator.num_referenced) == (0, 0)

    def test_rows_move_with_their_exact_blocks(self) -> None:
        rows = Rows()
        rows.feed(13, "x" * 13, "." * 8 + "x" * 5)
        before = rows.table.exact_ids.copy()
        rows.table.commit(rows.table.selected(np.array([1, 1, 0])))
        assert np.array_equal(rows.table.exact_ids, before[[1, 1, 0]])
        rows.table.commit(rows.table.selected(np.array([1])))
        assert rows.exact_allocator.num_referenced == 2


class TestCrop:
    def test_into_a_block_of_codes_dequantizes_it_when_the_row_writes_on(self) -> None:
        rows = Rows()
        rows.feed(30)
        rows.table.commit(rows.table.cropped(10))
        assert rows.exact == [[True, False, False]]
        assert rows.table.num_quantized_tokens == SIZE + 2
        _, moves, _ = rows.feed(1)
        block, exact_block = int(rows.table.block_ids[0, 2]), int(rows.table.exact_ids[0, 2] - 1)
        assert moves == Moves([], [], dequantized=[(block, exact_block)])
        assert rows.exact == [[True, False, True]]
        assert rows.feed(1)[1] == Moves([], [], [])

    def test_a_dequantized_block_is_quantized_anew(self) -> None:
        rows = Rows()
        rows.feed(30)
        rows.table.commit(rows.table.cropped(10))
        quantized = [pairs for _ in range(8) for _, _, pairs in [rows.feed(1)] if pairs]
        assert quantized == [[(int(exact_block), 3)] for exact_block in {quantized[0][0][0]}]

    def test_to_a_block_edge_dequantizes_nothing(self) -> None:
        rows = Rows()
        rows.feed(30)
        rows.table.commit(rows.table.cropped(12))
        _, moves, _ = rows.feed(1)
        assert moves == Moves([], [], [])
        assert rows.exact == [[True, False, False, True]]

    def test_within_the_exact_window_dequantizes_nothing(self) -> None:
        rows = Rows()
        rows.feed(30)
        rows.table.commit(rows.table.cropped(27))
        assert rows.feed(1)[1] == Moves([], [], [])

    def test_of_a_shared_block_dequantizes_it_into_a_copy(self) -> None:
        """The codes stay for those who read them; in layers that store tokens as they are the block is copied."""
        rows = Rows()
        rows.feed(30)
        other = rows.table.fork(1)
        rows.table.commit(rows.table.cropped(10))
        _, moves, _ = rows.feed(1)
        copied, exact_block = int(rows.table.block_ids[0, 2]), int(rows.table.exact_ids[0, 2] - 1)
        assert moves == Moves(copies=[(3, copied)], exact_copies=[], dequantized=[(3, exact_block)])
        assert other.block_ids[0, 2] == 3
        assert other.exact_ids[0, 2] == 0

    def test_gives_exact_blocks_back(self) -> None:
        rows = Rows()
        rows.feed(30)
        rows.table.commit(rows.table.cropped(3))
        assert (rows.allocator.num_referenced, rows.exact_allocator.num_referenced) == (1, 1)
        rows.table.commit(rows.table.cropped(0))
        assert (rows.allocator.num_referenced, rows.exact_allocator.num_referenced) == (0, 0)

    def test_only_rows_that_write_dequantizes(self) -> None:
        rows = Rows()
        rows.feed(30, "x" * 30, "." * 2 + "x" * 28)
        rows.table.commit(rows.table.cropped(12))  # 12 tokens and 10
        _, moves, _ = rows.feed(1)
        assert len(moves.dequantized) == 1


class TestOutOfBlocks:
    @pytest.mark.parametrize("lacking", ["blocks", "exact blocks"])
    @pytest.mark.parametrize("num_new", [1, 4, 5, 14])
    @pytest.mark.parametrize("removed", [0, 1, 15])
    def test_exactly_the_needed_blocks_are_enough_and_nothing_changes_without(
        self, lacking: str, num_new: int, removed: int
    ) -> None:
        """With one block less the same step is refused; once it is given back it succeeds."""
        num_failures = 0
        for num_old in range(20, 20 + 2 * SIZE):
            rows = Rows()
            rows.feed(num_old, "x" * num_old, "..." + "x" * (num_old - 3))
            rows.table.commit(rows.table.cropped(num_old - removed))
            rows.table.commit(rows.table.selected(np.array([0, 0, 1, 1])))
            rows.quantize()
            needed, exact_needed = rows.table.blocks_to_extend(num_new, None, record_past=False)
            rows.allocator.allocate(rows.allocator.num_available - needed)
            rows.exact_allocator.allocate(rows.exact_allocator.num_available - exact_needed)
            allocator = rows.allocator if lacking == "blocks" else rows.exact_allocator
            if (needed if lacking == "blocks" else exact_needed) > 0:
                one_too_many = allocator.allocate(1)
                before = exact_state(rows)
                with pytest.raises(OutOfBlocksError):
                    extend(rows.table, 4, num_new)
                assert exact_state(rows) == before
                allocator.release(one_too_many)
                num_failures += 1
            extend(rows.table, 4, num_new)
            assert (rows.allocator.num_available, rows.exact_allocator.num_available) == (0, 0)
        assert num_failures

    def test_a_step_that_is_taken_back_gives_exact_blocks_back(self) -> None:
        rows = Rows()
        rows.feed(14)
        rows.quantize()
        before = exact_state(rows)[5:]
        rows.feed(9)
        rows.table.commit(rows.table.cropped(14, 0))
        exact_ids, *references = exact_state(rows)[5:]
        assert [row[:4] for row in exact_ids] == [row[:4] for row in before[0]]
        assert references == list(before[1:])


class TestWindow:
    """Layers that look back some tokens only, and quantize those."""

    def test_blocks_that_leave_the_window_are_given_back_on_both_sides(self) -> None:
        rows = Rows(ExactPolicy(recent=4, sinks=0), window=14)
        for length in range(1, 60):
            rows.feed(1)
            held = {block for block in range(-(-length // SIZE)) if rows.table.block_ids[0, block]}
            exact = {block for block in held if rows.table.exact_ids[0, block]}
            assert held == {token // SIZE for token in range(max(length - 14, 0), length)}
            assert exact == {block for block in held if (block + 1) * SIZE > length - 1 - 4}
        assert rows.allocator.num_referenced == len(held)
        assert rows.exact_allocator.num_referenced == len(exact)

    def test_what_no_later_step_sees_is_neither_stored_nor_quantized(self) -> None:
        rows = Rows(ExactPolicy(recent=4, sinks=0), window=10)
        rows.feed(2)
        step, _, _ = rows.feed(30)
        assert step.quantized.tolist() == [[0, 18, 2], [0, 22, 3]]
        assert (np.array(slots(step.exact)) >= 0).sum() == 32 - 28
        assert rows.feed(1)[2] == []

    def test_a_block_with_tokens_that_were_left_out_is_never_quantized(self) -> None:
        """Its slots hold anything: it has left the window before its turn comes."""
        rows = Rows(ExactPolicy(recent=0, sinks=0), window=3)
        rows.feed(2)
        step, _, _ = rows.feed(9)
        assert not step.new_tokens_stored
        assert rows.feed(1)[2] == []


def test_a_reset_table_takes_any_number_of_rows() -> None:
    rows = Rows()
    rows.feed(19, num_rows=2)
    rows.table.commit(rows.table.emptied())
    assert (rows.allocator.num_referenced, rows.exact_allocator.num_referenced) == (0, 0)
    rows.feed(19, num_rows=3)
    assert rows.exact == [[True, False, False, True, True]] * 3


def test_a_step_stays_as_it_was() -> None:
    rows = Rows()
    step, _, _ = rows.feed(11)
    kept, _ = rows.table.snapshot(11)
    rows.feed(20)
    rows.table.commit(rows.table.cropped(3))
    assert step.exact.block_table.tolist() == [[0, 1, 2]]
    assert kept.exact.block_table[:, :3].tolist() == [[0, 1, 2]]
