"""Layers that look back a window: what they see, and what they keep.

A window shows only in sequences longer than it, so every sequence here is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import PagedCache
from tests.support.combinations import Later, combined, later
from tests.support.compat import CACHE_ARGUMENT, generate

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., dict[str, Tensor]]


SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 16
ORDERS = {
    "-".join(order): order for order in ([SLIDING, FULL], [FULL, SLIDING], [SLIDING, SLIDING, FULL], [SLIDING, SLIDING])
}
LENGTHS = [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, *later(WINDOW - 2, WINDOW + 2)]
CHUNKS = {"one shot": None, "chunks of 7": 7, "one by one": 1, "chunks of W": Later(WINDOW)}
STEPS = WINDOW + 4


def chunks(length: int, size: int | None) -> Iterator[slice]:
    size = size or length
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


@torch.no_grad()
def logits_with_cache(model: PreTrainedModel, ids: Tensor, pieces: list[slice], cache: DynamicCache) -> Tensor:
    """Logits of all tokens, the pieces of `ids` being computed one after the other."""
    return torch.cat([model(ids[:, piece], **{CACHE_ARGUMENT: cache}).logits for piece in pieces], dim=1)


@torch.no_grad()
def logits_at_once(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


# What is seen


@combined(layer_types=ORDERS, length=LENGTHS, chunk=CHUNKS, attention=["hf_paged", *later("eager", "sdpa")])
def test_a_prompt_and_its_answer_see_the_window(
    windowed: Models, prompts: Prompts, layer_types: list[str], length: int, chunk: int | None, attention: str
) -> None:
    model = windowed(layer_types, attention)
    ids = prompts(length + STEPS)["input_ids"]
    pieces = [*chunks(length, chunk), *(slice(step, step + 1) for step in range(length, length + STEPS))]
    actual = logits_with_cache(model, ids, pieces, PagedCache(model.config, block_size=16))
    torch.testing.assert_close(actual, logits_at_once(windowed(layer_types, "eager"), ids), rtol=1e-3, atol=1e-3)


@combined(
    quick=1, window=[1, 2, 5, 17, 20, 33], block_size=[16, *later(64)], attention=["hf_paged", "eager", Later("sdpa")]
)
def test_windows_of_any_size(windowed: Models, prompts: Prompts, window: int, block_size: int, attention: str) -> None:
    model = windowed([SLIDING, FULL, SLIDING], attention, window=window)
    ids = prompts(90)["input_ids"]
    pieces = [slice(0, 30), slice(30, 31), slice(31, 45), *(slice(step, step + 1) for step in range(45, 90))]
    actual = logits_with_cache(model, ids, pieces, PagedCache(model.config, block_size=block_size))
    expected = logits_at_once(windowed([SLIDING, FULL, SLIDING], "eager", window=window), ids)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_the_window_of_these_models_changes_what_they_say(windowed: Models, prompts: Prompts) -> None:
    ids = prompts(40)["input_ids"]
    narrow, wide = (logits_at_once(windowed([SLIDING, FULL], window=window), ids) for window in (WINDOW, 1000))
    torch.testing.assert_close(narrow[:, :WINDOW], wide[:, :WINDOW])
    assert (narrow[:, WINDOW:].argmax(-1) != wide[:, WINDOW:].argmax(-1)).any()


@combined(layer_types=ORDERS)
def test_an_answer_far_past_the_window(windowed: Models, prompts: Prompts, layer_types: list[str]) -> None:
    model = windowed(layer_types)
    inputs = prompts(3)
    cache = PagedCache(model.config, block_size=16)
    answer = generate(model, inputs, cache, max_new_tokens=5 * WINDOW, do_sample=False)
    theirs = DynamicCache(config=model.config)
    assert answer.equal(generate(model, inputs, theirs, max_new_tokens=5 * WINDOW, do_sample=False))


# What is kept


def kept_blocks(block_size: int) -> int:
    """Blocks that hold a window and the token that comes next, wherever in a block they begin."""
    return -(-(WINDOW + block_size - 1) // block_size)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("first", [1, WINDOW, 10 * WINDOW])
def test_blocks_are_given_back_when_they_have_left_the_window(windowed: Models, block_size: int, first: int) -> None:
    cache = PagedCache(windowed([SLIDING, SLIDING]).config, block_size=block_size)
    for tokens in [first, *[1] * 100]:
        states = torch.randn(1, 2, tokens, 8)
        for layer in range(2):
            cache.update(states, states, layer)
        assert cache.stats().blocks_used <= kept_blocks(block_size)
    assert cache.stats().blocks_total <= kept_blocks(block_size) + 1


@pytest.mark.parametrize("chunk", [None, 64, 50], ids=["one shot", "chunks of 64", "chunks of 50"])
def test_a_long_prompt_takes_no_more_blocks_than_a_window(
    windowed: Models, prompts: Prompts, chunk: int | None
) -> None:
    model = windowed([SLIDING, SLIDING])
    cache = PagedCache(model.config, block_size=16, num_blocks=4)
    inputs = prompts(300)
    answer = generate(model, inputs, cache, max_new_tokens=5, do_sample=False, prefill_chunk_size=chunk)
    assert answer.equal(generate(model, inputs, None, max_new_tokens=5, do_sample=False))


def test_a_long_prompt_is_never_allocated_in_a_windowed_group(windowed: Models, prompts: Prompts) -> None:
    model = windowed([SLIDING, SLIDING])
    cache = PagedCache(model.config, block_size=16)
    generate(model, prompts(300), cache, max_new_tokens=5, do_sample=False)
    block_bytes = cache.stats().bytes_used // cache.stats().blocks_used
    assert cache.stats().bytes_peak <= 2 * (kept_blocks(16) + 2) * block_bytes


def test_full_layers_beside_windowed_ones_keep_everything(windowed: Models, prompts: Prompts) -> None:
    model = windowed([SLIDING, FULL])
    cache = PagedCache(model.config, block_size=16)
    generate(model, prompts(159), cache, max_new_tokens=2, do_sample=False)
    assert 10 < cache.stats().blocks_used <= 10 + kept_blocks(16)


def test_waste_is_counted_in_kept_blocks_only(windowed: Models) -> None:
    cache = PagedCache(windowed([SLIDING]).config, block_size=16)
    states = torch.randn(1, 2, 100, 8)
    cache.update(states, states, 0)
    stats = cache.stats()
    assert stats.blocks_used == 2  # tokens 80 to 99
    assert stats.tail_waste_bytes == 12 * stats.bytes_used // 32


def test_beams_of_a_windowed_model_give_blocks_back(windowed: Models, prompts: Prompts) -> None:
    model = windowed([SLIDING, SLIDING])
    cache = PagedCache(model.config, block_size=16)
    options = {"num_beams": 4, "do_sample": False, "max_new_tokens": 4 * WINDOW}
    inputs = prompts(3 * WINDOW)
    answer = generate(model, inputs, cache, **options)
    assert answer.equal(generate(model, inputs, None, **options))
    assert cache.stats().blocks_used <= 4 * kept_blocks(16)
