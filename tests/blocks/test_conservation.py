"""No block is ever lost, held twice, or rewritten under a row that still reads it, whatever is done in whatever order.

Several tables, windowed and not, share one allocator with few blocks. Every token is a number of its own, written to a
pool of numbers at the slot that the table gives it. A model in plain lists says which number each row has to read
where, how many blocks each step may take, and what is known of blocks that nobody holds.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hf_paged_kernels import StepMetadata
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_paged_cache.blocks.allocator import BlockAllocator
from hf_paged_cache.blocks.exact import Moves
from hf_paged_cache.blocks.table_state import TableState
from hf_paged_cache.blocks.tables import BlockTable
from hf_paged_cache.errors import OutOfBlocksError
from tests.support.interrupts import interrupted_at
from tests.support.small_tables import extend

SIZE, NUM_BLOCKS = 4, 24
GONE = -1  # what a block holds that nobody has a right to
WINDOWS = st.sampled_from([1, 3, 4, 6, 9])


@dataclass
class Cache:
    """A table, and what its rows hold.

    Attributes:
        rows: for each row its columns: a number for a token, `None` for leading padding.
        kept_from: first column that can still be read.
    """

    table: BlockTable
    rows: list[list[int | None]] = field(default_factory=list)
    kept_from: int = 0

    @property
    def num_columns(self) -> int:
        return len(self.rows[0]) if self.rows else 0

    def tokens(self, row: int) -> list[int]:
        return [number for number in self.rows[row] if number is not None]

    def past_window(self) -> int:
        """First column that a step after the present columns looks back at."""
        window = self.table.window
        return 0 if window is None else max(self.num_columns - window + 1, 0)


class Conservation(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.allocator = BlockAllocator(NUM_BLOCKS + 1, on_evict=self.evicted.append)
        self.pool = np.full((NUM_BLOCKS + 1) * SIZE, GONE)
        self.live: list[Cache] = []
        self.next_number = 0
        self.cached: set[int] = set()
        self.picked_up: list[int] = []  # blocks held outside of any table, as a known prefix is
        self.remembered: dict[int, list[int]] = {}  # content of cached blocks when they became known

    @property
    def started(self) -> list[Cache]:
        return [cache for cache in self.live if cache.num_columns]

    # What a user does.

    @initialize(window=WINDOWS)
    def begin(self, window: int) -> None:
        self.live += [Cache(self.new_table(window)) for window in (None, window)]

    @precondition(lambda self: len(self.live) < 5)
    @rule(window=WINDOWS)
    def new_cache(self, window: int) -> None:
        self.live.append(Cache(self.new_table(window)))

    @rule(num_new=st.integers(1, 11), num_rows=st.integers(1, 3), record_past=st.booleans(), data=st.data())
    def prefill(self, num_new: int, num_rows: int, record_past: bool, data: st.DataObject) -> None:
        """A chunk, with leading padding in rows that have not begun."""
        cache = pick(self.live, data)
        if not cache.num_columns:
            cache.rows = [[]] * num_rows
        padding = st.sampled_from([0, 0, 0, min(2, num_new), num_new])
        self.feed(cache, num_new, [0 if any_token(row) else data.draw(padding) for row in cache.rows], record_past)

    @precondition(lambda self: self.started)
    @rule(steps=st.integers(1, 6), record_past=st.booleans(), data=st.data())
    def decode(self, steps: int, record_past: bool, data: st.DataObject) -> None:
        cache = pick(self.started, data)
        for _ in range(steps):
            self.feed(cache, 1, [0] * len(cache.rows), record_past)

    @precondition(lambda self: self.started)
    @rule(num_new=st.integers(1, 11), record_past=st.booleans(), data=st.data())
    def extend_and_take_back(self, num_new: int, record_past: bool, data: st.DataObject) -> None:
        """A forward pass that fails in a later layer."""
        cache = pick(self.started, data)
        self.give_up_old_tokens(cache)
        table, rows, kept_from = cache.table, list(cache.rows), cache.kept_from
        before = (table.num_columns, table.first_kept_column)
        self.feed(cache, num_new, [0] * len(rows), record_past)
        table.commit(table.cropped(*before))
        cache.rows, cache.kept_from = rows, kept_from

    @precondition(lambda self: self.started)
    @rule(num_new=st.integers(1, 11), record_past=st.booleans(), line=st.integers(1, 130), data=st.data())
    def interrupt_a_step(self, num_new: int, record_past: bool, line: int, data: st.DataObject) -> None:
        """Ctrl-C before any line of a step. The invariants then find what every row read before."""
        cache = pick(self.started, data)
        table, num_rows = cache.table, len(cache.rows)
        self.give_up_old_tokens(cache)
        self.poison_unheld()
        if self.expected_refusal(cache, num_new, [0] * num_rows, record_past) is not None:
            return
        before, columns = self.state(cache), (table.num_columns, table.first_kept_column)
        came = interrupted_at(line, lambda: self.extend(table, num_rows, num_new, None, record_past))
        self.recover()
        if came and table.num_columns == columns[0]:
            assert self.state(cache) == before
        else:  # it has happened, also if Ctrl-C came behind the point of no return
            assert table.num_columns == columns[0] + num_new
            table.commit(table.cropped(*columns))

    @precondition(lambda self: self.started)
    @rule(line=st.integers(1, 60), data=st.data())
    def interrupt_a_selection(self, line: int, data: st.DataObject) -> None:
        """It has happened, or it has not."""
        cache = pick(self.started, data)
        rows = data.draw(st.lists(st.integers(0, len(cache.rows) - 1), min_size=1, max_size=5))
        before, after = self.state(cache), cache.table.selected(np.array(rows))
        interrupted_at(line, lambda: cache.table.commit(after))
        self.recover()
        if cache.table.state is after:
            cache.rows = [cache.rows[row] for row in rows]
        else:
            assert self.state(cache) == before

    @precondition(lambda self: self.started)
    @rule(line=st.integers(1, 60), copies=st.integers(1, 3), data=st.data())
    def interrupt_a_fork(self, line: int, copies: int, data: st.DataObject) -> None:
        """What it held until then is given back."""
        table = pick(self.started, data).table
        interrupted_at(line, lambda: table.fork(copies))
        self.recover()

    def recover(self) -> None:
        self.allocator.ledger.recover()
        for block in self.evicted:  # the index has forgotten it, if the allocator has not
            self.allocator.forget([block])
            self.cached.discard(block)
        self.evicted.clear()

    @precondition(lambda self: self.started)
    @rule(removed=st.integers(1, 9), data=st.data())
    def crop(self, removed: int, data: st.DataObject) -> None:
        cache = pick(self.started, data)
        window, num_columns = cache.table.window, max(cache.num_columns - removed, 1)
        allowed = window is None or max(num_columns - window + 1, 0) >= cache.kept_from
        assert cache.table.can_crop(num_columns) == allowed
        if allowed:
            cache.rows = [row[:num_columns] for row in cache.rows]
            self.forget_cut_blocks(cache)
            cache.table.commit(cache.table.cropped(num_columns))
            cache.kept_from = max(cache.kept_from, cache.past_window())

    @precondition(lambda self: self.started)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        cache = pick(self.started, data)
        rows = data.draw(st.lists(st.integers(0, len(cache.rows) - 1), min_size=1, max_size=5))
        cache.table.commit(cache.table.selected(np.array(rows)))
        cache.rows = [cache.rows[row] for row in rows]

    @precondition(lambda self: self.started and len(self.live) < 5)
    @rule(copies=st.integers(1, 3), data=st.data())
    def fork(self, copies: int, data: st.DataObject) -> None:
        cache = pick(self.started, data)
        rows = [row for row in cache.rows for _ in range(copies)]
        self.live.append(Cache(cache.table.fork(copies), rows, cache.kept_from))

    @precondition(lambda self: len(self.live) > 2)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))

    @precondition(lambda self: self.started)
    @rule(to_nothing=st.sampled_from([BlockTable.emptied, lambda table: table.cropped(0)]), data=st.data())
    def empty(self, to_nothing: Callable[[BlockTable], TableState], data: st.DataObject) -> None:
        cache = pick(self.started, data)
        cache.table.commit(to_nothing(cache.table))
        cache.rows, cache.kept_from = [], 0

    # What an index of known prefixes does.

    @precondition(lambda self: self.started)
    @rule(data=st.data())
    def mark_cached(self, data: st.DataObject) -> None:
        """The full blocks of a cache are known from now on."""
        cache = pick(self.started, data)
        for row in range(len(cache.rows)):
            full = cache.table.block_ids[row, : len(cache.tokens(row)) // SIZE]
            known = [block for block in full[full != 0].tolist() if GONE not in self.content(block)]
            self.allocator.mark_cached(known)
            self.cached.update(known)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.forget_block(data.draw(st.sampled_from(sorted(self.cached))))

    @precondition(lambda self: self.cached and len(self.picked_up) < 10)
    @rule(data=st.data())
    def pick_up(self, data: st.DataObject) -> None:
        """A known block is found again, whether somebody still holds it or not."""
        block = data.draw(st.sampled_from(sorted(self.cached)))
        self.allocator.acquire(np.array([block, 0], dtype=np.int32))
        self.picked_up.append(block)

    @precondition(lambda self: self.picked_up)
    @rule()
    def put_down(self) -> None:
        self.allocator.release(np.array([self.picked_up.pop()], dtype=np.int32))

    # The model.

    def new_table(self, window: int | None) -> BlockTable:
        return BlockTable(self.allocator, SIZE, window)

    def forget_block(self, block: int) -> None:
        self.allocator.forget([block])
        self.cached.discard(block)

    def forget_cut_blocks(self, cache: Cache) -> None:
        """A row that holds a known block alone will write into it again once it has been cut."""
        for row in range(len(cache.rows)):
            length = len(cache.tokens(row))
            if length % SIZE:
                self.forget_block(int(cache.table.block_ids[row, length // SIZE]))

    def feed(self, cache: Cache, num_new: int, leading: list[int], record_past: bool) -> None:
        """Extends and writes as a layer group does, or finds that there is no room and nothing has changed."""
        table = cache.table
        self.give_up_old_tokens(cache)
        self.poison_unheld()
        attended = np.arange(num_new)[None] >= np.array(leading)[:, None]
        refusal = self.expected_refusal(cache, num_new, leading, record_past)
        if refusal is not None:
            before, num_evicted = self.state(cache), len(self.evicted)
            with pytest.raises(OutOfBlocksError) as error:
                extend(table, len(cache.rows), num_new, attended, record_past=record_past)
            assert (error.value.needed, error.value.free, error.value.total) == refusal
            assert self.state(cache) == before
            assert len(self.evicted) == num_evicted
            del error  # its traceback holds the table
            return
        step = self.extend(table, len(cache.rows), num_new, attended, record_past)
        self.write(cache, step, leading, num_new)
        if table.window is not None and not record_past:
            cache.kept_from = max(cache.kept_from, cache.past_window())

    def extend(
        self, table: BlockTable, num_rows: int, num_new: int, attended: np.ndarray | None, record_past: bool
    ) -> StepMetadata:
        """Takes blocks, moves what has to be moved, and only then lets the table name them."""
        extension = table.extend(num_rows, num_new, attended, record_past=record_past)
        for block in self.evicted:
            self.cached.discard(block)
            self.content(block)[:] = GONE
        self.evicted.clear()
        self.move(extension.moves)
        table.commit(extension.state)
        return extension.step

    def give_up_old_tokens(self, cache: Cache) -> None:
        cache.table.commit(cache.table.before_next_step()[0])

    def expected_refusal(
        self, cache: Cache, num_new: int, leading: list[int], record_past: bool
    ) -> tuple[int, int, int] | None:
        """What the error says is needed, free and there at all, if there is no room."""
        needed, available = (
            self.blocks_needed(cache, num_new, leading, record_past),
            NUM_BLOCKS - len(self.references()),
        )
        return (needed, available, NUM_BLOCKS) if needed > available else None

    def state(self, cache: Cache) -> tuple:
        """What a refused step leaves as it was: which blocks the rows hold, and where."""
        table = cache.table
        ids = table.block_ids.reshape(-1).tolist() if table.num_columns else []
        return ids, table.num_columns, table.first_kept_column

    def move(self, moves: Moves) -> None:
        for source, target in moves.copies:
            self.content(target)[:] = self.content(source)

    def blocks_needed(self, cache: Cache, num_new: int, leading: list[int], record_past: bool) -> int:
        """New blocks, and copies of shared blocks that are written to: all sharers but the last, if all write."""
        references, writers, needed = self.references(), {}, 0
        for row, skipped in enumerate(leading):
            old = len(cache.tokens(row))
            new = old + num_new - skipped
            stored_from = old
            if cache.table.window is not None and not record_past:
                stored_from = max(old, (new - cache.table.window + 1) // SIZE * SIZE)
            blocks = {token // SIZE for token in range(stored_from, new)}
            needed += len([block for block in blocks if block * SIZE >= old])
            if stored_from == old and new > old and old % SIZE:
                last = int(cache.table.block_ids[row, old // SIZE])
                writers[last] = writers.get(last, 0) + 1
        return needed + sum(count - (references[block] == count) for block, count in writers.items())

    def write(self, cache: Cache, step: StepMetadata, leading: list[int], num_new: int) -> None:
        for row, skipped in enumerate(leading):
            numbers = [None] * skipped + list(range(self.next_number, self.next_number + num_new - skipped))
            self.next_number += num_new
            cache.rows[row] = cache.rows[row] + numbers
            assert (step.slots[row, :skipped] == -1).all()
            for number, slot in zip(numbers[skipped:], step.slots[row, skipped:].tolist(), strict=True):
                if slot >= 0:
                    block = slot // SIZE
                    assert self.references()[block] == 1, "a block was written that others hold"
                    self.pool[slot] = number
                else:
                    assert not step.new_tokens_stored
        assert step.num_columns == cache.num_columns
        assert step.seq_lens.tolist() == [len(cache.tokens(row)) for row in range(len(cache.rows))]

    def references(self) -> dict[int, int]:
        """How many table entries and other holders each block has."""
        counts: dict[int, int] = {}
        tables = [cache.table.block_ids.reshape(-1) for cache in self.live]
        for block in [*np.concatenate([np.zeros(1, dtype=np.int32), *tables]).tolist(), *self.picked_up]:
            counts[block] = counts.get(block, 0) + 1
        del counts[0]
        return counts

    def content(self, block: int) -> np.ndarray:
        return self.pool[block * SIZE : (block + 1) * SIZE]

    def poison_unheld(self) -> None:
        """What nobody holds and nobody knows may hold anything."""
        held = self.references()
        for block in range(1, NUM_BLOCKS + 1):
            if block not in held and block not in self.cached:
                self.content(block)[:] = GONE

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        references = self.references()
        counts = self.allocator.references(np.arange(NUM_BLOCKS + 1))
        assert self.allocator.num_free + self.allocator.num_evictable + len(references) == NUM_BLOCKS
        assert {block: int(counts[block]) for block in counts.nonzero()[0].tolist()} == references
        # All that can be allocated is what is not held, each block once; the evictable ones are the known ones.
        probe = copy.deepcopy(self.allocator)
        available = probe.allocate(probe.num_available).tolist()
        evictable, self.evicted[:] = self.evicted[:], []
        assert sorted([*available, *references]) == list(range(1, NUM_BLOCKS + 1))
        assert set(evictable) == self.cached - set(references)
        assert len(evictable) == self.allocator.num_evictable

    @invariant()
    def every_token_reads_back(self) -> None:
        self.poison_unheld()
        for cache in self.live:
            if not cache.num_columns:
                continue
            snapshot, _ = cache.table.snapshot(cache.num_columns)
            assert cache.table.first_kept_column == cache.kept_from
            for row, columns in enumerate(cache.rows):
                tokens = cache.tokens(row)
                padding = len(columns) - len(tokens)
                first = max(cache.kept_from - padding, 0)
                slots = snapshot.slots_of(np.arange(first, len(tokens))[None])[row]
                assert (slots >= 0).all()
                assert self.pool[slots].tolist() == tokens[first:]

    @invariant()
    def known_blocks_stay_as_they_are(self) -> None:
        for block, content in list(self.remembered.items()):
            if block not in self.cached:
                del self.remembered[block]
            else:
                assert self.content(block).tolist() == content
        for block in self.cached:
            self.remembered.setdefault(block, self.content(block).tolist())


def pick(caches: list[Cache], data: st.DataObject) -> Cache:
    """One of `caches`, drawn by its index: hypothesis keeps what it draws, and a table has to go when it is dropped."""
    return caches[data.draw(st.integers(0, len(caches) - 1))]


def any_token(row: list[int | None]) -> bool:
    return any(number is not None for number in row)


PROFILE = settings(
    derandomize=True, deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck)
)


class TestConservation(Conservation.TestCase):
    settings = settings(PROFILE, max_examples=40, stateful_step_count=60)


@pytest.mark.slow
class TestConservationAtLength(Conservation.TestCase):
    settings = settings(PROFILE, max_examples=800, stateful_step_count=120)
