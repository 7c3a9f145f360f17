"""Every refusal says what was wrong, what was expected and what to do, and the cache is usable afterwards."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_paged_cache import (
    CropError,
    InvalidArgumentError,
    OutOfBlocksError,
    PagedCache,
    PagedCacheError,
    UnsupportedError,
    prefill,
)
from tests.support.compat import generate

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., dict[str, Tensor]]

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def states(rows: int = 1, tokens: int = 5, heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(rows, heads, tokens, dim, generator=generator).to(dtype)


def filled(**options: object) -> PagedCache:
    cache = PagedCache(CONFIG, block_size=16, **options)
    for layer_idx in range(2):
        cache.update(states(), states(), layer_idx)
    return cache


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 48}, r"block_size=48: expected a power of two from 16 to 256"),
        ({"block_size": 8}, r"block_size=8: expected a power of two from 16 to 256"),
        ({"kv": "int3"}, r"unknown kv='int3': expected one of 'raw'"),
        ({"num_blocks": 0}, r"num_blocks=0: expected at least 1, or None"),
        ({"memory": "2 GiBi"}, r"memory='2 GiBi': expected bytes as a number, or text such as '2GiB'"),
        ({"memory": 0}, r"memory=0: expected more than 0 bytes"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_without_a_meaning(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        PagedCache(CONFIG, **options)


def test_something_else_than_a_config() -> None:
    with pytest.raises(InvalidArgumentError, match=r"PagedCache\(model.config\), not a dict"):
        PagedCache({})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cache: cache.update(states(heads=3), states(heads=3), 0), "2 KV heads of 8, .* given 3 KV heads of 8"),
        (lambda cache: cache.update(states(dim=16), states(dim=16), 0), "2 KV heads of 8, .* given 2 KV heads of 16"),
        (
            lambda cache: cache.update(states(dtype=torch.float16), states(dtype=torch.float16), 0),
            "float32, cpu, but was given .* float16",
        ),
        (lambda cache: cache.update(states(), states(tokens=4), 0), r"\(1, 2, 5, 8\) and values \(1, 2, 4, 8\)"),
        (
            lambda cache: cache.update(states(rows=3), states(rows=3), 0),
            r"the batch has 3 rows, but the cache holds 1 row.*fork\(3\)",
        ),
        (lambda cache: cache.update(states(), states(), 7), "layer 7 of a cache with 2 layers.*another model"),
        (lambda cache: cache.crop(3), r"crop\(3\): expected minus the number"),
        (lambda cache: cache.reorder_cache(torch.tensor([1])), "rows .1. of a cache with 1 rows"),
        (lambda cache: cache.batch_repeat_interleave(0), r"batch_repeat_interleave\(0\): expected at least 1"),
        (lambda cache: cache.fork(0), r"fork\(n=0\): expected at least 1"),
        (lambda cache: cache.layers[0].crop(-1), r"call `cache.crop"),
        (lambda cache: cache.layers[1].offload(), "does not offload"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_lost(change: Callable[[PagedCache], object], message: str) -> None:
    cache = filled()
    before = [layer.keys.clone() for layer in cache.layers]
    with pytest.raises(PagedCacheError, match=message):
        change(cache)
    assert cache.get_seq_length() == 5
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys.clone(), keys)
    for layer_idx in range(2):
        cache.update(states(tokens=1), states(tokens=1), layer_idx)
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize("error", [InvalidArgumentError, CropError])
def test_errors_are_those_a_caller_would_catch(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)
    assert issubclass(OutOfBlocksError, MemoryError)
    assert issubclass(UnsupportedError, NotImplementedError)


@pytest.mark.parametrize("options", [{"num_blocks": 2}, {"memory": 2 * 16 * 2 * 8 * 4 * 2 * 3}], ids=str)
def test_a_full_cache_is_as_it_was_before_the_step(options: dict[str, object]) -> None:
    cache = filled(**options)
    with pytest.raises(OutOfBlocksError, match=r"needs 2 more \(8,192 bytes\), 1 of 2 are free, and .*allows no more"):
        cache.update(states(tokens=30), states(tokens=30), 0)
    assert [layer.get_seq_length() for layer in cache.layers] == [5, 5]
    for layer_idx in range(2):
        cache.update(states(tokens=27), states(tokens=27), layer_idx)
    assert cache.get_seq_length() == 32


def test_a_budget_below_one_block() -> None:
    cache = PagedCache(CONFIG, block_size=16, memory=1000)
    with pytest.raises(OutOfBlocksError, match="memory=1,000 bytes allows no more"):
        cache.update(states(), states(), 0)
    assert cache.get_seq_length() == 0


class _EncoderDecoder:
    config = type("Config", (), {"is_encoder_decoder": True})()


def test_prefill_refuses_what_it_cannot_compute() -> None:
    decoder = type("Decoder", (), {"config": type("Config", (), {"is_encoder_decoder": False})()})()
    with pytest.raises(UnsupportedError, match="decoder-only"):
        prefill(_EncoderDecoder(), filled(), input_ids=torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(InvalidArgumentError, match="needs a prompt"):
        prefill(decoder, filled())
    with pytest.raises(InvalidArgumentError, match="the prompt has 3 tokens and the cache holds 5"):
        prefill(decoder, filled(), input_ids=torch.ones(1, 3, dtype=torch.long))


# The same through `generate`, which has to work again afterwards

OTHER = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
}
CONFIG_OF_WIDER_HEADS = LlamaConfig(**OTHER, num_hidden_layers=3, head_dim=16)
CONFIG_OF_FIVE_LAYERS = LlamaConfig(**OTHER, num_hidden_layers=5, head_dim=8)


def answer(model: PreTrainedModel, inputs: dict[str, Tensor], cache: PagedCache | None, **options: object) -> Tensor:
    return generate(model, inputs, cache, max_new_tokens=5, do_sample=False, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 64.0},
        {"block_size": None},
        {"block_size": "64"},
        {"kv": ["raw"]},
        {"kv": None},
        {"num_blocks": 2.5},
        {"num_blocks": True},
        {"num_blocks": -1},
        {"memory": "lots"},
        {"memory": "-1GiB"},
        {"memory": 0.5},
        {"memory": True},
        {"memory": float("nan")},
    ],
    ids=str,
)
def test_options_of_a_wrong_kind_are_refused_at_once(options: dict[str, object]) -> None:
    (name, value), *_ = options.items()
    with pytest.raises(InvalidArgumentError, match=re.escape(f"{name}={value!r}")):
        PagedCache(CONFIG, **options)


def test_the_model_in_the_place_of_its_config(llama: Models) -> None:
    with pytest.raises(InvalidArgumentError, match=r"PagedCache\(model.config\), not a LlamaForCausalLM"):
        PagedCache(llama())


@pytest.mark.parametrize("attention", ["sdpa", "hf_paged"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.to(torch.bfloat16), "2 KV heads of 8, float32, cpu, but was given .* bfloat16"),
        (lambda model: LlamaForCausalLM(CONFIG_OF_WIDER_HEADS).eval(), "2 KV heads of 8, .* 2 KV heads of 16"),
        (lambda model: LlamaForCausalLM(CONFIG_OF_FIVE_LAYERS).eval(), "layer 3 of a cache with 3 layers"),
    ],
    ids=["another dtype", "another model", "a deeper model"],
)
def test_a_cache_stays_with_its_model(
    llama: Models,
    prompts: Prompts,
    attention: str,
    change: Callable[[PreTrainedModel], PreTrainedModel],
    message: str,
) -> None:
    model, prompt = llama(attention), prompts(20)
    cache = PagedCache(model.config, block_size=16)
    ids = answer(model, prompt, cache)
    with pytest.raises(InvalidArgumentError, match=message):
        answer(change(copy.deepcopy(model)), {"input_ids": torch.cat([ids, ids], dim=1)}, cache)
    assert cache.get_seq_length() == 24
    assert answer(model, {"input_ids": ids}, cache).equal(answer(model, {"input_ids": ids}, None))


@pytest.mark.parametrize("attention", ["sdpa", "hf_paged"])
@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}],
    ids=["beams", "samples"],
)
def test_more_rows_than_the_cache_has_need_a_fork(
    llama: Models, prompts: Prompts, attention: str, masked: bool, options: dict[str, object]
) -> None:
    model, prompt = llama(attention), prompts(20)
    if masked:
        prompt["attention_mask"][0, 0] = 0  # `generate` drops a mask of ones
    cache = prefill(model, PagedCache(model.config), **prompt)
    call = {"max_new_tokens": 5, "do_sample": False, **options}
    with pytest.raises(InvalidArgumentError, match=r"\b3\b.*holds 1|holds 1 .*\b3\b") as info:
        generate(model, prompt, cache, **call)
    assert "cache.fork(3)" in str(info.value)
    torch.manual_seed(0)
    actual = generate(model, prompt, cache.fork(3), **call)
    torch.manual_seed(0)
    assert actual.equal(generate(model, prompt, None, **call))


def test_another_batch_needs_a_reset(llama: Models, prompts: Prompts) -> None:
    model = llama()
    cache = PagedCache(model.config)
    answer(model, prompts(20), cache)
    with pytest.raises(InvalidArgumentError, match=r"\b2\b.*holds 1|holds 1 .*\b2\b"):
        answer(model, {"input_ids": prompts(40, 40)["input_ids"]}, cache)
    cache.reset()
    assert answer(model, prompts(40, 40), cache).equal(answer(model, prompts(40, 40), None))
