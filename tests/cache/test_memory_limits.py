"""How much memory a cache takes, what keeps it from taking more, and that it gives everything back."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from hf_paged_cache import OutOfBlocksError, PagedCache, prefill
from tests.support.combinations import combined
from tests.support.compat import CACHE_ARGUMENT, generate
from tests.support.families import FAMILIES, inputs
from tests.support.memory import Memory

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., dict[str, Tensor]]

SLIDING, FULL = "sliding_attention", "full_attention"
BLOCK = 16
BLOCK_BYTES = 3 * 2 * 2 * BLOCK * 8 * 4  # of the Llama: layers, keys and values, KV heads, tokens, head_dim, fp32
BITS = {"int8": 8.375, "int4": 4.5, "k4v2": 3.75, "kivi2": 3.0}
STACKS = pytest.mark.parametrize(
    "layer_types", [[FULL, FULL], [SLIDING, FULL], [FULL, SLIDING], [SLIDING, SLIDING]], ids="-".join
)


def new_cache(model: PreTrainedModel, **limits: Any) -> PagedCache:
    return PagedCache(model.config, block_size=BLOCK, **limits)


def answer(model: PreTrainedModel, inputs: dict[str, Tensor], cache: Any, length: int) -> Tensor:
    return generate(model, inputs, cache, max_new_tokens=length, do_sample=False)


def contents(cache: DynamicCache) -> list[Tensor]:
    return [states.clone() for layer in cache.layers for states in (layer.keys, layer.values)]


def tensor_bytes(cache: PagedCache) -> int:
    """Bytes of the tensors that a cache holds, as torch counts them."""
    pools = {id(layer.group.pool): layer.group.pool for layer in cache.layers}
    return sum(
        plane.nbytes for pool in pools.values() for layer in pool.layers.values() for plane in layer.blocks.planes
    )


# A limit of blocks


@pytest.mark.parametrize("length", [1, *range(BLOCK - 1, BLOCK + 2), *range(2 * BLOCK - 1, 2 * BLOCK + 2)])
@pytest.mark.parametrize("new_tokens", [1, 5])
def test_exactly_the_needed_blocks_are_enough(llama: Models, prompts: Prompts, length: int, new_tokens: int) -> None:
    model, prompt = llama(), prompts(length)
    cached = length + new_tokens - 1
    needed = -(-cached // BLOCK)
    cache = new_cache(model, num_blocks=needed)
    assert answer(model, prompt, cache, new_tokens).equal(answer(model, prompt, None, new_tokens))
    assert (cache.stats().blocks_used, cache.stats().blocks_free) == (needed, 0)
    with pytest.raises(OutOfBlocksError):
        answer(model, {"input_ids": torch.full((1, needed * BLOCK + 2), 9)}, cache, 1)
    assert cache.get_seq_length() == cached


@pytest.mark.parametrize("length", range(BLOCK + 1, 3 * BLOCK + 1, 5))
def test_one_block_less_is_refused_and_nothing_is_lost(llama: Models, prompts: Prompts, length: int) -> None:
    model = llama()
    needed = -(-length // BLOCK)
    cache = new_cache(model, num_blocks=needed - 1)
    with pytest.raises(OutOfBlocksError, match=f"needs {needed} more .* num_blocks={needed - 1} allows no more"):
        answer(model, prompts(length), cache, 1)
    assert (cache.get_seq_length(), cache.stats().blocks_used) == (0, 0)
    shorter = prompts((needed - 1) * BLOCK)
    assert answer(model, shorter, cache, 1).equal(answer(model, shorter, None, 1))


def test_rows_of_a_padded_batch_need_what_they_need_alone(llama: Models, prompts: Prompts) -> None:
    model, batch = llama(), prompts(3, 16, 40)
    needed = 1 + 2 + 3  # each with one more token than its prompt
    cache = new_cache(model, num_blocks=needed)
    assert answer(model, batch, cache, 2).equal(answer(model, batch, None, 2))
    with pytest.raises(OutOfBlocksError):
        answer(model, batch, new_cache(model, num_blocks=needed - 1), 2)


def test_a_limit_holds_for_each_layer_group(windowed: Models, prompts: Prompts) -> None:
    model, prompt = windowed([SLIDING, FULL]), prompts(3 * BLOCK)
    cache = new_cache(model, num_blocks=3)
    answer(model, prompt, cache, 1)
    assert cache.stats().blocks_total == 2 * 3
    with pytest.raises(OutOfBlocksError, match="of 3 are free, and num_blocks=3"):
        answer(model, {"input_ids": torch.cat([prompt["input_ids"]] * 2, dim=1)}, cache, 1)
    assert cache.get_seq_length() == 3 * BLOCK


def test_forks_need_a_block_for_each_row_that_differs(llama: Models, prompts: Prompts) -> None:
    model, prompt = llama(), prompts(2 * BLOCK + 5)
    options = {"num_beams": 4, "do_sample": False, "max_new_tokens": 6}
    expected = generate(model, prompt, None, **options)
    for num_blocks, is_enough in [(2 + 1 + 4, True), (2 + 3, False)]:
        cache = new_cache(model, num_blocks=num_blocks)
        prefill(model, cache, **prompt)
        fork = cache.fork(4)
        if is_enough:
            assert generate(model, prompt, fork, **options).equal(expected)
        else:
            with pytest.raises(OutOfBlocksError):
                generate(model, prompt, fork, **options)
        del fork
        assert cache.stats().blocks_used == 3
        assert answer(model, prompt, cache, 2).equal(answer(model, prompt, None, 2))


# A limit of bytes


@STACKS
@pytest.mark.parametrize("blocks", [5.0, 8.5, 18.0])
@pytest.mark.parametrize("chunk", [None, 7])
def test_a_budget_is_never_exceeded(
    windowed: Models, prompts: Prompts, memory: Memory, layer_types: list[str], blocks: float, chunk: int | None
) -> None:
    model, limit = windowed(layer_types), int(blocks * BLOCK_BYTES * 2 / 3)  # blocks of two layers
    cache = new_cache(model, memory=limit)
    ids = prompts(400)["input_ids"]
    refused = False
    for start in range(0, 400, chunk or 40):
        try:
            with torch.no_grad():
                model(ids[:, start : start + (chunk or 40)], **{CACHE_ARGUMENT: cache})
        except OutOfBlocksError as error:
            assert f"memory={limit:,} bytes allows no more" in str(error)  # noqa: PT017
            refused = True
            break
        stats = cache.stats()
        assert stats.bytes_used <= stats.bytes_allocated <= stats.bytes_peak <= limit
        assert memory.peak <= limit
    assert refused or FULL not in layer_types


@pytest.mark.parametrize("num_blocks", [2, 3, 10])
def test_a_single_group_uses_its_whole_budget(llama: Models, prompts: Prompts, num_blocks: int) -> None:
    model = llama()
    for limit in (num_blocks * BLOCK_BYTES, (num_blocks + 1) * BLOCK_BYTES - 1):
        cache = new_cache(model, memory=limit)
        prompt = prompts((num_blocks - 1) * BLOCK)  # one is the null block
        assert answer(model, prompt, cache, 1).equal(answer(model, prompt, None, 1))
        with pytest.raises(OutOfBlocksError):
            answer(model, {"input_ids": torch.cat([prompt["input_ids"], torch.full((1, 1), 9)], dim=1)}, cache, 1)


def test_two_groups_use_most_of_their_budget(windowed: Models, prompts: Prompts) -> None:
    model = windowed([SLIDING, FULL])
    limit = 40 * BLOCK_BYTES // 3  # 40 blocks of one layer
    cache = new_cache(model, memory=limit)
    with pytest.raises(OutOfBlocksError):
        generate(model, prompts(1000), cache, max_new_tokens=1, prefill_chunk_size=8)
    assert cache.stats().bytes_used > 0.45 * limit  # while a pool moves, its old tensors are still there


@pytest.mark.parametrize("memory", ["12 KiB", 12 * 1024, "12288", "12288 B", "0.0117187500 MiB"], ids=str)
def test_a_budget_is_a_number_or_a_text(llama: Models, prompts: Prompts, memory: int | str) -> None:
    model = llama()
    cache = new_cache(model, memory=memory)
    with pytest.raises(OutOfBlocksError, match="memory=12,288 bytes"):
        answer(model, prompts(40), cache, 1)


def test_the_tighter_of_two_limits_counts(llama: Models, prompts: Prompts) -> None:
    model = llama()
    with pytest.raises(OutOfBlocksError, match="num_blocks=2 allows"):
        answer(model, prompts(40), new_cache(model, num_blocks=2, memory="1GiB"), 1)
    with pytest.raises(OutOfBlocksError, match="memory="):
        answer(model, prompts(40), new_cache(model, num_blocks=1000, memory=3 * BLOCK_BYTES), 1)


@pytest.mark.parametrize("limit", [1, 100, BLOCK_BYTES, 2 * BLOCK_BYTES - 1])
def test_a_budget_below_one_block_says_what_one_block_takes(llama: Models, prompts: Prompts, limit: int) -> None:
    cache = new_cache(llama(), memory=limit)
    with pytest.raises(OutOfBlocksError, match=f"memory={limit:,} bytes") as info:
        answer(llama(), prompts(5), cache, 1)
    assert info.value.needed == 1
    assert info.value.block_bytes == BLOCK_BYTES
    assert f"{BLOCK_BYTES:,} bytes" in str(info.value)
    assert cache.stats().bytes_allocated <= limit


def test_the_error_says_what_was_needed(llama: Models, prompts: Prompts) -> None:
    model = llama()
    cache = new_cache(model, num_blocks=4)
    answer(model, prompts(20), cache, 1)
    with pytest.raises(OutOfBlocksError) as info:
        answer(model, prompts(100), cache, 1)
    error = info.value
    assert isinstance(error, MemoryError)
    assert (error.needed, error.free, error.total, error.block_bytes) == (5, 2, 4, BLOCK_BYTES)
    assert f"needs 5 more ({5 * BLOCK_BYTES:,} bytes), 2 of 4 are free" in str(error)


# After a lack of memory


@pytest.mark.parametrize("layer_types", [[FULL, FULL], [SLIDING, FULL], [FULL, SLIDING]], ids="-".join)
def test_a_cache_that_ran_out_goes_on_when_there_is_room(
    windowed: Models, prompts: Prompts, layer_types: list[str]
) -> None:
    model, ids = windowed(layer_types), prompts(20, 20)["input_ids"]
    expected = answer(model, {"input_ids": ids}, None, 60)
    cache = new_cache(model, num_blocks=6)
    with pytest.raises(OutOfBlocksError):
        answer(model, {"input_ids": ids}, cache, 60)
    assert cache.get_seq_length() == 3 * BLOCK
    assert cache.stats().blocks_used + cache.stats().blocks_free == cache.stats().blocks_total
    cache.batch_select_indices(torch.tensor([1]))
    known = 3 * BLOCK + 1
    assert answer(model, {"input_ids": expected[1:, :known]}, cache, 80 - known).equal(expected[1:])


def test_a_prompt_that_does_not_fit_leaves_the_conversation_as_it_was(llama: Models, prompts: Prompts) -> None:
    model = llama()
    cache = new_cache(model, num_blocks=3)
    sequences = answer(model, prompts(20), cache, 10)
    before, stats = contents(cache), cache.stats()
    with pytest.raises(OutOfBlocksError):
        answer(model, {"input_ids": torch.cat([sequences, prompts(60)["input_ids"]], dim=1)}, cache, 1)
    assert cache.stats() == stats
    for ours, theirs in zip(contents(cache), before, strict=True):
        assert ours.equal(theirs)
    assert answer(model, {"input_ids": sequences}, cache, 10).equal(answer(model, {"input_ids": sequences}, None, 10))


@pytest.mark.parametrize("name", ["Jamba", "Qwen3-Next", "Falcon-H1", "LFM2"])
def test_recurrent_states_are_untouched_by_a_step_that_does_not_fit(name: str) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    model = family.build("eager")
    prompt = inputs(family, [BLOCK])["input_ids"]
    cache = PagedCache(model.config, block_size=BLOCK, num_blocks=1)
    with torch.no_grad():
        model(prompt, **{CACHE_ARGUMENT: cache})

    def states() -> list[Tensor]:
        kept = [getattr(layer, kind, {}) for layer in cache.layers for kind in ("conv_states", "recurrent_states")]
        return [state.clone() for states in kept for state in states.values() if state is not None]

    before = states()
    assert before
    with pytest.raises(OutOfBlocksError), torch.no_grad():
        model(prompt[:, :1], **{CACHE_ARGUMENT: cache})
    for ours, theirs in zip(states(), before, strict=True):
        assert ours.equal(theirs)


# What a cache takes


@STACKS
def test_the_bytes_of_a_cache_are_those_of_its_tensors(
    windowed: Models, prompts: Prompts, memory: Memory, layer_types: list[str]
) -> None:
    model = windowed(layer_types)
    cache = new_cache(model)
    for length in (5, 40, 200):
        cache.reset()
        answer(model, prompts(length, 3), cache, 30)
        assert cache.stats().bytes_allocated == tensor_bytes(cache) == memory.alive
        assert cache.stats().bytes_peak == memory.peak


def test_a_pool_grows_plane_by_plane(llama: Models, prompts: Prompts, memory: Memory) -> None:
    model = llama()
    cache = new_cache(model)
    answer(model, prompts(40), cache, 200)
    assert memory.peak <= memory.alive + memory.alive / 6  # three layers of the new size, and keys of one of the old


def test_a_pool_grows_geometrically(llama: Models, memory: Memory) -> None:
    cache = new_cache(llama())
    states = torch.zeros(1, 2, 1, 8)
    for _ in range(3000):
        for layer in range(3):
            cache.update(states, states, layer)
    used = cache.stats().blocks_used
    assert cache.stats().blocks_total <= 129 / 128 * used + 1
    assert memory.allocations <= 6 * 200  # by a small part each time, and by single blocks while there are few


@combined(quick=1, kv=["raw", *BITS], dtype=[torch.float32, torch.bfloat16])
def test_a_long_context_takes_little_more_than_its_bits(memory: Memory, kv: str, dtype: torch.dtype) -> None:
    """At most 5 %, at peak too, of a prompt of 8k tokens and 96 more, in a stack of 30 layers."""
    layers, heads, dim, prompt, more = 30, 1, 64, 8192 - 32, 96
    config = LlamaConfig(hidden_size=dim, num_hidden_layers=layers, num_attention_heads=1, head_dim=dim)
    cache = PagedCache(config, kv=kv)
    for length in (prompt, *[1] * more):
        states = torch.zeros(1, heads, length, dim, dtype=dtype)
        for layer in range(layers):
            cache.update(states, states, layer)
    num_codes = cache.stats().tokens_quantized
    exact = prompt + more - num_codes
    assert exact == {"raw": prompt + more, "int8": 0}.get(kv, 3 * 64)
    token_bits = num_codes * BITS.get(kv, 0) + exact * dtype.itemsize * 8
    assert cache.stats().bytes_peak == memory.peak <= 1.05 * layers * heads * 2 * dim * token_bits / 8


def test_a_left_padded_batch_takes_little_more_than_its_tokens(llama: Models, prompts: Prompts) -> None:
    model = llama(num_layers=1)
    lengths = (64, 100, 700, 2048)
    cache = PagedCache(model.config)
    with torch.no_grad():
        model(**prompts(*lengths), **{CACHE_ARGUMENT: cache})
    token_bytes = cache.stats().bytes_used // cache.stats().blocks_used // 64
    assert cache.stats().bytes_allocated <= (1.1 * sum(lengths) + len(lengths) * 64) * token_bytes


# What it gives back


def test_fifty_answers_take_no_more_memory_than_one(llama: Models, prompts: Prompts, memory: Memory) -> None:
    model = llama()
    cache = new_cache(model)
    answer(model, prompts(40, 3), cache, 6)
    alive, stats = memory.alive, cache.stats()
    for seed in range(50):
        cache.reset()
        answer(model, prompts(40, 3, seed=seed), cache, 6)
        assert memory.alive == alive
        assert cache.stats().blocks_used == stats.blocks_used


def test_fifty_forks_leave_nothing_behind(llama: Models, prompts: Prompts, memory: Memory) -> None:
    model, prompt = llama(), prompts(40)
    cache = new_cache(model)
    prefill(model, cache, **prompt)
    generate(model, prompt, cache.fork(4), num_beams=4, max_new_tokens=4)
    alive, used = memory.alive, cache.stats().blocks_used
    for _ in range(50):
        generate(model, prompt, cache.fork(4), num_beams=4, max_new_tokens=4)
        copy.deepcopy(cache)
        assert (memory.alive, cache.stats().blocks_used) == (alive, used)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "hf_paged"])
def test_a_cache_that_is_gone_holds_nothing(windowed: Models, prompts: Prompts, memory: Memory, attention: str) -> None:
    model = windowed([SLIDING, FULL], attention)
    cache = new_cache(model)
    answer(model, prompts(40, 3), cache, 20)
    fork = cache.fork(2)
    gc.collect()
    gc.disable()  # nothing may wait for the garbage collector
    try:
        del cache
        assert memory.alive > 0
        del fork
        assert memory.alive == 0
    finally:
        gc.enable()


def test_a_cache_that_is_gone_after_an_error_holds_nothing(llama: Models, prompts: Prompts, memory: Memory) -> None:
    model = llama()

    def run_out() -> None:
        with pytest.raises(OutOfBlocksError):
            answer(model, prompts(60), new_cache(model, num_blocks=4), 20)

    run_out()
    gc.collect()
    assert memory.alive == 0


def test_the_answer_of_a_call_holds_the_cache_and_nothing_else_does(
    llama: Models, prompts: Prompts, memory: Memory
) -> None:
    model = llama()
    output = generate(model, prompts(40), new_cache(model), max_new_tokens=5, return_dict_in_generate=True)
    gc.collect()
    assert memory.alive > 0
    del output
    gc.collect()
    assert memory.alive == 0
