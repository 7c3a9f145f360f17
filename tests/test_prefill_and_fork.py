"""A prompt is computed and stored once, for all beams and samples that go on from it."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_paged_cache import PagedCache, prefill
from tests.compat import generate


@pytest.mark.parametrize("lengths", [(1,), (16,), (17,), (3, 17, 40)], ids=str)
def test_generate_goes_on_from_a_prefilled_cache(llama, prompts, lengths) -> None:
    model, inputs = llama(), prompts(*lengths)
    cache = prefill(model, PagedCache(model.config, block_size=16), **inputs)
    assert cache.get_seq_length() == max(lengths) - 1
    answer = generate(model, inputs, cache, max_new_tokens=20, do_sample=False)
    assert answer.equal(generate(model, inputs, None, max_new_tokens=20, do_sample=False))


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"num_beams": 4, "num_return_sequences": 3}], ids=str)
def test_beams_on_a_fork_share_the_prompt(llama, prompts, options) -> None:
    model, inputs = llama(), prompts(33)
    cache = prefill(model, PagedCache(model.config, block_size=16), **inputs)
    assert cache.stats().blocks_used == 2
    beams = cache.fork(4)
    assert (beams.stats().rows, beams.stats().blocks_used) == (4, 2)
    answer = generate(model, inputs, beams, max_new_tokens=20, do_sample=False, **options)
    assert answer.equal(generate(model, inputs, None, max_new_tokens=20, do_sample=False, **options))
    assert beams.stats().blocks_used <= 2 + 4 * 2


def test_samples_on_a_fork(llama, prompts) -> None:
    model, inputs = llama(), prompts(20)
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 10}
    cache = prefill(model, PagedCache(model.config, block_size=16), **inputs)
    torch.manual_seed(0)
    answer = generate(model, inputs, cache.fork(3), **options)
    torch.manual_seed(0)
    assert answer.equal(generate(model, inputs, None, **options))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, PagedCache.fork], ids=["deepcopy", "fork"])
def test_the_original_stays_as_it_was(llama, prompts, duplicate) -> None:
    model, inputs = llama(), prompts(20)
    cache = prefill(model, PagedCache(model.config, block_size=16), **inputs)
    before = [layer.keys.clone() for layer in cache.layers]
    first = generate(model, inputs, duplicate(cache), max_new_tokens=20, do_sample=False)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys.clone(), keys)
    assert generate(model, inputs, cache, max_new_tokens=20, do_sample=False).equal(first)
    assert cache.stats().blocks_used == 3  # of 39 tokens; those of the copy came back with it


def test_prefill_in_chunks_and_of_a_warm_cache(llama, prompts) -> None:
    model, inputs = llama(), prompts(40)
    cache = PagedCache(model.config, block_size=16)
    prefill(model, cache, input_ids=inputs["input_ids"][:, :10])
    prefill(model, cache, **inputs, prefill_chunk_size=7)
    assert cache.get_seq_length() == 39
    answer = generate(model, inputs, cache, max_new_tokens=5, do_sample=False)
    assert answer.equal(generate(model, inputs, None, max_new_tokens=5, do_sample=False))
