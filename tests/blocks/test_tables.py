"""`BlockTable`: how rows grow, shrink and leave their window, and what that takes of the allocator."""

import numpy as np
import pytest

from hf_paged_cache.blocks.allocator import BlockAllocator
from hf_paged_cache.blocks.tables import BlockTable
from tests.support.small_tables import SIZE, blocks_of, extend, make_table, mask, slots, state


class TestExtend:
    def test_rows_fill_their_blocks(self):
        table, allocator = make_table()
        step, moves = extend(table, 2, 5)
        assert moves.copies == []
        assert step.block_table.tolist() == [[1, 2], [3, 4]]
        assert step.seq_lens.tolist() == [5, 5]
        assert slots(step) == [[4, 5, 6, 7, 8], [12, 13, 14, 15, 16]]
        assert (step.num_columns, step.query_length, step.first_column) == (5, 5, 0)
        assert step.new_tokens_stored

        step, moves = extend(table, 2, 3)
        assert moves.copies == []
        assert step.block_table.tolist() == [[1, 2], [3, 4]]
        assert slots(step) == [[9, 10, 11], [17, 18, 19]]
        assert allocator.num_referenced == 4

        step, _ = extend(table, 2, 1)
        assert step.block_table.tolist() == [[1, 2, 5], [3, 4, 6]]
        assert slots(step) == [[20], [24]]

    @pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 16])
    def test_a_row_holds_the_blocks_of_its_tokens_at_every_length(self, chunk):
        table, allocator = make_table()
        for num_columns in range(chunk, 40, chunk):
            extend(table, 3, chunk)
            assert allocator.num_referenced == 3 * blocks_of(num_columns)
            assert table.wasted_slots == 3 * (-num_columns % SIZE)

    def test_a_step_stays_as_it_was(self):
        table, _ = make_table()
        step, _ = extend(table, 1, 5)
        kept, _ = table.snapshot(table.num_columns)
        extend(table, 1, 5)
        table.commit(table.cropped(2))
        table.commit(table.emptied())
        assert step.block_table.tolist() == [[1, 2]]
        assert step.seq_lens.tolist() == kept.seq_lens.tolist() == [5]
        assert kept.slots_of(np.arange(6)[None]).tolist() == [[4, 5, 6, 7, 8, -1]]

    def test_block_ids_are_taken_from_whoever_lends_them(self):
        allocator = BlockAllocator(9)
        asked = []

        def take(count: int) -> np.ndarray:
            asked.append(count)
            return allocator.take(count)

        table = BlockTable(allocator, SIZE, take=take)
        extend(table, 2, 6)
        extend(table.fork(1), 2, 1)
        assert asked == [4, 2]


class TestPadding:
    def test_leading_padding_takes_no_slots(self):
        """The example of the class: blocks align to real tokens, whatever stands before them."""
        table, allocator = make_table()
        step, _ = extend(table, 2, 7, mask("xxxxxxx", "...xxxx"))
        assert table.padding.tolist() == [0, 3]
        assert table.seq_lens.tolist() == [7, 4]
        assert step.block_table.tolist() == [[1, 2], [3, 0]]
        assert slots(step) == [[4, 5, 6, 7, 8, 9, 10], [-1, -1, -1, 12, 13, 14, 15]]
        assert step.new_tokens_stored
        assert allocator.num_referenced == 3

    def test_padding_goes_on_over_chunks_until_a_row_begins(self):
        table, allocator = make_table()
        step, _ = extend(table, 3, 3, mask("xxx", "...", "..x"))
        assert table.seq_lens.tolist() == [3, 0, 1]
        assert slots(step) == [[4, 5, 6], [-1, -1, -1], [-1, -1, 8]]
        assert allocator.num_referenced == 2
        extend(table, 3, 3, mask("xxx", "...", "xxx"))
        step, _ = extend(table, 3, 3, mask("xxx", ".xx", "xxx"))
        assert table.padding.tolist() == [0, 7, 2]
        assert step.seq_lens.tolist() == [9, 2, 7]
        assert slots(step)[1][0] == -1
        assert min(slots(step)[1][1:]) >= 0

    @pytest.mark.parametrize("chunk", ["x..x", "....", "...x"])
    def test_masked_tokens_after_the_first_real_one_are_stored(self, chunk):
        table, _ = make_table()
        extend(table, 1, 2, mask(".x"))
        step, _ = extend(table, 1, 4, mask(chunk))
        assert table.padding.tolist() == [1]
        assert min(slots(step)[0]) >= 0

    def test_without_a_mask_every_column_is_a_token(self):
        table, _ = make_table()
        extend(table, 2, 2, mask("..", "xx"))
        step, _ = extend(table, 2, 1)
        assert step.seq_lens.tolist() == [1, 3]

    @pytest.mark.parametrize("padding", range(2 * SIZE + 1))
    def test_a_padded_row_takes_the_blocks_of_its_tokens(self, padding):
        table, allocator = make_table()
        extend(table, 1, 13, mask("." * padding + "x" * (13 - padding)))
        assert allocator.num_referenced == blocks_of(13 - padding)


