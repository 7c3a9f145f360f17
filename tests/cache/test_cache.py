"""What transformers may expect of a cache object, and gets."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import PagedCache
from tests.support.combinations import combined
from tests.support.compat import CACHE_ARGUMENT, generate

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., dict[str, Tensor]]

SLIDING, FULL = "sliding_attention", "full_attention"
STACKS = {"-".join(types): types for types in ([FULL, FULL], [SLIDING, FULL], [FULL, SLIDING], [SLIDING, SLIDING])}
LAYERS = combined(layer_types=STACKS)
KV_HEADS, HEAD_DIM = 2, 8


def states(tokens: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Keys or values of some tokens, `[batch, kv heads, tokens, head_dim]`."""
    return torch.randn(batch, KV_HEADS, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def update_all(cache: PagedCache, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [cache.update(key, value, layer_idx) for layer_idx in range(len(cache))]


def answer(model: PreTrainedModel, inputs: Mapping[str, Tensor], cache: Any, **options: Any) -> Tensor:
    return generate(model, inputs, cache, max_new_tokens=12, do_sample=False, **options)


# The object


def test_forward_returns_the_cache_it_was_given(llama: Models, prompts: Prompts) -> None:
    model = llama()
    cache = PagedCache(model.config)
    output = model(**prompts(5), **{CACHE_ARGUMENT: cache})
    assert output[CACHE_ARGUMENT] is cache


def test_forward_returns_the_cache_in_a_tuple(llama: Models, prompts: Prompts) -> None:
    model = llama()
    cache = PagedCache(model.config)
    assert model(**prompts(5), **{CACHE_ARGUMENT: cache}, return_dict=False)[1] is cache


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}], ids=["greedy", "beams", "sampling"])
def test_generate_returns_the_cache_it_was_given(llama: Models, prompts: Prompts, options: dict[str, Any]) -> None:
    model = llama()
    cache = PagedCache(model.config)
    output = generate(model, prompts(5), cache, max_new_tokens=3, return_dict_in_generate=True, **options)
    assert output[CACHE_ARGUMENT] is cache


@LAYERS
@pytest.mark.parametrize("length", [1, 16, 40])
def test_the_last_token_of_an_answer_is_not_cached(
    windowed: Models, prompts: Prompts, layer_types: list[str], length: int
) -> None:
    model = windowed(layer_types)
    cache = PagedCache(model.config, block_size=16)
    sequences = answer(model, prompts(length), cache)
    assert [cache.get_seq_length(layer) for layer in range(len(cache))] == [sequences.shape[1] - 1] * 2


def test_generate_leaves_no_trace_on_the_model(llama: Models, prompts: Prompts) -> None:
    model = llama()
    attention, parameters = model.config._attn_implementation, list(model.state_dict())
    cache = PagedCache(model.config)
    answer(model, prompts(5), cache)
    assert model.config._attn_implementation == attention
    assert list(model.state_dict()) == parameters
    assert not isinstance(cache, torch.nn.Module)


def test_properties_that_transformers_asks_for(windowed: Models) -> None:
    cache = PagedCache(windowed([SLIDING, FULL]).config)
    assert len(cache) == 2
    assert cache.is_sliding == [True, False]
    assert cache.is_linear == [False, False]
    assert cache.is_croppable
    assert not cache.is_compileable
    assert cache.get_max_length(0) == 16
    assert cache.get_max_length(1) == -1
    assert cache.get_seq_length() == 0


def test_batch_size_is_known_while_there_are_tokens(llama: Models, prompts: Prompts) -> None:
    model = llama()
    cache = PagedCache(model.config)
    assert cache.batch_size == -1
    answer(model, prompts(5, 3), cache)
    assert cache.batch_size == 2
    cache.reset()
    assert cache.batch_size == -1


