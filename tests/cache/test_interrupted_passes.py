"""Whatever raises in a forward pass, and wherever: every row reads what it read before, and the cache goes on right.

Failures are put before each line of the package, and into each tensor operation.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig

from hf_paged_cache import KVQuant, OutOfBlocksError, PagedCache
from hf_paged_cache.ledger import Ledger
from tests.conftest import SIZES
from tests.support.interrupts import OutOfMemory, failing_operation, interrupted_at

FULL = LlamaConfig(**SIZES, num_hidden_layers=2)
SLIDING = Gemma3TextConfig(
    **SIZES, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=20
)
EXACT_ENDS = KVQuant("int4", key_group=16, value_group=8, exact_recent=16, exact_sinks=16)
NOTHING_EXACT = KVQuant("kivi2", key_group=16, value_group=8, exact_recent=0, exact_sinks=0)


class Case(NamedTuple):
    """A pass, and what comes before it.

    Attributes:
        config: the model's.
        kv: the codec.
        prepare: what is done to an empty cache; gives the cache of the pass, and others that live on.
        num_new: tokens of the pass.
    """

    config: PreTrainedConfig
    kv: str | KVQuant
    prepare: Callable[[PagedCache], Sequence[PagedCache]]
    num_new: int


def feed(cache: PagedCache, num_new: int, num_rows: int = 1, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer_idx in range(len(cache.layers)):
        states = torch.randn(2, num_rows, 2, num_new, 8, generator=generator)
        cache.update(*states, layer_idx)


def filled(*passes: int, crop: int = 0, recording: bool = False) -> Callable[[PagedCache], Sequence[PagedCache]]:
    def prepare(cache: PagedCache) -> Sequence[PagedCache]:
        if recording:
            cache.activate_past_recording()
        for seed, num_new in enumerate(passes):
            feed(cache, num_new, seed=seed)
        cache.crop(-crop) if crop else None
        return [cache]

    return prepare


def forked(*passes: int, crop: int = 0) -> Callable[[PagedCache], Sequence[PagedCache]]:
    def prepare(cache: PagedCache) -> Sequence[PagedCache]:
        filled(*passes, crop=crop)(cache)
        return [cache.fork(3), cache]

    return prepare


def beams(cache: PagedCache) -> Sequence[PagedCache]:
    """Rows that share a block, and one that is alone."""
    feed(cache, 20, num_rows=2)
    cache.reorder_cache(torch.tensor([0, 0, 1]))
    return [cache]


CASES = {
    "empty": Case(FULL, "raw", lambda cache: [cache], 20),
    "the last block": Case(FULL, "raw", filled(20), 3),
    "a new block": Case(FULL, "int8", filled(16), 1),
    "copy on write": Case(FULL, "raw", forked(20), 1),
    "beams": Case(FULL, "int8", beams, 14),
    "codes that are due": Case(FULL, EXACT_ENDS, filled(40, 8), 1),
    "codes that are due, of forks": Case(FULL, EXACT_ENDS, forked(40, 8), 9),
    "codes made exact again": Case(FULL, NOTHING_EXACT, filled(64, crop=4), 1),
    "codes made exact again, of forks": Case(FULL, NOTHING_EXACT, forked(64, crop=4), 20),
    "windows": Case(SLIDING, "raw", filled(40, 6), 3),
    "windows whose past is kept": Case(SLIDING, EXACT_ENDS, filled(40, 6, recording=True), 9),
    "windows of forks": Case(SLIDING, "int8", forked(30), 20),
}


def new_cache(case: Case, **limits: Any) -> Sequence[PagedCache]:
    return case.prepare(PagedCache(case.config, kv=case.kv, block_size=16, backend="reference", **limits))


def content(caches: Sequence[PagedCache]) -> list[Tensor]:
    """What every row reads."""
    states = [(layer.keys, layer.values) for cache in caches for layer in cache.layers]
    return [torch.zeros(0) if lazy is None else lazy.clone() for pair in states for lazy in pair]


def lengths(caches: Sequence[PagedCache]) -> list[list[int]]:
    return [[layer.get_seq_length() for layer in cache.layers] for cache in caches]


def check_counts(caches: Sequence[PagedCache]) -> None:
    """References are those of the tables, and every block is in one state."""
    for position in range(len(caches[0].groups)):
        groups = [cache.groups[position] for cache in caches]
        pool = groups[0].pool
        exact_allocator = getattr(pool.exact_pool, "allocator", None)
        for allocator, name in ((pool.allocator, "block_ids"), (exact_allocator, "exact_ids")):
            if allocator is None:
                continue
            held = np.concatenate([getattr(group.table, name).reshape(-1) for group in groups])
            counts = np.bincount(held, minlength=allocator.num_blocks)
            counts[0] = 0
            assert allocator.references(np.arange(allocator.num_blocks)).tolist() == counts.tolist()
            assert allocator.num_free + int((counts > 0).sum()) == allocator.num_blocks - 1
    budget = caches[0]._budget
    pools = {id(group.pool): group.pool for group in caches[0].groups}.values()
    exact = [pool.exact_pool for pool in pools if pool.exact_pool]
    assert budget.allocated == sum(pool.num_bytes for pool in (*pools, *exact))


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(one.shape == other.shape and one.equal(other) for one, other in zip(actual, expected, strict=True))


def check_every(case: Case, fail: Callable[[int, Callable[[], None]], bool], places: range) -> int:
    """Lets a pass fail at each of some places; how many there were."""
    caches = new_cache(case)
    num_rows = max(caches[0].batch_size, 1)
    before = content(caches), lengths(caches)
    feed(caches[0], case.num_new, num_rows, seed=9)
    after = content(caches)
    for place in places:
        caches = new_cache(case)
        if not fail(place, lambda caches=caches: feed(caches[0], case.num_new, num_rows, seed=9)):
            return place
        caches[0].rollback()
        assert lengths(caches) == before[1], place
        assert same(content(caches), before[0]), place
        check_counts(caches)
        feed(caches[0], case.num_new, num_rows, seed=9)
        assert same(content(caches), after), place
        check_counts(caches)
    return places.stop


STEPS = [pytest.param(19, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_operation_raises(case: Case, step: int) -> None:
    num_operations = check_every(case, failing_operation, range(1, 2000, step))
    assert 10 < num_operations < 2000


@pytest.mark.parametrize("step", [pytest.param(83, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_control_c_between_lines(case: Case, step: int) -> None:
    num_lines = check_every(case, interrupted_at, range(1, 5000, step))
    assert 100 < num_lines < 5000


# Operations on several layer groups and on recurrent states: they have happened, or they have not.

OPERATIONS: dict[str, Callable[[PagedCache], Any]] = {
    "crop": lambda cache: cache.crop(-7),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "reset": lambda cache: cache.reset(),
    "fork": lambda cache: cache.fork(2),
}


@pytest.mark.parametrize("step", [pytest.param(13, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_control_c_in_an_operation(name: str, step: int) -> None:
    operation = OPERATIONS[name]

    def make() -> list[PagedCache]:
        cache = PagedCache(SLIDING, kv=EXACT_ENDS, block_size=16, backend="reference")
        cache.activate_past_recording()
        feed(cache, 40, num_rows=2)
        feed(cache, 9, num_rows=2, seed=1)
        return [cache, cache.fork()]

    caches = make()
    before = content(caches)
    operation(caches[0])
    after = content(caches)
    outcomes = set()
    for line in range(1, 3000, step):
        caches = make()
        if not interrupted_at(line, lambda caches=caches: operation(caches[0])):
            break
        caches[0]._budget.ledger.recover()
        now = content(caches)
        assert same(now, before) or same(now, after), line
        outcomes.add(same(now, before))
        check_counts(caches)
        feed(caches[0], 3, max(caches[0].batch_size, 1), seed=2)
        check_counts(caches)
    else:
        raise AssertionError("the operation is longer than that")
    assert True in outcomes


@pytest.mark.parametrize("name", ["copy on write", "codes that are due"])
def test_control_c_while_the_cache_recovers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What then uses it next recovers it."""
    case, num_interrupted = CASES[name], 0
    before = content(new_cache(case))
    recover = Ledger.recover
    for first in range(190, 400, 29):
        for second in range(2, 30, 5):

            def interrupted(ledger: Ledger, second: int = second) -> None:
                if (ledger._before or ledger._open) and interrupted_at(second, lambda: recover(ledger)):
                    raise KeyboardInterrupt
                recover(ledger)

            caches = new_cache(case)
            monkeypatch.setattr(Ledger, "recover", interrupted)
            interrupted_at(first, lambda caches=caches: feed(caches[0], 1, caches[0].batch_size))
            monkeypatch.undo()
            ledger = caches[0]._budget.ledger
            num_interrupted += bool(ledger._before or ledger._open)
            caches[0].rollback()
            assert same(content(caches), before)
            check_counts(caches)
    assert num_interrupted > 5


