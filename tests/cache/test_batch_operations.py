"""Rows that are moved, repeated, left out and forked: block tables change, keys and values do not."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from hf_paged_cache import InvalidArgumentError, PagedCache, prefill
from tests.support.combinations import combined
from tests.support.compat import CACHE_ARGUMENT, generate

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., dict[str, Tensor]]

SLIDING, FULL = "sliding_attention", "full_attention"
STACKS = {"-".join(types): types for types in ([FULL, FULL], [SLIDING, FULL], [FULL, SLIDING], [SLIDING, SLIDING])}
LAYERS = combined(layer_types=STACKS)
SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
MAX_ROWS = 8


def append(caches: list[DynamicCache], tokens: int, seed: int, rows: int) -> None:
    """Gives all layers of all caches the same new tokens, keys that differ from values."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(len(caches[0])):
        key, value = torch.randn(2, rows, 2, tokens, 8, generator=generator)
        for cache in caches:
            cache.update(key, value, layer)


def contents(cache: DynamicCache) -> list[Tensor]:
    """Keys and values of all layers, dense."""
    return [states.clone() for layer in cache.layers for states in (layer.keys, layer.values)]


def assert_same(actual: DynamicCache, expected: DynamicCache | list[Tensor]) -> None:
    expected = expected if isinstance(expected, list) else contents(expected)
    for ours, theirs in zip(contents(actual), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def random_operation(choice: random.Random, rows: int) -> tuple[str, Any]:
    """The name of a batch operation, and an argument for a cache of `rows` rows."""
    name = choice.choice(["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
    if name == "batch_repeat_interleave":
        return name, choice.randint(1, max(1, MAX_ROWS // rows))
    if name == "batch_select_indices" and choice.random() < 0.5:
        keep = torch.tensor([choice.random() < 0.7 for _ in range(rows)])
        keep[choice.randrange(rows)] = True
        return name, keep
    return name, torch.tensor([choice.randrange(rows) for _ in range(choice.randint(1, MAX_ROWS))])


# Against the library


@LAYERS
@SEEDS
def test_random_operations_do_what_they_do_to_dense_tensors(
    windowed: Models, layer_types: list[str], seed: int
) -> None:
    choice = random.Random(seed)
    config = windowed(layer_types).config
    ours, theirs = PagedCache(config, block_size=16), DynamicCache(config=config)
    append([ours, theirs], tokens=20, seed=seed, rows=3)
    for step in range(100):
        name, argument = random_operation(choice, ours.batch_size)
        getattr(ours, name)(argument)
        getattr(theirs, name)(argument)
        assert_same(ours, theirs)
        if choice.random() < 0.5:
            append([ours, theirs], choice.choice([1, 1, 1, 5]), seed=step, rows=ours.batch_size)
            assert_same(ours, theirs)
    ours.reset()
    assert ours.stats().blocks_used == 0


@LAYERS
@SEEDS
def test_a_family_of_forks_stays_apart(windowed: Models, layer_types: list[str], seed: int) -> None:
    choice = random.Random(seed)
    config = windowed(layer_types).config
    pairs = [(PagedCache(config, block_size=16), DynamicCache(config=config))]
    append([*pairs[0]], tokens=20, seed=seed, rows=2)
    witness = pairs[0][0].fork()
    for step in range(100):
        ours, theirs = choice.choice(pairs)
        kind = choice.random()
        if kind < 0.15 and len(pairs) < 5:
            pairs.append((ours.fork(), copy.deepcopy(theirs)))
        elif kind < 0.25 and len(pairs) > 1:
            pairs.remove((ours, theirs))
        elif kind < 0.6:
            name, argument = random_operation(choice, ours.batch_size)
            getattr(ours, name)(argument)
            getattr(theirs, name)(argument)
        else:
            append([ours, theirs], choice.choice([1, 1, 1, 5]), seed=step, rows=ours.batch_size)
        for paged, dense in pairs:
            assert_same(paged, dense)
    del ours, paged
    pairs.clear()
    stats = witness.stats()
    assert stats.blocks_used == 2 * (2 if FULL in layer_types else 0) + 2 * (2 if SLIDING in layer_types else 0)
    assert stats.blocks_used + stats.blocks_free == stats.blocks_total


@combined(quick=1, attention=["eager", "sdpa", "hf_paged"], layer_types=STACKS)
def test_rows_of_a_padded_batch_take_their_padding_with_them(
    windowed: Models, prompts: Prompts, layer_types: list[str], attention: str
) -> None:
    model = windowed(layer_types, attention)
    inputs = prompts(3, 30, 17)
    order = torch.tensor([2, 0, 0, 1, 2])
    moved = {name: tensor[order] for name, tensor in inputs.items()}
    expected = generate(model, moved, None, max_new_tokens=20, do_sample=False)

    cache = PagedCache(model.config, block_size=16)
    prefill(model, cache, **inputs)
    cache.reorder_cache(order)
    assert generate(model, moved, cache, max_new_tokens=20, do_sample=False).equal(expected)


def test_a_batch_that_is_split_and_joined_is_the_same(llama: Models) -> None:
    cache = PagedCache(llama().config, block_size=16)
    append([cache], tokens=20, seed=0, rows=4)
    halves = [cache.fork(), cache.fork()]
    halves[0].batch_select_indices(torch.tensor([0, 1]))
    halves[1].batch_select_indices(torch.tensor([2, 3]))
    joined = [torch.cat(parts) for parts in zip(*map(contents, halves), strict=True)]
    assert_same(cache, joined)


# Sharing


def test_repeated_rows_share_their_blocks_until_they_are_written(llama: Models) -> None:
    cache = PagedCache(llama().config, block_size=16)
    append([cache], tokens=40, seed=0, rows=1)
    cache.batch_repeat_interleave(4)
    assert (cache.stats().blocks_used, cache.stats().copies) == (3, 0)
    append([cache], tokens=1, seed=1, rows=4)  # the third block is partly filled: three rows need their own
    assert (cache.stats().blocks_used, cache.stats().copies) == (6, 3)
    append([cache], tokens=1, seed=2, rows=4)
    assert (cache.stats().blocks_used, cache.stats().copies) == (6, 3)


def test_a_full_block_is_never_copied(llama: Models) -> None:
    cache = PagedCache(llama().config, block_size=16)
    append([cache], tokens=32, seed=0, rows=1)
    cache.batch_repeat_interleave(4)
    append([cache], tokens=1, seed=1, rows=4)
    assert (cache.stats().blocks_used, cache.stats().copies) == (2 + 4, 0)


def test_rows_left_out_give_their_blocks_back(llama: Models) -> None:
    cache = PagedCache(llama().config, block_size=16)
    append([cache], tokens=20, seed=0, rows=4)
    assert cache.stats().blocks_used == 8
    cache.batch_select_indices(torch.tensor([3, 1]))
    assert cache.stats().blocks_used == 4
    cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.stats().blocks_used == 2


def test_selecting_no_row_gives_everything_back(llama: Models) -> None:
    cache = PagedCache(llama().config)
    append([cache], tokens=20, seed=0, rows=2)
    cache.batch_select_indices(torch.tensor([], dtype=torch.long))
    assert cache.stats().blocks_used == 0


def test_waste_is_what_no_row_has_filled(llama: Models) -> None:
    cache = PagedCache(llama().config, block_size=64)
    append([cache], tokens=10, seed=0, rows=1)
    token_bytes = cache.stats().bytes_used // 64
    assert cache.stats().tail_waste_bytes == 54 * token_bytes
    assert cache.fork(8).stats().tail_waste_bytes == 54 * token_bytes


# Forks


@pytest.mark.parametrize("duplicate", [PagedCache.fork, copy.deepcopy], ids=["fork", "deepcopy"])
@pytest.mark.parametrize("layer_types", [[FULL, FULL], [SLIDING, FULL]], ids="-".join)
def test_the_original_is_unchanged_after_its_copies_ran(
    windowed: Models, prompts: Prompts, layer_types: list[str], duplicate: Callable[[PagedCache], PagedCache]
) -> None:
    model = windowed(layer_types)
    prompt = prompts(20)["input_ids"]
    cache = PagedCache(model.config, block_size=16)
    prefill(model, cache, input_ids=prompt)
    before, used = contents(cache), cache.stats().blocks_used
    tails = [prompts(length, seed=length)["input_ids"] for length in (3, 30, 1)]
    expected = [
        generate(model, {"input_ids": torch.cat([prompt, tail], dim=1)}, None, max_new_tokens=20, do_sample=False)
        for tail in tails
    ]
    for order in ([0, 1, 2], [2, 0, 1]):
        forks = [duplicate(cache) for _ in tails]
        for index in order:
            inputs = {"input_ids": torch.cat([prompt, tails[index]], dim=1)}
            answer = generate(model, inputs, forks[index], max_new_tokens=20, do_sample=False)
            assert answer.equal(expected[index])
        assert_same(cache, before)
        del forks
        assert cache.stats().blocks_used == used


def test_the_original_may_go_before_its_forks(llama: Models, prompts: Prompts) -> None:
    model = llama()
    inputs = {"input_ids": prompts(20)["input_ids"]}
    expected = generate(model, inputs, None, max_new_tokens=20, do_sample=False)
    cache = PagedCache(model.config, block_size=16)
    prefill(model, cache, **inputs)
    fork = cache.fork().fork()
    del cache
    assert fork.stats().blocks_used == 2
    assert generate(model, inputs, fork, max_new_tokens=20, do_sample=False).equal(expected)


def test_an_original_that_goes_on_leaves_its_forks_alone(llama: Models, prompts: Prompts) -> None:
    model = llama()
    inputs = {"input_ids": prompts(20)["input_ids"]}
    cache = PagedCache(model.config, block_size=16)
    prefill(model, cache, **inputs)
    fork, before = cache.fork(), contents(cache)
    generate(model, inputs, cache, max_new_tokens=20, do_sample=False)
    assert_same(fork, before)
    cache.reset()
    assert_same(fork, before)


def test_a_fork_of_an_empty_cache_is_an_empty_cache(llama: Models, prompts: Prompts) -> None:
    model = llama()
    fork = PagedCache(model.config).fork(3)
    inputs = prompts(20, 3)
    expected = generate(model, inputs, None, max_new_tokens=5, do_sample=False)
    assert generate(model, inputs, fork, max_new_tokens=5, do_sample=False).equal(expected)


def test_operations_on_an_empty_cache_do_nothing(windowed: Models) -> None:
    cache = PagedCache(windowed([SLIDING, FULL]).config)
    cache.reorder_cache(torch.tensor([0, 0]))
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0]))
    assert (cache.get_seq_length(), cache.batch_size) == (0, -1)


def test_forks_share_one_budget(llama: Models, prompts: Prompts) -> None:
    model = llama()
    inputs = {"input_ids": prompts(20)["input_ids"]}
    cache = PagedCache(model.config, block_size=16, num_blocks=4)
    prefill(model, cache, **inputs)
    forks = [cache.fork() for _ in range(2)]
    for fork in forks:
        generate(model, inputs, fork, max_new_tokens=5, do_sample=False)
    assert cache.stats().blocks_used == forks[0].stats().blocks_used == 4


@pytest.mark.parametrize("n", [0, -1, 1.5, None], ids=str)
def test_a_fork_has_at_least_one_copy_of_every_row(llama: Models, n: Any) -> None:
    cache = PagedCache(llama().config)
    with pytest.raises(InvalidArgumentError, match="expected at least 1"):
        cache.fork(n)
    with pytest.raises(InvalidArgumentError, match="expected at least 1"):
        cache.batch_repeat_interleave(n)


@pytest.mark.parametrize("rows", [[0, 2], [-1], [5, 0]], ids=str)
def test_rows_that_are_not_there_are_refused(llama: Models, rows: list[int]) -> None:
    cache = PagedCache(llama().config)
    append([cache], tokens=5, seed=0, rows=2)
    before = contents(cache)
    with pytest.raises(InvalidArgumentError, match="2 rows: expected indices from 0 to 1"):
        cache.reorder_cache(torch.tensor(rows))
    with pytest.raises(InvalidArgumentError, match="2 rows: expected indices from 0 to 1"):
        cache.batch_select_indices(torch.tensor(rows))
    assert_same(cache, before)


@pytest.mark.parametrize("mask", [[True], [True, False, False]], ids=str)
def test_a_mask_of_rows_has_one_entry_a_row(llama: Models, mask: list[bool]) -> None:
    cache = PagedCache(llama().config)
    append([cache], tokens=5, seed=0, rows=2)
    with pytest.raises(InvalidArgumentError):
        cache.batch_select_indices(torch.tensor(mask))
    assert cache.batch_size == 2


@pytest.mark.slow
def test_forks_may_be_used_in_threads(llama: Models, prompts: Prompts) -> None:
    model, prompt = llama(), prompts(20)["input_ids"]
    calls = [{"input_ids": torch.cat([prompt, prompts(5, seed=seed)["input_ids"]], dim=1)} for seed in range(4)]
    expected = [generate(model, call, None, max_new_tokens=60, do_sample=False) for call in calls]
    for _ in range(15):
        cache = PagedCache(model.config, block_size=16)
        prefill(model, cache, input_ids=prompt)
        forks = [cache.fork() for _ in calls]
        with ThreadPoolExecutor(len(calls)) as threads:
            answers = threads.map(
                lambda call, fork: generate(model, call, fork, max_new_tokens=60, do_sample=False), calls, forks
            )
            assert all(ours.equal(theirs) for ours, theirs in zip(answers, expected, strict=True))


# Beams


@combined(quick=1, attention=["eager", "sdpa", "hf_paged"], layer_types=STACKS)
def test_beams_are_those_of_a_search_without_a_cache(
    windowed: Models, prompts: Prompts, layer_types: list[str], attention: str
) -> None:
    model = windowed(layer_types, attention)
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 24, "do_sample": False}
    inputs = prompts(5, 14)
    expected = generate(
        model, inputs, None, **options, use_cache=False, output_scores=True, return_dict_in_generate=True
    )
    beams = expected.beam_indices[:, :20]
    assert (beams[:, 1:] != beams[:, :-1]).any()  # beams do swap
    cache = PagedCache(model.config, block_size=16)
    output = generate(model, inputs, cache, **options, output_scores=True, return_dict_in_generate=True)
    assert output.sequences.equal(expected.sequences)
    torch.testing.assert_close(output.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4)


def test_beams_of_a_plain_call_share_the_prompt_after_the_first_reorder(llama: Models, prompts: Prompts) -> None:
    model = llama()
    cache = PagedCache(model.config, block_size=16)
    output = generate(
        model,
        {"input_ids": prompts(64)["input_ids"]},
        cache,
        num_beams=4,
        do_sample=False,
        max_new_tokens=3,
        return_dict_in_generate=True,
    )
    assert output[CACHE_ARGUMENT] is cache
    assert cache.stats().blocks_used <= 4 + 4


# Two caches in one


def encoder_decoder_pair(model: PreTrainedModel) -> tuple[EncoderDecoderCache, EncoderDecoderCache]:
    ours = EncoderDecoderCache(
        PagedCache(model.config, block_size=16), PagedCache(model.config, block_size=16, cross_attention=True)
    )
    theirs = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache())
    for number, part in enumerate(("self_attention_cache", "cross_attention_cache")):
        append([getattr(ours, part), getattr(theirs, part)], tokens=14 + 20 * number, seed=number, rows=2)
    return ours, theirs


