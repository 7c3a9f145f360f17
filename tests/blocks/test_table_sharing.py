"""`BlockTable`: rows that move, fork and share blocks, what is copied when they part, and when there is no room."""

import numpy as np
import pytest

from hf_paged_cache.blocks.allocator import BlockAllocator
from hf_paged_cache.blocks.tables import BlockTable
from hf_paged_cache.errors import OutOfBlocksError
from tests.support.small_tables import SIZE, blocks_of, extend, make_table, mask, slots, state


class TestSelectAndFork:
    def test_rows_move_with_their_blocks(self):
        table, allocator = make_table()
        extend(table, 3, 5, mask("xxxxx", ".xxxx", "....x"))
        table.commit(table.selected(np.array([2, 0, 0])))
        assert table.block_ids[:, :2].tolist() == [[4, 0], [1, 2], [1, 2]]
        assert table.padding.tolist() == [4, 0, 0]
        assert allocator.references(np.arange(1, 5)).tolist() == [2, 2, 0, 1]

    @pytest.mark.parametrize("rows", [[0], [1, 1, 1, 1, 1], [1, 0], [0, 0, 1, 1]])
    def test_the_number_of_rows_may_change(self, rows):
        table, allocator = make_table()
        extend(table, 2, 5)
        table.commit(table.selected(np.array(rows)))
        assert table.num_rows == len(rows)
        assert allocator.num_referenced == 2 * len(set(rows))
        table.commit(table.emptied())
        assert allocator.num_referenced == 0

    def test_a_fork_repeats_every_row_on_the_same_blocks(self):
        table, allocator = make_table()
        extend(table, 2, 5, mask("xxxxx", "..xxx"))
        before = state(table)
        fork = table.fork(3)
        assert fork.block_ids[:, :2].tolist() == [[1, 2]] * 3 + [[3, 0]] * 3
        assert fork.padding.tolist() == [0, 0, 0, 2, 2, 2]
        assert fork.num_columns == 5
        assert allocator.references(np.array([1, 2, 3])).tolist() == [4, 4, 4]
        extend(fork, 6, 4)
        fork.commit(fork.cropped(1))
        assert state(table) == before

    def test_blocks_live_as_long_as_one_table_holds_them(self):
        table, allocator = make_table()
        extend(table, 1, 9)
        fork = table.fork(2)
        del table
        assert allocator.num_referenced == 3
        fork.commit(fork.selected(np.array([1])))
        assert allocator.num_referenced == 3
        del fork
        assert allocator.num_referenced == 0

    def test_a_fork_of_a_windowed_table_knows_what_is_kept(self):
        table, allocator = make_table(window=5)
        extend(table, 1, 14)
        fork = table.fork(2)
        assert fork.first_kept_column == table.first_kept_column == 10
        extend(fork, 2, 20)
        fork.commit(fork.before_next_step()[0])
        del fork
        extend(table, 1, 1)
        table.commit(table.before_next_step()[0])
        assert allocator.num_referenced == 2