class TestGrowth:
    @pytest.mark.parametrize("kv", ["raw", "int8", EXACT_ENDS], ids=str)
    def test_control_c_while_pools_grow(self, kv: str | KVQuant) -> None:
        """Planes hold the same blocks afterwards, and bytes are counted as they are."""
        case = Case(FULL, kv, filled(60), 40)
        check_every(case, interrupted_at, range(60, 500, 37))


def test_refused_passes_change_nothing() -> None:
    """Not even what is exact: codes that were due are made by a pass that has room."""
    case = CASES["codes that are due"]
    cache = new_cache(case, num_blocks=3)[0]
    before, used = content([cache]), cache.stats()
    for _ in range(2):
        with pytest.raises(OutOfBlocksError, match=r"needs 1 more .*, 0 of 3 are free"):
            feed(cache, 1)
    assert same(content([cache]), before)
    assert cache.stats() == used
    reference = new_cache(case)[0]
    for it in (cache, reference):
        it.crop(-20)
    assert same(content([cache]), content([reference]))


def test_an_error_names_what_the_limits_allow() -> None:
    cache = PagedCache(FULL, block_size=16, num_blocks=2)
    with pytest.raises(OutOfBlocksError, match=r"needs 4 more .*, 2 of 2 are free, and num_blocks=2") as error:
        feed(cache, 60)
    assert (error.value.needed, error.value.free, error.value.total) == (4, 2, 2)


