"""`BlockAllocator`: who holds which block, and in which order blocks are handed out and taken back."""

import gc
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from hf_paged_cache.blocks.allocator import BlockAllocator, Holding
from hf_paged_cache.errors import OutOfBlocksError, PagedCacheError
from hf_paged_cache.ledger import Change


def ids(*block_ids: int) -> np.ndarray:
    return np.array(block_ids, dtype=np.int32)


def states(allocator: BlockAllocator) -> dict[str, int]:
    """Blocks by state, checked against the reference counts themselves."""
    counts = {"free": allocator.num_free, "evictable": allocator.num_evictable, "referenced": allocator.num_referenced}
    assert counts["referenced"] == (allocator.references(np.arange(allocator.num_blocks)) > 0).sum()
    assert allocator.num_available == counts["free"] + counts["evictable"]
    assert sum(counts.values()) == allocator.num_blocks - 1
    return counts


def test_blocks_are_handed_out_once_each_and_the_null_block_never():
    allocator = BlockAllocator(6)
    assert states(allocator) == {"free": 5, "evictable": 0, "referenced": 0}
    taken = np.concatenate([allocator.allocate(2), allocator.allocate(3)])
    assert sorted(taken.tolist()) == [1, 2, 3, 4, 5]
    assert taken.dtype == np.int32
    assert allocator.references(taken).tolist() == [1] * 5
    assert states(allocator) == {"free": 0, "evictable": 0, "referenced": 5}


def test_fresh_blocks_follow_each_other():
    """A prompt then lies in one piece, which is read in place; so do blocks that came by growth."""
    allocator = BlockAllocator(4)
    assert allocator.allocate(3).tolist() == [1, 2, 3]
    allocator.grow(7)
    assert allocator.allocate(3).tolist() == [4, 5, 6]


def test_all_or_nothing():
    allocator = BlockAllocator(4)
    allocator.allocate(1)
    allocator.mark_cached(kept := allocator.allocate(1).tolist())
    allocator.release(ids(*kept))
    before = states(allocator)
    with pytest.raises(OutOfBlocksError) as error:
        allocator.allocate(3)
    assert (error.value.needed, error.value.free, error.value.total) == (3, 2, 3)
    assert isinstance(error.value, PagedCacheError)
    assert isinstance(error.value, MemoryError)
    assert "needs 3 more" in str(error.value)
    assert "2 of 3 are free" in str(error.value)
    assert states(allocator) == before == {"free": 1, "evictable": 1, "referenced": 1}
    assert allocator.reclaimed_blocks == 0
    assert len(allocator.allocate(2)) == 2


def test_no_blocks_can_be_allocated():
    allocator = BlockAllocator()
    assert allocator.num_blocks == 1
    assert allocator.allocate(0).tolist() == []
    with pytest.raises(OutOfBlocksError, match="0 of 0 are free"):
        allocator.allocate(1)


def test_a_block_is_free_when_its_last_holder_lets_go():
    allocator = BlockAllocator(3)
    allocator.allocate(2)
    allocator.acquire(ids(1))
    allocator.acquire(ids(1, 2), times=3)
    assert allocator.references(ids(1, 2)).tolist() == [5, 4]
    allocator.release(ids(1, 1, 1, 2, 2, 2, 1))
    assert states(allocator) == {"free": 0, "evictable": 0, "referenced": 2}
    allocator.release(ids(2, 1))
    assert states(allocator) == {"free": 2, "evictable": 0, "referenced": 0}


def test_ids_may_repeat_within_a_call():
    """A block table of several rows is released as it stands, a shared block once for each row."""
    allocator = BlockAllocator(3)
    allocator.allocate(2)
    allocator.acquire(ids(1, 1, 2))
    assert allocator.references(ids(1, 2)).tolist() == [3, 2]
    allocator.release(ids(1, 2, 1, 2, 1))
    assert states(allocator) == {"free": 2, "evictable": 0, "referenced": 0}
    assert sorted(allocator.allocate(2).tolist()) == [1, 2]


def test_null_blocks_are_passed_over():
    allocator = BlockAllocator(3)
    allocator.allocate(1)
    allocator.acquire(ids(0, 1, 0))
    allocator.release(ids(0, 0, 1))
    allocator.release(ids(0))
    allocator.release(ids())
    assert allocator.references(ids(0, 1)).tolist() == [0, 1]
    assert states(allocator) == {"free": 1, "evictable": 0, "referenced": 1}


def test_released_blocks_are_handed_out_again_head_of_the_sequence_first():
    allocator = BlockAllocator(5)
    allocator.allocate(4)
    allocator.release(ids(2, 3, 4))
    assert allocator.allocate(3).tolist() == [2, 3, 4]