class TestCopyOnWrite:
    @pytest.mark.parametrize("num_columns", range(1, 10))
    @pytest.mark.parametrize("num_new", [1, 2, 5])
    def test_the_last_of_several_sharers_keeps_the_block(self, num_columns, num_new):
        """Only a partly filled last block is copied; at a multiple of the block size nothing is."""
        table, allocator = make_table()
        extend(table, 1, num_columns)
        last = int(table.block_ids[0, blocks_of(num_columns) - 1])
        table.commit(table.selected(np.zeros(3, dtype=np.int64)))
        assert table.blocks_to_extend(num_new, None, record_past=False)[0] == (
            3 * (blocks_of(num_columns + num_new) - blocks_of(num_columns)) + (2 if num_columns % SIZE else 0)
        )
        step, moves = extend(table, 3, num_new)

        if num_columns % SIZE == 0:
            assert moves.copies == []
            return
        sources, targets = zip(*moves.copies, strict=True)
        assert sources == (last, last)
        written = step.block_table[:, num_columns // SIZE]
        assert sorted(written.tolist()) == sorted([last, *targets])
        assert allocator.references(written).tolist() == [1, 1, 1]
        assert len(np.unique(step.slots)) == step.slots.size
        full_blocks = step.block_table[:, : num_columns // SIZE]
        assert (full_blocks == full_blocks[0]).all()

    def test_a_table_and_its_fork_part_when_one_of_them_writes(self):
        table, _ = make_table()
        extend(table, 1, 6)
        fork = table.fork(1)
        _, moves = extend(fork, 1, 1)
        assert moves.copies == [(2, 3)]
        assert table.block_ids[0, :2].tolist() == [1, 2]
        assert fork.block_ids[0, :2].tolist() == [1, 3]
        assert extend(table, 1, 1)[1].copies == []

    def test_a_fork_that_is_gone_needs_no_copy(self):
        """Nor the block for it: a full pool is no obstacle."""
        table, allocator = make_table(num_blocks=2)
        extend(table, 1, 6)
        fork = table.fork(4)
        del fork
        assert table.blocks_to_extend(1, None, record_past=False) == (0, 0)
        step, moves = extend(table, 1, 1)
        assert moves.copies == []
        assert slots(step) == [[10]]
        assert allocator.num_referenced == 2

    def test_cropping_back_into_a_shared_block_copies_it_when_it_is_written(self):
        table, _ = make_table()
        extend(table, 1, 8)
        fork = table.fork(1)
        fork.commit(fork.cropped(7))
        _, moves = extend(fork, 1, 1)
        assert moves.copies == [(2, 3)]
        assert extend(table, 1, 1)[1].copies == []

    def test_only_rows_that_write_copy(self):
        """Rows of unequal padding: some end at a block edge, some within a block, one has not begun."""
        table, _ = make_table()
        extend(table, 3, 6, mask("xxxxxx", "..xxxx", "......"))
        table.commit(table.selected(np.array([0, 0, 1, 1, 2, 2])))
        _, moves = extend(table, 6, 1, mask("x", "x", "x", "x", ".", "."))
        assert len(moves.copies) == 1
        assert moves.copies[0][0] == 2

    def test_a_copy_that_the_window_makes_needless_is_not_made(self):
        """A chunk so long that the shared block is behind the window when it ends."""
        table, _ = make_table(window=3)
        extend(table, 1, 6)
        table.commit(table.selected(np.array([0, 0])))
        _, moves = extend(table, 2, 9)
        assert moves.copies == []


class TestOutOfBlocks:
    @pytest.mark.parametrize("num_new", range(1, SIZE + 2))
    @pytest.mark.parametrize("sharers", [1, 3])
    @pytest.mark.parametrize("window", [None, 3])
    def test_exactly_the_needed_blocks_are_enough_at_every_residue(self, num_new, sharers, window):
        """With one block less nothing has changed; once it is given back the same step succeeds."""
        num_failures = 0
        for num_old in range(1, 2 * SIZE + 1):
            table, allocator = make_table(num_blocks=60, window=window)
            extend(table, 2, num_old, mask("x" * num_old, "." + "x" * (num_old - 1)))
            table.commit(table.selected(np.arange(2).repeat(sharers)))
            needed, _ = table.blocks_to_extend(num_new, None, record_past=False)
            others = allocator.allocate(allocator.num_available - needed)
            if needed:
                one_too_many = allocator.allocate(1)
                before, references = state(table), allocator.references(np.arange(61)).tolist()
                with pytest.raises(OutOfBlocksError) as error:
                    extend(table, 2 * sharers, num_new)
                assert (error.value.needed, error.value.free, error.value.total) == (needed, needed - 1, 60)
                assert state(table) == before
                assert allocator.references(np.arange(61)).tolist() == references
                allocator.release(one_too_many)
                num_failures += 1
            step, _ = extend(table, 2 * sharers, num_new)
            assert step.num_columns == num_old + num_new
            assert allocator.num_available == 0
            allocator.release(others)
        assert num_failures

    def test_an_empty_table_takes_another_number_of_rows_after_it(self):
        table, allocator = make_table(num_blocks=3)
        with pytest.raises(OutOfBlocksError, match="needs 4 more"):
            extend(table, 4, 1)
        assert allocator.num_referenced == 0
        step, _ = extend(table, 3, 4)
        assert step.batch == 3


class TestGeneration:
    """It tells those who hold a step whether the blocks still hold what they did."""

    def test_it_stays_while_tokens_are_only_added(self):
        table, _ = make_table(window=10)
        extend(table, 2, 5)
        before = table.generation
        extend(table, 2, 3)
        table.commit(table.before_next_step()[0])
        table.commit(table.cropped(8))
        table.commit(table.selected(np.array([0, 1])))
        table.fork(2)
        assert table.generation == before

    @pytest.mark.parametrize(
        "change",
        [
            lambda table: table.commit(table.cropped(7)),
            lambda table: table.commit(table.selected(np.array([1, 0]))),
            lambda table: table.commit(table.selected(np.array([0]))),
            lambda table: table.commit(table.emptied()),
            lambda table: table.commit(table.before_next_step()[0]),
            lambda table: table.commit(table.within_window()),
            lambda table: extend(table, 2, 1),
        ],
        ids=["crop", "reorder", "drop a row", "reset", "leave the window", "restrict to the window", "copy on write"],
    )
    def test_it_changes_when_blocks_move_or_are_given_back(self, change):
        table, _ = make_table(window=4)
        extend(table, 2, 9)
        fork = table.fork(1)
        before = table.generation
        change(table)
        assert table.generation != before
        assert fork.generation == 0


def test_a_block_whose_content_is_known_is_copied_before_it_is_written() -> None:
    """Whoever looks it up later has to find what it held, also if the only row that holds it goes on differently."""
    allocator = BlockAllocator(8)
    table = BlockTable(allocator, block_size=4)
    extend(table, 1, 6)
    known = int(table.block_ids[0, 1])
    allocator.mark_cached([known])
    table.commit(table.cropped(5))
    _, moves = extend(table, 1, 1)
    assert moves.copies == [(known, int(table.block_ids[0, 1]))]
    assert table.block_ids[0, 1] != known
    assert allocator.num_evictable == 1