@pytest.mark.parametrize("name", ["copy on write", "codes that are due, of forks"])
def test_a_pickled_cache_holds_what_it_holds_alone(name: str) -> None:
    """Its forks stay behind, and their blocks are free in the copy."""
    caches = new_cache(CASES[name])
    for seed in range(3):
        feed(caches[1], 20, seed=seed)
    expected, counts = content(caches[:1]), [cache.stats().blocks_used for cache in caches]
    copied = pickle.loads(pickle.dumps(caches[0]))
    assert same(content([copied]), expected)
    check_counts([copied])
    assert copied.stats().blocks_used < counts[0]
    assert [cache.stats().blocks_used for cache in caches] == counts
    feed(copied, 5, 3)
    feed(caches[0], 5, 3)
    assert same(content([copied]), content(caches[:1]))
    together = pickle.loads(pickle.dumps(caches))
    check_counts(together)
    assert same(content(together), content(caches))


def test_a_failed_write_of_the_second_layer_takes_the_first_back(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = new_cache(CASES["windows"])
    before = content(caches)
    pool = caches[0].groups[1].pool
    write = type(pool.layers[1]).write

    def fail(self: Any, *arguments: Any) -> None:
        write(self, *arguments)
        if self is pool.layers[1]:
            raise OutOfMemory

    monkeypatch.setattr(type(pool.layers[1]), "write", fail)
    with pytest.raises(OutOfMemory):
        feed(caches[0], 5)
    monkeypatch.undo()
    assert same(content(caches), before)
    check_counts(caches)