def test_retained_blocks_become_reusable_and_are_picked_up_again():
    allocator = BlockAllocator(5)
    allocator.allocate(3)
    allocator.mark_cached([1, 2])
    assert states(allocator) == {"free": 1, "evictable": 0, "referenced": 3}
    allocator.release(ids(1, 2, 3))
    assert states(allocator) == {"free": 2, "evictable": 2, "referenced": 0}
    allocator.acquire(ids(1, 1))
    assert allocator.references(ids(1)).tolist() == [2]
    assert states(allocator) == {"free": 2, "evictable": 1, "referenced": 1}
    allocator.release(ids(1, 1))  # it is still known, so it is evictable once more
    assert states(allocator) == {"free": 2, "evictable": 2, "referenced": 0}


def test_free_blocks_go_before_reusable_ones_and_the_longest_released_first():
    evicted: list[int] = []
    allocator = BlockAllocator(8, on_evict=evicted.append)
    allocator.allocate(6)
    allocator.mark_cached([1, 2, 3, 4, 5, 6])
    allocator.release(ids(4, 5))
    allocator.release(ids(1, 2, 3))
    assert allocator.allocate(1).tolist() == [7]
    assert evicted == []
    # Of each released run the tail goes first: its head is of use without the tail, not the other way round.
    assert allocator.allocate(3).tolist() == [5, 4, 3]
    assert evicted == [5, 4, 3]
    assert allocator.allocate(2).tolist() == [2, 1]
    assert allocator.reclaimed_blocks == 5


def test_a_block_that_is_picked_up_is_young_again():
    evicted: list[int] = []
    allocator = BlockAllocator(4, on_evict=evicted.append)
    allocator.allocate(3)
    allocator.mark_cached([1, 2, 3])
    for block_id in (1, 2, 3):
        allocator.release(ids(block_id))
    allocator.acquire(ids(1))
    allocator.release(ids(1))
    allocator.allocate(3)
    assert evicted == [2, 3, 1]


def test_rows_that_share_a_head_release_it_after_both_tails():
    evicted: list[int] = []
    allocator = BlockAllocator(5, on_evict=evicted.append)
    allocator.allocate(4)
    allocator.mark_cached([1, 2, 3, 4])
    allocator.acquire(ids(1, 2))
    allocator.release(ids(1, 2, 3, 1, 2, 4))
    allocator.allocate(4)
    assert sorted(evicted[:2]) == [3, 4]
    assert evicted[2:] == [2, 1]


def test_an_evicted_block_is_forgotten():
    """Its content is gone, so without another `mark_cached` it is free when it is released."""
    allocator = BlockAllocator(2)
    allocator.mark_cached(allocator.allocate(1).tolist())
    allocator.release(ids(1))
    allocator.allocate(1)
    allocator.release(ids(1))
    assert states(allocator) == {"free": 1, "evictable": 0, "referenced": 0}
    assert allocator.reclaimed_blocks == 1


def test_forget_frees_what_nobody_holds():
    allocator = BlockAllocator(4, on_evict=lambda block_id: pytest.fail("nothing was evicted"))
    allocator.allocate(3)
    allocator.mark_cached([1, 2, 3])
    allocator.release(ids(1, 2))
    allocator.forget([1, 3])
    assert states(allocator) == {"free": 1, "evictable": 1, "referenced": 1}
    allocator.release(ids(3))
    assert states(allocator) == {"free": 2, "evictable": 1, "referenced": 0}
    allocator.forget([1])  # once more, though it is free by now
    assert states(allocator) == {"free": 2, "evictable": 1, "referenced": 0}


def test_an_index_may_forget_a_block_while_it_is_being_evicted():
    allocator = BlockAllocator(3, on_evict=lambda block_id: allocator.forget([block_id]))
    allocator.allocate(2)
    allocator.mark_cached([1, 2])
    allocator.release(ids(1, 2))
    assert sorted(allocator.allocate(2).tolist()) == [1, 2]
    assert states(allocator) == {"free": 0, "evictable": 0, "referenced": 2}


def test_growth_adds_free_blocks_and_touches_no_others():
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    allocator.mark_cached([2])
    allocator.release(ids(2))
    allocator.grow(8)
    assert states(allocator) == {"free": 5, "evictable": 1, "referenced": 1}
    assert allocator.allocate(5).tolist() == [3, 4, 5, 6, 7]
    allocator.grow(8)
    assert states(allocator) == {"free": 0, "evictable": 1, "referenced": 6}