def test_early_initialization_makes_the_layers_without_tokens(windowed: Models) -> None:
    cache = PagedCache(windowed([SLIDING, FULL]).config)
    assert not cache.is_initialized
    cache.early_initialization(1, KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.get_seq_length() == 0


def test_early_initialization_takes_a_size_for_each_layer(windowed: Models) -> None:
    cache = PagedCache(windowed([SLIDING, FULL]).config)
    cache.early_initialization(1, [1, 2], [8, 16], torch.float32, torch.device("cpu"))
    wide = torch.ones(1, 2, 3, 16)
    key, _ = cache.update(wide, wide, 1)
    assert key.shape == (1, 2, 3, 16)


def test_a_cache_says_what_it_holds(llama: Models, prompts: Prompts) -> None:
    model = llama()
    cache = PagedCache(model.config, block_size=16)
    answer(model, prompts(20, 20), cache)
    block_bytes = 3 * 2 * KV_HEADS * 16 * HEAD_DIM * 4  # layers, keys and values, fp32
    stats = cache.stats()
    assert (stats.rows, stats.tokens, stats.blocks_used) == (2, 31, 4)
    assert stats.bytes_used == 4 * block_bytes
    assert stats.tail_waste_bytes == (64 - 62) * block_bytes // 16
    assert "3 layers, 2 x 31 tokens" in repr(cache)


# What `update` returns


@LAYERS
@pytest.mark.parametrize("chunks", [[1] * 40, [40], [7, 12, 1, 1, 19], [15, 1, 1, 16, 7], [17, 23]], ids=str)
def test_update_returns_the_columns_that_were_announced(
    windowed: Models, layer_types: list[str], chunks: list[int]
) -> None:
    cache = PagedCache(windowed(layer_types).config, block_size=16)
    key, value = states(40, batch=2), states(40, batch=2, seed=1)
    start = 0
    for size in chunks:
        end = start + size
        announced = [cache.get_mask_sizes(size, layer) for layer in range(len(cache))]
        returned = update_all(cache, key[:, :, start:end], value[:, :, start:end])
        for (columns, offset), (got_key, got_value) in zip(announced, returned, strict=True):
            assert got_key.shape[2] == got_value.shape[2] == columns
            torch.testing.assert_close(got_key.clone(), key[:, :, offset:end], rtol=0, atol=0)
            torch.testing.assert_close(got_value.clone(), value[:, :, offset:end], rtol=0, atol=0)
        start = end


@combined(layer_types=STACKS, before=[3, 14, 15, 16, 30], draft=[(1, 1), (5, 0), (5, 3), (5, 5)])
def test_drafts_without_a_crop_in_between_keep_the_announced_columns(
    windowed: Models, layer_types: list[str], before: int, draft: tuple[int, int]
) -> None:
    drafted, rejected = draft
    cache = PagedCache(windowed(layer_types).config, block_size=16)
    cache.activate_past_recording()
    key, value = states(40), states(40, seed=1)
    update_all(cache, key[:, :, :before], value[:, :, :before])
    cache.crop(0)
    for position in [*range(before, before + drafted), None, *range(before + drafted - rejected, 40)]:
        if position is None:
            cache.crop(-rejected)
            continue
        announced = [cache.get_mask_sizes(1, layer) for layer in range(len(cache))]
        new = slice(position, position + 1)
        for (columns, offset), (got, _) in zip(
            announced, update_all(cache, key[:, :, new], value[:, :, new]), strict=True
        ):
            assert got.shape[2] == columns
            torch.testing.assert_close(got.clone(), key[:, :, offset : position + 1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "extra", [{}, {"kwargs": {"position": 3}}, {"cache_kwargs": {"cache_position": None}}], ids=str
)
def test_update_takes_whatever_a_model_passes_with_it(llama: Models, extra: dict[str, Any]) -> None:
    cache = PagedCache(llama().config)
    key, _ = cache.update(states(3), states(3), 0, **extra)
    torch.testing.assert_close(key.clone(), states(3))


def test_update_takes_cache_arguments_by_position(llama: Models) -> None:
    cache = PagedCache(llama().config)
    key, _ = cache.update(states(3), states(3), 0, {"sin": None, "cos": None})
    torch.testing.assert_close(key.clone(), states(3))


def test_update_takes_tensors_of_any_stride(llama: Models) -> None:
    cache = PagedCache(llama().config)
    key = states(5, batch=2)
    interleaved = key.transpose(1, 2).contiguous().transpose(1, 2)
    one_for_all = key[:1].expand(2, -1, -1, -1)
    assert not interleaved.is_contiguous()
    cache.update(interleaved, one_for_all, 0)
    cache.update(key, key, 0)
    torch.testing.assert_close(cache.layers[0].keys.clone(), torch.cat([key, key], dim=2))
    torch.testing.assert_close(cache.layers[0].values.clone(), torch.cat([one_for_all, key], dim=2))


def test_update_stores_what_it_was_given_and_not_what_becomes_of_it(llama: Models) -> None:
    cache = PagedCache(llama().config)
    key = states(5)
    cache.update(key, key, 0)
    key.zero_()
    torch.testing.assert_close(cache.layers[0].keys.clone(), states(5))


@LAYERS
def test_update_without_tokens_returns_what_is_stored(windowed: Models, layer_types: list[str]) -> None:
    cache = PagedCache(windowed(layer_types).config)
    assert [key.shape[2] for key, _ in update_all(cache, states(0), states(0))] == [0, 0]
    update_all(cache, states(20), states(20))
    announced = [cache.get_mask_sizes(0, layer)[0] for layer in range(2)]
    assert [key.shape[2] for key, _ in update_all(cache, states(0), states(0))] == announced
    assert cache.get_seq_length() == 20


def test_a_layer_may_be_given_tokens_on_its_own(llama: Models) -> None:
    cache = PagedCache(llama().config)
    key, _ = cache.layers[0].update(states(5), states(5))
    torch.testing.assert_close(key.clone(), states(5))


def test_heads_may_be_fewer_than_the_config_says(llama: Models) -> None:
    cache = PagedCache(llama().config)
    half = states(5)[:, :1]  # what one of two tensor-parallel ranks computes
    update_all(cache, half, half)
    key, _ = cache.update(half, half, 0)
    assert key.shape == (1, 1, 10, HEAD_DIM)


# What the layers hold


@LAYERS
@pytest.mark.parametrize("length", [5, 15, 16, 40])
def test_keys_and_values_are_those_of_the_library(windowed: Models, layer_types: list[str], length: int) -> None:
    config = windowed(layer_types).config
    ours, theirs = PagedCache(config, block_size=16), DynamicCache(config=config)
    for start in range(0, length, 6):
        key = states(length, batch=2)[:, :, start : start + 6]
        value = states(length, batch=2, seed=1)[:, :, start : start + 6]
        for layer in range(len(ours)):
            ours.update(key, value, layer)
            theirs.update(key, value, layer)
    for our_layer, their_layer in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(our_layer.keys.clone(), their_layer.keys, rtol=0, atol=0)
        torch.testing.assert_close(our_layer.values.clone(), their_layer.values, rtol=0, atol=0)


def test_an_empty_layer_has_no_keys(llama: Models) -> None:
    layer = PagedCache(llama().config).layers[0]
    assert layer.keys is None
    assert layer.values is None


@LAYERS
def test_iteration_gives_what_a_cache_of_the_library_can_be_made_from(
    windowed: Models, prompts: Prompts, layer_types: list[str]
) -> None:
    model = windowed(layer_types, "sdpa")
    ours, theirs = PagedCache(model.config), DynamicCache(config=model.config)
    answer(model, prompts(20), ours)
    answer(model, prompts(20), theirs)
    assert len(list(ours)) == len(ours)
    remade, expected = DynamicCache(list(ours)), DynamicCache(list(theirs))
    assert remade.is_sliding == expected.is_sliding
    for our_layer, their_layer in zip(remade.layers, expected.layers, strict=True):
        torch.testing.assert_close(our_layer.keys, their_layer.keys)
        torch.testing.assert_close(our_layer.values, their_layer.values)


def test_an_edit_of_stored_keys_is_kept_or_refused(llama: Models) -> None:
    cache = PagedCache(llama().config)
    cache.update(states(5), states(5), 0)
    try:
        cache.layers[0].keys[:, :, 0] = 0
    except Exception:
        torch.testing.assert_close(cache.layers[0].keys.clone(), states(5))
    else:
        assert (cache.layers[0].keys[:, :, 0] == 0).all()


# A cache that is used again


@LAYERS
def test_reset_makes_a_cache_as_good_as_new(windowed: Models, prompts: Prompts, layer_types: list[str]) -> None:
    model = windowed(layer_types)
    cache = PagedCache(model.config, block_size=16)
    answer(model, prompts(40, 7, 23), cache)
    cache.reset()
    assert cache.stats().blocks_used == 0
    assert cache.stats().blocks_free == cache.stats().blocks_total
    assert [cache.get_seq_length(layer) for layer in range(2)] == [0, 0]
    inputs = prompts(9, 30, seed=1)
    assert answer(model, inputs, cache).equal(answer(model, inputs, PagedCache(model.config, block_size=16)))


def test_reset_of_an_empty_cache_does_nothing(llama: Models) -> None:
    cache = PagedCache(llama().config)
    cache.reset()
    assert cache.stats().blocks_total == 0


def test_a_pickled_cache_goes_on_where_it_was(llama: Models, prompts: Prompts) -> None:
    model = llama()
    cache = PagedCache(model.config, block_size=16)
    prompt = prompts(20)
    answer(model, prompt, cache)
    restored = pickle.loads(pickle.dumps(cache))
    longer = {"input_ids": torch.cat([prompt["input_ids"]] * 2, dim=1)}
    assert answer(model, longer, restored).equal(answer(model, longer, copy.deepcopy(cache)))


@pytest.mark.parametrize("first", ["inference_mode", "no_grad"])
def test_a_cache_may_be_used_in_and_out_of_inference_mode(llama: Models, prompts: Prompts, first: str) -> None:
    model = llama()
    cache = PagedCache(model.config, block_size=16, num_blocks=8)
    ids = prompts(60)["input_ids"]
    with torch.inference_mode(first == "inference_mode"), torch.no_grad():
        model(ids[:, :30], **{CACHE_ARGUMENT: cache})
    with torch.inference_mode(first != "inference_mode"):
        sequences = answer(model, {"input_ids": ids}, cache)
    assert sequences.equal(answer(model, {"input_ids": ids}, None))
