"""A cache of quantized blocks beside `generate`: rows that move, limits, numbers, copies, threads, dtypes."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hf_paged_kernels import MixedBlocks
from torch import Tensor
from transformers import PreTrainedModel

from hf_paged_cache import KVQuant, OutOfBlocksError, PagedCache, prefill
from tests.support.combinations import combined
from tests.support.compat import CACHE_ARGUMENT, generate

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., dict[str, Tensor]]

BLOCK = 16
INT4 = KVQuant("int4", exact_recent=16, exact_sinks=16)
KINDS = {"int8": "int8", "fp8": "fp8", "int4": INT4, "kivi2": KVQuant("kivi2", exact_recent=16, exact_sinks=16)}
kinds = pytest.mark.parametrize("kv", KINDS.values(), ids=KINDS)
# Layers with exact blocks and layers without, which share a block table.
MIXED = KVQuant("int4", exact_recent=16, exact_sinks=16, layers={0: "raw", 1: "int8"})
SLIDING, FULL = "sliding_attention", "full_attention"


def new_cache(model: PreTrainedModel, kv: Any, **options: Any) -> PagedCache:
    return PagedCache(model.config, block_size=BLOCK, kv=kv, **options)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, cache: PagedCache, **options: Any) -> Tensor:
    return model(ids, **{CACHE_ARGUMENT: cache}, **options).logits


def answer(model: PreTrainedModel, inputs: dict[str, Tensor], cache: Any, length: int, **options: Any) -> Tensor:
    return generate(model, inputs, cache, max_new_tokens=length, do_sample=False, **options)


def codes_of(cache: PagedCache) -> Iterator[tuple[Tensor, ...]]:
    """For each layer, row and block that the row reads as codes, their bits."""
    for layer in cache.layers:
        blocks, table = layer.group.pool.layers[layer.layer_idx].blocks, layer.group.table
        is_exact = (
            table.exact_ids != 0 if isinstance(blocks, MixedBlocks) else torch.zeros(table.block_ids.shape).numpy()
        )
        for row, block in zip(*((table.block_ids != 0) & (is_exact == 0)).nonzero(), strict=True):
            block_id = int(table.block_ids[row, block])
            yield tuple(plane[:, block_id].contiguous().view(torch.uint8).clone() for plane in blocks.planes)


def assert_same_bits(one: list[tuple[Tensor, ...]], other: list[tuple[Tensor, ...]]) -> None:
    assert len(one) == len(other) > 0
    for planes, others in zip(one, other, strict=True):
        for plane, expected in zip(planes, others, strict=True):
            assert torch.equal(plane, expected)


@kinds
def test_codes_stay_as_they_are_however_rows_move(llama: Models, prompts: Prompts, kv: Any) -> None:
    """A hundred reorders, repeats, selections and forks, some of which go on with tokens of their own."""
    model, generator = llama(), random.Random(0)
    cache = new_cache(model, kv)
    logits(model, prompts(64)["input_ids"], cache)
    before = list(codes_of(cache))
    kept = []
    for turn in range(100):
        rows = cache.batch_size
        move = generator.choice(["reorder", "repeat", "select", "fork"])
        if move == "reorder":
            cache.reorder_cache(torch.tensor([generator.randrange(rows) for _ in range(rows)]))
        elif move == "repeat" and rows < 3:
            cache.batch_repeat_interleave(2)
        elif move == "select":
            cache.batch_select_indices(torch.tensor([generator.randrange(rows)]))
        else:
            fork = cache.fork(generator.randint(1, 2))
            kept = [*kept[-2:], fork]
            if turn % 10 == 0:
                logits(model, torch.full((fork.batch_size, 20), 9), fork)
    cache.batch_select_indices(torch.tensor([0]))
    assert_same_bits(list(codes_of(cache)), before)


@kinds
def test_codes_do_not_depend_on_the_pieces_of_the_prompt(llama: Models, prompts: Prompts, kv: Any) -> None:
    """In the first layer, whose keys do not depend on what is read."""
    model, ids = llama(num_layers=1), prompts(90)["input_ids"]
    whole = new_cache(model, kv)
    logits(model, ids, whole)
    logits(model, ids[:, :1], whole)
    for pieces in ([30, 30, 30, 1], [1] * 91, [50, 7, 33, 1]):
        cache = new_cache(model, kv)
        for piece in torch.cat([ids, ids[:, :1]], dim=1).split(pieces, dim=1):
            logits(model, piece, cache)
        assert_same_bits(list(codes_of(cache)), list(codes_of(whole)))


@pytest.mark.parametrize("kv", [*KINDS.values(), MIXED], ids=[*KINDS, "a codec a layer"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_does_not_know_blocks_reads_the_same(
    llama: Models, prompts: Prompts, kv: Any, attention: str
) -> None:
    ids, mask = prompts(70, 40).values()
    results = []
    for model in (llama(), llama(attention)):
        cache = new_cache(model, kv)
        out = [logits(model, ids[:, :60], cache, attention_mask=mask[:, :60])]
        out += [logits(model, ids[:, n : n + 1], cache, attention_mask=mask[:, : n + 1]) for n in range(60, 70)]
        results.append(torch.cat(out, dim=1) * mask[..., None])
    # Where a number lies in the middle of two codes, the last bits decide: seldom, and by one step.
    difference = (results[0] - results[1]).abs()
    assert float(difference.median()) < 1e-4
    assert float(difference.max()) < 0.3


# Limits


@kinds
def test_a_full_pool_works_and_a_block_more_is_refused(llama: Models, prompts: Prompts, kv: Any) -> None:
    model, prompt = llama(), prompts(70)
    cache = new_cache(model, kv, num_blocks=5)
    expected = answer(model, prompt, new_cache(model, kv), 11)
    assert answer(model, prompt, cache, 11).equal(expected)
    assert (cache.stats().blocks_used, cache.stats().blocks_free) == (5, 0)
    for _ in range(3):
        with pytest.raises(OutOfBlocksError, match="num_blocks=5"):
            logits(model, torch.full((1, 2), 9), cache)
        assert cache.get_seq_length() == 80
    cache.crop(-30)
    # A refused pass has quantized nothing, not even what was due.
    reference = new_cache(model, kv)
    answer(model, prompt, reference, 11)
    reference.crop(-30)
    torch.testing.assert_close(logits(model, expected[:, :3], cache), logits(model, expected[:, :3], reference))


@kinds
def test_a_memory_limit_is_never_exceeded_and_what_fits_goes_on(llama: Models, prompts: Prompts, kv: Any) -> None:
    model, pieces = llama(), prompts(200)["input_ids"].split(20, dim=1)
    unlimited = new_cache(model, kv)
    expected = [logits(model, piece, unlimited) for piece in pieces]
    num_refused = 0
    for limit in (12_000, 25_000, 40_000):
        cache = new_cache(model, kv, memory=limit)
        for number, piece in enumerate(pieces):
            try:
                actual = logits(model, piece, cache)
            except OutOfBlocksError:
                num_refused += 1
                assert cache.get_seq_length() == 20 * number
                cache.crop(-min(8, 20 * number))
                if number:
                    logits(model, pieces[number - 1][:, -8:], cache)
                break
            assert cache.stats().bytes_allocated <= cache.stats().bytes_peak <= limit
            torch.testing.assert_close(actual, expected[number], rtol=1e-4, atol=1e-4)
    assert num_refused >= 2


@kinds
@pytest.mark.parametrize("limit", [50_000, 70_000])
def test_a_prompt_that_did_not_fit_does_not_stand_in_the_way_of_one_that_does(
    llama: Models, prompts: Prompts, kv: Any, limit: int
) -> None:
    model = llama()
    fresh, tried = (new_cache(model, kv, memory=limit) for _ in range(2))
    with pytest.raises(OutOfBlocksError):
        logits(model, prompts(1_500)["input_ids"], tried)
    assert tried.get_seq_length() == 0
    for length in range(600, 0, -50):
        try:
            expected = logits(model, prompts(length)["input_ids"], fresh)
        except OutOfBlocksError:
            continue
        assert logits(model, prompts(length)["input_ids"], tried).equal(expected)
        return
    pytest.fail("no prompt fits")


# Numbers


def test_stats_count_what_is_quantized_and_what_is_exact(llama: Models, prompts: Prompts) -> None:
    model = llama()
    cache = new_cache(model, INT4)
    raw_bytes, code_bytes = (new_cache_bytes(model, kv) for kv in ("raw", "int4"))
    assert cache.stats().tokens_quantized == 0
    for length, quantized, exact_blocks in ((20, 0, 2), (47, 0, 3), (48, 16, 2), (100, 64, 3)):
        cache.reset()
        logits(model, prompts(length, length)["input_ids"], cache)
        stats = cache.stats()
        assert stats.tokens_quantized == 2 * quantized
        assert stats.bytes_used == 2 * (exact_blocks * raw_bytes + -(-length // BLOCK) * code_bytes)
        assert stats.bytes_used <= stats.bytes_allocated <= stats.bytes_peak
    cache.batch_repeat_interleave(3)
    assert cache.stats().tokens_quantized == 2 * 64
    cache.reset()
    assert (cache.stats().tokens_quantized, cache.stats().bytes_used) == (0, 0)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_every_token_counts_as_quantized_if_each_is_by_itself(llama: Models, prompts: Prompts, kv: str) -> None:
    cache = new_cache(llama(), kv)
    logits(llama(), prompts(30, 20)["input_ids"], cache, attention_mask=prompts(30, 20)["attention_mask"])
    assert cache.stats().tokens_quantized == 50


def test_exact_blocks_do_not_grow_with_the_context(llama: Models) -> None:
    model = llama(num_layers=1)
    cache = new_cache(model, INT4)
    logits(model, torch.full((2, 2000), 9), cache)
    for _ in range(40):
        logits(model, torch.full((2, 1), 9), cache)
    exact = cache._groups[0].pool.exact_pool.allocator
    assert exact.num_referenced == 2 * 3  # sink, window, and what follows the last full block
    assert exact.num_blocks - 1 <= 2 * 5


def new_cache_bytes(model: PreTrainedModel, kv: str) -> int:
    """Bytes of one block over all layers."""
    cache = new_cache(model, kv)
    logits(model, torch.full((1, 1), 9), cache)
    return cache._groups[0].pool.block_bytes


# Copies


@combined(
    quick=1,
    kv=KINDS,
    duplicate={
        "deepcopy": copy.deepcopy,
        "fork": PagedCache.fork,
        "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    },
)
def test_a_copy_goes_on_as_the_original_does(
    llama: Models, prompts: Prompts, kv: Any, duplicate: Callable[[PagedCache], PagedCache]
) -> None:
    model, prompt = llama(), prompts(70, 50)
    cache = prefill(model, new_cache(model, kv), **prompt)
    duplicates = [duplicate(cache), duplicate(cache)]
    expected = answer(model, prompt, duplicates[0], 20)
    assert answer(model, prompt, duplicates[1], 20).equal(expected)
    assert answer(model, prompt, cache, 20).equal(expected)


@kinds
def test_forks_in_threads_answer_as_they_do_one_after_the_other(llama: Models, prompts: Prompts, kv: Any) -> None:
    model, prompt = llama(), prompts(70)
    cache = prefill(model, new_cache(model, kv), **prompt)
    ids = prompts(8, 8, 8, 8, seed=5)["input_ids"]
    whole = [{"input_ids": torch.cat([prompt["input_ids"], row[None]], dim=1)} for row in ids]
    expected = [answer(model, inputs, cache.fork(), 20) for inputs in whole]
    with ThreadPoolExecutor(len(whole)) as threads:
        actual = list(threads.map(lambda inputs: answer(model, inputs, cache.fork(), 20), whole))
    assert all(ours.equal(it) for ours, it in zip(actual, expected, strict=True))


@kinds
def test_a_prefilled_fork_is_the_same_as_a_prompt_for_each_beam(llama: Models, prompts: Prompts, kv: Any) -> None:
    model, prompt = llama(), prompts(70)
    cache = prefill(model, new_cache(model, kv), **prompt)
    beams = answer(model, prompt, cache.fork(3), 20, num_beams=3)
    one_by_one = prefill(model, new_cache(model, kv), **prompt)
    one_by_one.batch_repeat_interleave(3)
    assert answer(model, prompt, one_by_one, 20, num_beams=3).equal(beams)


@kinds
def test_an_interrupted_pass_is_rolled_back(llama: Models, prompts: Prompts, kv: Any) -> None:
    """Blocks that were quantized when it began stay so: the next pass reads them as codes anyway."""
    model, ids = llama(), prompts(90)["input_ids"]
    cache, reference = new_cache(model, kv), new_cache(model, kv)
    for it in (cache, reference):
        logits(model, ids[:, :40], it)
        logits(model, ids[:, 40:60], it)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, ids[:, 60:80], cache)
    handle.remove()
    cache.rollback()
    assert logits(model, ids[:, 60:], cache).equal(logits(model, ids[:, 60:], reference))


# Numbers that are not fp32


@kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_models_in_16_bits(llama: Models, prompts: Prompts, kv: Any, dtype: torch.dtype) -> None:
    model, prompt = copy.deepcopy(llama()).to(dtype), prompts(70, 40)
    cache = new_cache(model, kv)
    sequences = answer(model, prompt, cache, 20)
    assert sequences.shape == (2, 90)
    assert cache.layers[0].keys.dtype == cache.layers[0].keys.clone().dtype == dtype
    assert bool(cache.layers[0].keys.clone().isfinite().all())
    assert cache.stats().tokens_quantized > 0


@kinds
def test_windowed_layers_beside_full_ones(windowed: Models, prompts: Prompts, kv: Any) -> None:
    model, prompt = windowed([SLIDING, FULL], window=40), prompts(90)
    expected = answer(model, prompt, new_cache(model, kv), 20)
    chunks = new_cache(model, kv)
    assert answer(model, prompt, chunks, 20).equal(expected)
    assert chunks.stats().tokens_quantized > 0
