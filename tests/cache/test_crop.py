"""Going back: `crop`, `activate_past_recording` and `rollback`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_paged_cache import CacheStateError, CropError, PagedCache
from hf_paged_cache.codecs import RawCodec
from tests.support.combinations import combined, later
from tests.support.compat import generate

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., dict[str, Tensor]]

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 16
TWO_LAYERS = {"-".join(types): types for types in ([FULL, FULL], [SLIDING, FULL], [FULL, SLIDING], [SLIDING, SLIDING])}
LAYERS = combined(layer_types=TWO_LAYERS)
TOKENS = torch.randn(2, 2, 64, 8, generator=torch.Generator().manual_seed(0))


def new_cache(config: PreTrainedConfig) -> PagedCache:
    return PagedCache(config, block_size=16)


def append(cache: DynamicCache, first: int, last: int) -> list[Tensor]:
    """Gives every layer the tokens `first..last - 1`; values are the negated keys. Returns the keys it shows."""
    key = TOKENS[:, :, first:last]
    return [cache.update(key, -key, layer)[0].clone() for layer in range(len(cache))]


def lengths(cache: DynamicCache) -> list[int]:
    return [cache.get_seq_length(layer) for layer in range(len(cache))]


def contents(cache: DynamicCache) -> list[Tensor]:
    """Keys and values of all layers, dense."""
    return [states.clone() for layer in cache.layers for states in (layer.keys, layer.values)]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# Crop


@combined(layer_types=TWO_LAYERS, before=[3, 15, 16, 31, *later(13, 17, 40)], drafts=[(1, 2, 6), *later((3, 4, 5))])
def test_what_was_cropped_was_never_there(
    windowed: Models, layer_types: list[str], before: int, drafts: tuple[int, ...]
) -> None:
    config = windowed(layer_types).config
    for drafted in drafts:
        for rejected in range(drafted + 1):
            cache = new_cache(config)
            cache.activate_past_recording()
            append(cache, 0, before)
            cache.crop(0)
            append(cache, before, before + drafted)
            cache.crop(-rejected)

            kept = before + drafted - rejected
            expected = new_cache(config)
            append(expected, 0, kept)
            assert lengths(cache) == lengths(expected)
            assert_same(contents(cache), contents(expected))
            assert_same(append(cache, kept, kept + 20), append(expected, kept, kept + 20))


@LAYERS
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, 40])
@pytest.mark.parametrize("records", [True, False], ids=["recording", "not recording"])
@pytest.mark.parametrize("removed", [0, 1, 3])
def test_crop_means_what_it_means_in_the_library(
    windowed: Models, layer_types: list[str], length: int, records: bool, removed: int
) -> None:
    config = windowed(layer_types).config
    ours, theirs = new_cache(config), DynamicCache(config=config)
    for cache in (ours, theirs):
        if records:
            cache.activate_past_recording()
        append(cache, 0, length)
    before = contents(ours)
    try:
        theirs.crop(-removed)
    except Exception as error:
        with pytest.raises(type(error), match="activate_past_recording"):
            ours.crop(-removed)
        assert_same(contents(ours), before)
    else:
        ours.crop(-removed)
        assert lengths(ours) == lengths(theirs)
        if ours.get_seq_length():
            assert_same(contents(ours), contents(theirs))


def test_crop_of_more_than_there_is_removes_all(llama: Models) -> None:
    cache = new_cache(llama().config)
    append(cache, 0, 20)
    cache.crop(-(10**6))
    assert lengths(cache) == [0, 0, 0]
    assert cache.stats().blocks_used == 0
    assert_same(append(cache, 0, 5), [TOKENS[:, :, :5]] * 3)


@pytest.mark.parametrize("length", [5, 0])
def test_crop_to_a_length_is_refused_on_every_version(llama: Models, length: int) -> None:
    cache = new_cache(llama().config)
    append(cache, 0, length)
    with pytest.raises(
        CropError, match=r"crop\(3\): expected minus the number of tokens to remove, crop\(-3\)"
    ) as info:
        cache.crop(3)
    assert isinstance(info.value, ValueError)
    assert lengths(cache) == [length] * 3


def test_crop_of_an_empty_cache_does_nothing(windowed: Models) -> None:
    cache = new_cache(windowed([SLIDING, FULL]).config)
    cache.crop(-3)
    cache.crop(0)
    assert lengths(cache) == [0, 0]


def test_crop_takes_a_tensor(llama: Models) -> None:
    cache = new_cache(llama().config)
    append(cache, 0, 5)
    cache.crop(torch.tensor(-2))
    assert lengths(cache) == [3, 3, 3]


def test_crop_gives_blocks_back_and_moves_nothing(llama: Models) -> None:
    cache = new_cache(llama().config)
    append(cache, 0, 50)
    addresses = [plane.data_ptr() for layer in cache.layers for plane in layer.group.pool.layers[0].blocks.planes]
    assert cache.stats().blocks_used == 2 * 4
    cache.crop(-2)
    assert cache.stats().blocks_used == 2 * 3
    cache.crop(-32)
    assert cache.stats().blocks_used == 2 * 1
    append(cache, 16, 50)
    assert addresses == [
        plane.data_ptr() for layer in cache.layers for plane in layer.group.pool.layers[0].blocks.planes
    ]


@pytest.mark.parametrize("removed", [1, 10, 16, 20])
def test_crop_of_a_fork_leaves_its_origin_alone(llama: Models, removed: int) -> None:
    cache = new_cache(llama().config)
    append(cache, 0, 20)
    before = contents(cache)
    fork = cache.fork()
    fork.crop(-removed)
    append(fork, 40, 40 + removed)
    assert_same(contents(cache), before)
    del fork
    assert cache.stats().blocks_used == 2 * 2


def test_crop_into_a_shared_block_copies_it_before_it_is_written(llama: Models) -> None:
    cache = new_cache(llama().config)
    append(cache, 0, 32)  # exactly two blocks
    fork = cache.fork()
    fork.crop(-3)
    assert cache.stats().copies == 0
    append(fork, 50, 51)
    assert cache.stats().copies == 2  # the second block of each row
    assert_same(contents(cache)[:1], [TOKENS[:, :, :32]])
    assert_same(contents(fork)[:1], [torch.cat([TOKENS[:, :, :29], TOKENS[:, :, 50:51]], dim=2)])


def test_past_recording_keeps_blocks_until_the_next_crop(windowed: Models) -> None:
    cache = new_cache(windowed([SLIDING]).config)
    cache.activate_past_recording()
    for position in range(60):
        append(cache, position, position + 1)
    assert cache.stats().blocks_used == 2 * 4
    cache.crop(0)
    assert cache.stats().blocks_used == 2 * 2


# Rollback


@contextlib.contextmanager
def interrupted_at(model: PreTrainedModel, layer: int, forward_pass: int) -> Iterator[None]:
    """Presses Ctrl-C when `layer` is about to run for the `forward_pass`-th time."""
    passes = iter(range(10**6))

    def press(*_: object) -> None:
        if next(passes) == forward_pass:
            raise KeyboardInterrupt

    handle = model.model.layers[layer].register_forward_pre_hook(press)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        handle.remove()


PASSES = {"prefill": 0, "first step": 1, "later step": 5}
INTERRUPTIONS = combined(forward_pass=PASSES)
THREE_LAYERS = {
    "-".join(types): types for types in ([FULL] * 3, [SLIDING, FULL, SLIDING], [FULL, SLIDING, FULL], [SLIDING] * 3)
}
STACKS = combined(layer_types=THREE_LAYERS)


def answer(model: PreTrainedModel, ids: Tensor, cache: PagedCache | None, length: int) -> Tensor:
    return generate(model, {"input_ids": ids}, cache, max_new_tokens=length, do_sample=False)


@combined(layer_types=THREE_LAYERS, forward_pass=PASSES, layer=[1, 2])
def test_an_interrupted_pass_is_noticed_and_taken_back(
    windowed: Models, prompts: Prompts, layer_types: list[str], forward_pass: int, layer: int
) -> None:
    model = windowed(layer_types)
    ids = prompts(20)["input_ids"]
    expected = answer(model, ids, None, length=20)
    cache = new_cache(model.config)
    with interrupted_at(model, layer, forward_pass):
        answer(model, ids, cache, length=20)

    with pytest.raises(CacheStateError, match=r"cache\.rollback\(\)"):
        answer(model, expected[:, :-5], cache, length=5)
    cache.rollback()
    cached = 0 if forward_pass == 0 else 20 + forward_pass - 1
    assert lengths(cache) == [cached] * 3
    assert answer(model, expected[:, :-5], cache, length=5).equal(expected)


@STACKS
@INTERRUPTIONS
def test_reset_after_an_interruption_makes_the_cache_new(
    windowed: Models, prompts: Prompts, layer_types: list[str], forward_pass: int
) -> None:
    model = windowed(layer_types)
    cache = new_cache(model.config)
    with interrupted_at(model, 1, forward_pass):
        answer(model, prompts(20)["input_ids"], cache, length=20)
    cache.reset()
    assert cache.stats().blocks_used == 0
    ids = prompts(30, 30, seed=1)["input_ids"]
    assert answer(model, ids, cache, length=10).equal(answer(model, ids, None, length=10))


@INTERRUPTIONS
def test_a_left_padded_batch_can_be_rolled_back(llama: Models, prompts: Prompts, forward_pass: int) -> None:
    model = llama()
    inputs = prompts(20, 3)
    expected = generate(model, inputs, None, max_new_tokens=20, do_sample=False)
    cache = new_cache(model.config)
    with interrupted_at(model, 1, forward_pass):
        generate(model, inputs, cache, max_new_tokens=20, do_sample=False)
    cache.rollback()
    inputs = {
        "input_ids": expected[:, :30],
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, 10, dtype=torch.long)], dim=1),
    }
    assert generate(model, inputs, cache, max_new_tokens=10, do_sample=False).equal(expected)


@INTERRUPTIONS
@pytest.mark.parametrize("duplicate", [PagedCache.fork, copy.deepcopy], ids=["fork", "deepcopy"])
def test_a_fork_of_an_interrupted_cache_is_refused_or_can_be_rolled_back(
    llama: Models, prompts: Prompts, duplicate: Callable[[PagedCache], PagedCache], forward_pass: int
) -> None:
    model = llama()
    ids = prompts(20)["input_ids"]
    expected = answer(model, ids, None, length=20)
    cache = new_cache(model.config)
    with interrupted_at(model, 1, forward_pass):
        answer(model, ids, cache, length=20)
    fork = None
    with contextlib.suppress(CacheStateError):
        fork = duplicate(cache)
    if fork is None:
        cache.rollback()
        fork = duplicate(cache)
    else:
        fork.rollback()
    assert answer(model, expected[:, :-5], fork, length=5).equal(expected)


@INTERRUPTIONS
def test_rollback_works_after_rows_moved_or_moving_them_is_refused(
    llama: Models, prompts: Prompts, forward_pass: int
) -> None:
    model = llama()
    ids = prompts(20, 20)["input_ids"]
    expected = answer(model, ids, None, length=20)
    cache = new_cache(model.config)
    with interrupted_at(model, 1, forward_pass):
        answer(model, ids, cache, length=20)
    order = [0, 1]
    with contextlib.suppress(CacheStateError):
        cache.reorder_cache(torch.tensor([1, 0]))
        order = [1, 0]
    cache.rollback()
    assert answer(model, expected[order, :-5], cache, length=5).equal(expected[order])


def test_rollback_without_an_interruption_does_nothing(windowed: Models, prompts: Prompts) -> None:
    model = windowed([SLIDING, FULL])
    cache = new_cache(model.config)
    cache.rollback()
    ids = prompts(20)["input_ids"]
    sequences = answer(model, ids, cache, length=10)
    before = contents(cache)
    cache.rollback()
    assert_same(contents(cache), before)
    assert answer(model, sequences, cache, length=5).equal(answer(model, ids, None, length=15))


@STACKS
@pytest.mark.parametrize("failing_layer", [0, 1, 2])
@pytest.mark.parametrize("length", [0, 15, 20])
def test_an_error_while_storing_leaves_everything_as_it_was(
    windowed: Models, monkeypatch: pytest.MonkeyPatch, layer_types: list[str], failing_layer: int, length: int
) -> None:
    cache = new_cache(windowed(layer_types).config)
    if length:
        append(cache, 0, length)
    before = contents(cache) if length else []
    write, writes = RawCodec.write, iter(range(3))

    def fail(self: RawCodec, *args: object) -> None:
        if next(writes) == failing_layer:
            raise RuntimeError("out of memory")
        write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(RawCodec, "write", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            append(cache, length, length + 20)
    assert lengths(cache) == [length] * 3
    if length:
        assert_same(contents(cache), before)
    expected = new_cache(windowed(layer_types).config)
    if length:
        append(expected, 0, length)
    assert_same(append(cache, length, length + 20), append(expected, length, length + 20))
    assert cache.stats().blocks_used == expected.stats().blocks_used


def test_an_error_after_a_copy_on_write_leaves_both_forks_whole(llama: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache(llama().config)
    append(cache, 0, 20)
    fork = cache.fork(2)
    key = TOKENS[:, :, 20:21].repeat_interleave(2, dim=0)

    def fail(self: RawCodec, *args: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(RawCodec, "write", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            fork.update(key, key, 0)
    assert lengths(fork) == [20] * 3
    assert_same(contents(fork)[:1], [TOKENS[:, :, :20].repeat_interleave(2, dim=0)])
    assert_same(contents(cache)[:1], [TOKENS[:, :, :20]])
    del fork
    assert cache.stats().blocks_used == 2 * 2