class TestCrop:
    @pytest.mark.parametrize("kept", range(13))
    def test_blocks_that_no_row_needs_are_given_back(self, kept):
        table, allocator = make_table()
        extend(table, 2, 13, mask("x" * 13, "..." + "x" * 10))
        first_blocks = table.block_ids.copy()
        table.commit(table.cropped(kept))
        assert table.num_columns == kept
        assert table.seq_lens.tolist() == [kept, max(kept - 3, 0)]
        assert allocator.num_referenced == blocks_of(kept) + blocks_of(max(kept - 3, 0))
        step, moves = extend(
            table, 2, 13 - kept, mask("x" * (13 - kept), "." * max(3 - kept, 0) + "x" * min(13 - kept, 10))
        )
        assert moves.copies == []
        assert step.seq_lens.tolist() == [13, 10]
        stays = blocks_of(kept)
        assert step.block_table[0, :stays].tolist() == first_blocks[0, :stays].tolist()

    def test_nothing_is_cropped_at_or_behind_the_end(self):
        table, _ = make_table()
        extend(table, 1, 5)
        before = state(table)
        table.commit(table.cropped(5))
        table.commit(table.cropped(9))
        assert state(table) == before

    def test_an_emptied_table_takes_any_number_of_rows(self):
        table, allocator = make_table()
        extend(table, 2, 5)
        table.commit(table.cropped(0))
        assert allocator.num_referenced == 0
        step, _ = extend(table, 3, 1)
        assert step.batch == 3

    def test_a_row_may_be_cropped_into_its_padding_and_begin_anew(self):
        table, _ = make_table()
        extend(table, 2, 6, mask("xxxxxx", "...xxx"))
        table.commit(table.cropped(2))
        assert table.padding.tolist() == [0, 2]
        extend(table, 2, 2, mask("xx", ".x"))
        assert table.padding.tolist() == [0, 3]

    def test_reset_gives_all_back(self):
        table, allocator = make_table(window=6)
        extend(table, 2, 30)
        table.commit(table.emptied())
        assert (table.num_rows, table.num_columns, table.first_kept_column) == (0, 0, 0)
        assert allocator.num_referenced == 0
        assert slots(extend(table, 1, 2)[0]) == [[4, 5]]


