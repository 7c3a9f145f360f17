"""Every refusal says what was wrong, what was expected and what to do, and the cache is usable afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig

from hf_paged_cache import (
    CropError,
    InvalidArgumentError,
    OutOfBlocks,
    PagedCache,
    PagedCacheError,
    UnsupportedError,
    prefill,
)

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
        (lambda cache: cache.update(states(rows=3), states(rows=3), 0), r"holds 1 rows, but the batch has 3.*fork"),
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
    assert issubclass(OutOfBlocks, MemoryError)
    assert issubclass(UnsupportedError, NotImplementedError)


@pytest.mark.parametrize("options", [{"num_blocks": 2}, {"memory": 2 * 16 * 2 * 8 * 4 * 2 * 3}], ids=str)
def test_a_full_cache_is_as_it_was_before_the_step(options: dict[str, object]) -> None:
    cache = filled(**options)
    with pytest.raises(OutOfBlocks, match=r"needs 2 more \(8,192 bytes\), 1 of 2 are free, and .*allows no more"):
        cache.update(states(tokens=30), states(tokens=30), 0)
    assert [layer.get_seq_length() for layer in cache.layers] == [5, 5]
    for layer_idx in range(2):
        cache.update(states(tokens=27), states(tokens=27), layer_idx)
    assert cache.get_seq_length() == 32


def test_a_budget_below_one_block() -> None:
    cache = PagedCache(CONFIG, block_size=16, memory=1000)
    with pytest.raises(OutOfBlocks, match="memory=1,000 bytes allows no more"):
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