@pytest.mark.parametrize("look", ["num_free", "num_evictable", "num_available", "num_referenced"])
def test_what_was_released_later_is_released_by_the_next_look(look):
    allocator = BlockAllocator(4)
    rows = held(allocator, allocator.take(3))
    allocator.mark_cached([2])
    allocator.release_later(rows)
    expected = {"num_free": 2, "num_evictable": 1, "num_available": 3, "num_referenced": 0}
    assert getattr(allocator, look) == expected[look]
    assert states(allocator) == {"free": 2, "evictable": 1, "referenced": 0}


def test_reference_counts_leave_out_what_was_released_later():
    """They decide whether a block is shared, and so whether it has to be copied."""
    allocator = BlockAllocator(2)
    rows = held(allocator, allocator.take(1))
    allocator.acquire(ids(1))
    allocator.release_later(rows)
    assert allocator.references(ids(1)).tolist() == [1]


def test_what_was_released_later_can_be_allocated_at_once():
    allocator = BlockAllocator(3)
    allocator.release_later(held(allocator, allocator.take(2)))
    assert sorted(allocator.allocate(2).tolist()) == [1, 2]


def test_a_finalizer_may_release_in_the_middle_of_anything():
    """Here the collector runs while a block is being evicted."""

    class Holder:
        def __init__(self, rows: Holding) -> None:
            self.rows, self.itself = rows, self

        def __del__(self) -> None:
            allocator.release_later(self.rows)

    allocator = BlockAllocator(6, on_evict=lambda block_id: gc.collect())
    allocator.allocate(3)
    Holder(held(allocator, allocator.take(2)))
    allocator.mark_cached([1, 2, 3])
    allocator.release(ids(1, 2, 3))
    assert sorted(allocator.allocate(3).tolist()) == [1, 2, 3]
    assert states(allocator) == {"free": 2, "evictable": 0, "referenced": 3}


def test_allocators_with_one_clock_tell_whose_blocks_were_released_longest_ago():
    first, second = BlockAllocator(9), BlockAllocator(9)
    first.clock = second.clock
    blocks = [allocator.allocate(2) for allocator in (first, second, first)]
    for allocator, block_ids in zip((first, second, first), blocks, strict=True):
        allocator.mark_cached(block_ids.tolist())
    rows = held(second, blocks[1])
    second.release(blocks[1])  # the table alone holds them
    second.release_later(rows)  # takes effect later, but was let go of now
    first.release(blocks[2])
    first.release(blocks[0])
    assert second.num_evictable == 2
    assert second.oldest < first.oldest
    second.acquire(blocks[1])
    second.release(blocks[1])
    assert first.oldest < second.oldest


class TestChangesThatAreGivenUp:
    def test_what_was_taken_is_free_again(self):
        allocator = BlockAllocator(6)
        kept = held(allocator, allocator.take(2))
        taken = allocator.take(3)
        allocator.ledger.recover()
        assert states(allocator) == {"free": 3, "evictable": 0, "referenced": 2}
        assert sorted(allocator.take(3).tolist()) == sorted(taken.tolist())
        assert allocator.references(kept.state.ids).tolist() == [[1, 1]]

    def test_others_keep_what_they_hold_and_what_is_known_stays_known(self):
        allocator = BlockAllocator(8)
        allocator.allocate(4)
        allocator.mark_cached([1, 2, 3])
        allocator.release(ids(2, 1))
        allocator.take(1)
        allocator.ledger.recover()
        assert states(allocator) == {"free": 3, "evictable": 2, "referenced": 2}
        assert allocator.references(np.arange(8)).tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
        allocator.take(4)  # of a run that is released the tail goes first
        assert [allocator.is_cached(block) for block in (1, 2, 3)] == [False, True, True]

    def test_a_table_that_went_away_meanwhile_holds_nothing(self):
        allocator = BlockAllocator(6)
        rows = held(allocator, allocator.take(2))
        allocator.take(1)
        allocator.release_later(rows)
        allocator.ledger.recover()
        assert states(allocator) == {"free": 5, "evictable": 0, "referenced": 0}


class Rows(NamedTuple):
    ids: np.ndarray


def held(allocator: BlockAllocator, block_ids: np.ndarray) -> Holding:
    """A row of a table that holds blocks which were taken."""
    holding = Holding(Rows(np.zeros((1, 1), dtype=np.int32)))
    allocator.register(holding, "ids")
    new = Rows(block_ids[None])
    count = partial(allocator.count_change, holding.state.ids, new.ids)
    allocator.ledger.commit([Change(holding, {"state": new}, count)])
    return holding