@pytest.mark.parametrize(
    ("operation", "argument"),
    [
        ("reorder_cache", torch.tensor([1, 1])),
        ("batch_repeat_interleave", 3),
        ("batch_select_indices", torch.tensor([1])),
        ("crop", -2),
    ],
    ids=["reorder", "repeat", "select", "crop"],
)
def test_operations_reach_both_halves_of_an_encoder_decoder_cache(
    windowed: Models, operation: str, argument: Any
) -> None:
    ours, theirs = encoder_decoder_pair(windowed([SLIDING, FULL]))
    for cache in (ours, theirs):
        cache.activate_past_recording()
        getattr(cache, operation)(argument)
    assert_same(ours.self_attention_cache, theirs.self_attention_cache)
    assert_same(ours.cross_attention_cache, theirs.cross_attention_cache)


def test_an_encoder_decoder_cache_is_copied_and_reset_as_one(windowed: Models) -> None:
    ours, theirs = encoder_decoder_pair(windowed([SLIDING, FULL]))
    duplicate = copy.deepcopy(ours)
    ours.reset()
    assert ours.cross_attention_cache.stats().blocks_used > 0  # those of the copy
    assert_same(duplicate.self_attention_cache, theirs.self_attention_cache)
    assert_same(duplicate.cross_attention_cache, theirs.cross_attention_cache)
    del duplicate
    assert ours.self_attention_cache.stats().blocks_used == 0
    assert ours.cross_attention_cache.stats().blocks_used == 0
