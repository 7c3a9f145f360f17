"""A prompt is computed and stored once, for all beams and samples that go on from it."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_paged_cache import InvalidArgumentError, PagedCache, prefill
from tests.support.compat import CACHE_ARGUMENT, generate


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
    prefill(model, cache, input_ids=inputs["input_ids"][:, :30], prefill_chunk_size=7)
    prefill(model, cache, **inputs)
    assert cache.get_seq_length() == 39
    answer = generate(model, inputs, cache, max_new_tokens=5, do_sample=False)
    assert answer.equal(generate(model, inputs, None, max_new_tokens=5, do_sample=False))


def test_a_warm_cache_goes_on_in_chunks_or_says_that_it_cannot(llama, prompts) -> None:
    model, inputs = llama(), prompts(40)
    cache = prefill(model, PagedCache(model.config, block_size=16), input_ids=inputs["input_ids"][:, :10])
    if CACHE_ARGUMENT == "cache":
        prefill(model, cache, **inputs, prefill_chunk_size=7)
    else:
        # Older transformers cut the mask as if nothing were cached; their own cache then gives another answer.
        with pytest.raises(InvalidArgumentError, match="covers 7 columns, but the cache holds 9 and 7 are new"):
            prefill(model, cache, **inputs, prefill_chunk_size=7)
    answer = generate(model, inputs, cache, max_new_tokens=5, do_sample=False)
    assert answer.equal(generate(model, inputs, None, max_new_tokens=5, do_sample=False))


@pytest.mark.parametrize(
    "layer_types", [["sliding_attention", "full_attention"], ["sliding_attention"] * 2], ids="-".join
)
@pytest.mark.parametrize("chunk", [None, 1, 15, 17])
def test_prefill_of_windowed_layers_and_padded_rows(windowed, prompts, layer_types, chunk) -> None:
    model, inputs = windowed(layer_types), prompts(1, 50, 17)
    cache = prefill(model, PagedCache(model.config, block_size=16), **inputs, prefill_chunk_size=chunk)
    answer = generate(model, inputs, cache.fork(), max_new_tokens=20, do_sample=False)
    assert answer.equal(generate(model, inputs, None, max_new_tokens=20, do_sample=False))


@pytest.mark.parametrize("attention", ["eager", "sdpa", "hf_paged"])
@pytest.mark.parametrize("lengths", [(20,), (20, 5)], ids=str)
def test_prefill_of_embeddings(llama, prompts, attention, lengths) -> None:
    model, inputs = llama(attention), prompts(*lengths)
    expected = generate(model, inputs, None, max_new_tokens=10, do_sample=False)[:, max(lengths) :]
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    cache = prefill(model, PagedCache(model.config, block_size=16), **inputs)
    assert cache.get_seq_length() == max(lengths) - 1
    assert generate(model, inputs, cache, max_new_tokens=10, do_sample=False).equal(expected)


def test_prefill_of_a_prompt_that_is_there_does_nothing(llama, prompts) -> None:
    model, inputs = llama(), prompts(20)
    cache = prefill(model, PagedCache(model.config), **inputs)
    assert prefill(model, cache, **inputs) is cache
    assert cache.get_seq_length() == 19


def test_prefill_of_one_token_leaves_it_to_generate(llama, prompts) -> None:
    model, inputs = llama(), prompts(1)
    cache = prefill(model, PagedCache(model.config), **inputs)
    assert cache.get_seq_length() == 0
    answer = generate(model, inputs, cache.fork(3), num_beams=3, max_new_tokens=9, do_sample=False)
    assert answer.equal(generate(model, inputs, None, num_beams=3, max_new_tokens=9, do_sample=False))


def test_prefill_takes_the_options_of_the_call_that_follows(llama, prompts) -> None:
    model = llama()
    call = {**prompts(20), "max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    cache = prefill(model, PagedCache(model.config), **call)
    assert cache.get_seq_length() == 19
    answer = model.generate(**call, past_key_values=cache.fork(3))
    assert answer.equal(model.generate(**call))


def test_prefill_ignores_how_the_model_is_set_to_generate(llama, prompts) -> None:
    model, inputs = copy.deepcopy(llama()), prompts(20)
    model.generation_config.update(num_beams=4, num_return_sequences=2, do_sample=True, max_new_tokens=30)
    cache = prefill(model, PagedCache(model.config), **inputs)
    assert (cache.batch_size, cache.get_seq_length()) == (1, 19)


def test_prefill_of_longer_and_longer_beginnings(llama, prompts) -> None:
    model, inputs = llama(), prompts(40)
    cache = PagedCache(model.config, block_size=16)
    for length in (1, 2, 16, 17, 18, 33, 40):
        prefill(model, cache, input_ids=inputs["input_ids"][:, :length])
        assert cache.get_seq_length() == length - 1
    answer = generate(model, inputs, cache, max_new_tokens=5, do_sample=False)
    assert answer.equal(generate(model, inputs, None, max_new_tokens=5, do_sample=False))


def test_prefill_that_is_refused_leaves_the_cache_as_it_was(llama, prompts) -> None:
    model, inputs = llama(), prompts(20)
    cache = prefill(model, PagedCache(model.config), **inputs)
    with pytest.raises(InvalidArgumentError, match="10 tokens and the cache holds 19"):
        prefill(model, cache, input_ids=inputs["input_ids"][:, :10])
    with pytest.raises(InvalidArgumentError, match="needs a prompt"):
        prefill(model, cache)
    answer = generate(model, inputs, cache, max_new_tokens=5, do_sample=False)
    assert answer.equal(generate(model, inputs, None, max_new_tokens=5, do_sample=False))


def test_forks_of_a_padded_prompt_go_on_alone(llama, prompts) -> None:
    model, inputs = llama(), prompts(3, 40)
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 20, "do_sample": False}
    cache = prefill(model, PagedCache(model.config, block_size=16), **inputs)
    answers = [generate(model, inputs, cache.fork(4), **options) for _ in range(2)]
    assert answers[0].equal(answers[1])
    assert answers[0].equal(generate(model, inputs, None, **options))


@pytest.mark.parametrize("layer_types", [["full_attention"] * 2, ["sliding_attention", "full_attention"]], ids="-".join)
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4, "do_sample": False},
        {"num_beams": 4, "num_return_sequences": 3, "do_sample": False},
        {"num_return_sequences": 4, "do_sample": True, "top_k": 0},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
    ],
    ids=["beams", "beams, 3 returned", "samples", "sampled beams"],
)
def test_a_prefilled_fork_gives_the_beams_and_samples_of_a_plain_call(windowed, prompts, layer_types, options) -> None:
    model = windowed(layer_types)
    inputs = prompts(40, 21)
    torch.manual_seed(0)
    expected = generate(model, inputs, None, max_new_tokens=20, **options)
    cache = PagedCache(model.config, block_size=16)
    prefill(model, cache, **inputs)
    before = [layer.keys.clone() for layer in cache.layers]
    copies = max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
    torch.manual_seed(0)
    assert generate(model, inputs, cache.fork(copies), max_new_tokens=20, **options).equal(expected)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys.clone(), keys)