class TestWindow:
    @pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
    @pytest.mark.parametrize("padding", [0, 3])
    def test_decode_holds_the_window_and_no_more(self, window, padding):
        table, allocator = make_table(window=window)
        extend(table, 1, 6, mask("." * padding + "x" * (6 - padding)))
        for num_columns in range(7, 40):
            table.commit(table.before_next_step()[0])
            step, _ = extend(table, 1, 1)
            length = num_columns - padding
            last_seen = max(length - window, 0)  # by the token that has just come
            assert step.slots_of(np.arange(last_seen, length - 1)[None]).min(initial=0) >= 0
            assert allocator.num_referenced <= blocks_of(length) - last_seen // SIZE

    @pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
    @pytest.mark.parametrize("num_new", [1, 3, 4, 9, 16, 21])
    @pytest.mark.parametrize("num_old", [0, 3, 4, 6])
    def test_a_long_chunk_stores_what_a_later_step_sees_in_whole_blocks(self, window, num_new, num_old):
        table, allocator = make_table(window=window)
        if num_old:
            extend(table, 1, num_old)
            table.commit(table.before_next_step()[0])
        length = num_old + num_new
        step, _ = extend(table, 1, num_new)
        first = max(num_old, (length - window + 1) // SIZE * SIZE)
        assert [slot >= 0 for slot in slots(step)[0]] == [token >= first for token in range(num_old, length)]
        assert step.new_tokens_stored == (first <= num_old)
        table.commit(table.before_next_step()[0])
        first_seen = max(length - window + 1, 0)
        assert allocator.num_referenced == blocks_of(length) - first_seen // SIZE

    def test_a_window_that_is_not_reached_gives_nothing_back(self):
        table, allocator = make_table(window=20)
        extend(table, 1, 19)
        table.commit(table.before_next_step()[0])
        assert allocator.num_referenced == 5
        assert table.first_kept_column == 0

    def test_crop_can_go_back_only_as_far_as_the_window_is_whole(self):
        table, _ = make_table(window=5)
        extend(table, 1, 4)
        assert table.can_crop(1)
        extend(table, 1, 6)
        assert table.first_kept_column == 6
        assert table.can_crop(10)
        assert not table.can_crop(9)
        full, _ = make_table()
        extend(full, 1, 30)
        assert full.can_crop(3)

    def test_what_is_kept_past_the_window_can_be_cropped_to(self):
        table, allocator = make_table(window=5)
        extend(table, 1, 10)
        table.commit(table.before_next_step()[0])
        for _ in range(8):
            step, _ = extend(table, 1, 3, record_past=True)
            assert step.new_tokens_stored
            table.commit(table.before_next_step()[0])
        assert table.first_kept_column == 6
        assert allocator.num_referenced == blocks_of(34) - 1
        assert table.can_crop(10)
        assert not table.can_crop(9)
        table.commit(table.cropped(12))
        assert table.first_kept_column == 8
        assert allocator.num_referenced == blocks_of(12) - 2
        assert not table.can_crop(11)

    @pytest.mark.parametrize("num_old", range(1, 14))
    @pytest.mark.parametrize("num_new", [1, 4, 17])
    @pytest.mark.parametrize("window", [None, 1, 4, 6])
    def test_a_step_can_be_taken_back(self, num_old, num_new, window):
        """As `rollback` does: what the next step sees is where it was, even when the step had passed the window."""
        table, allocator = make_table(window=window)
        extend(table, 2, num_old, mask("x" * num_old, "." * min(num_old, 5) + "x" * max(num_old - 5, 0)))
        table.commit(table.before_next_step()[0])
        before, first_kept, held = state(table)[:4], table.first_kept_column, allocator.num_referenced
        extend(table, 2, num_new)
        table.commit(table.cropped(num_old, first_kept))
        assert state(table)[:4] == before
        assert allocator.num_referenced == held


class TestWastedSlots:
    def test_a_shared_block_is_as_full_as_its_longest_holder_and_counts_once(self):
        table, _ = make_table()
        extend(table, 2, 6, mask("xxxxxx", "...xxx"))
        assert table.wasted_slots == 2 + 1
        table.commit(table.selected(np.array([0, 0, 1])))
        assert table.wasted_slots == 2 + 1
        extend(table, 3, 1)
        assert table.wasted_slots == 1 + 1 + 0

    def test_an_empty_table_wastes_nothing(self):
        table, _ = make_table()
        assert table.wasted_slots == 0
        extend(table, 1, 5)
        table.commit(table.emptied())
        assert table.wasted_slots == 0
