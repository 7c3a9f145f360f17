"""A cache that holds another prompt, and positions that do not go on from it, are refused where that can be told.

`generate` cuts a prompt by the number of cached tokens and never looks whether they are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import EncoderDecoderCache, GenerationMixin, PreTrainedModel, masking_utils

from hf_paged_cache import CacheStateError, InvalidArgumentError, PagedCache, PagedCacheError
from tests.support.compat import CACHE_ARGUMENT, generate
from tests.support.families import family_called, inputs

Models = Callable[..., PreTrainedModel]
Tokens = Callable[..., Tensor]

NUM_CACHED = 47
# Rotary positions, learned ones, and none at all: ALiBi.
MODELS = pytest.mark.parametrize("name", ["Llama", "GPT-2", "MPT", "Bloom"])


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, cache: PagedCache | None, **options: Any) -> Tensor:
    return model(ids, **{CACHE_ARGUMENT: cache}, **options).logits


def answer(model: PreTrainedModel, ids: Tensor, cache: PagedCache | None, **options: Any) -> Tensor:
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return generate(model, {**prompt, **options}, cache, max_new_tokens=6, do_sample=False, use_cache=True)


def stale_cache(model: PreTrainedModel, tokens: Tokens) -> PagedCache:
    """A cache that holds `NUM_CACHED` tokens which no prompt of these tests begins with."""
    cache = PagedCache(model.config, block_size=16)
    logits(model, tokens(NUM_CACHED, seed=1), cache)
    return cache


def same_cache(cache: PagedCache, before: list[Tensor]) -> bool:
    return all(torch.equal(layer.keys.clone(), keys) for layer, keys in zip(cache.layers, before, strict=True))


@MODELS
@pytest.mark.parametrize("length", [1, 23, 24, 40, 46, 47])
@pytest.mark.parametrize("chunk", [None, 16])
def test_a_prompt_that_is_not_longer_is_refused(name: str, tokens: Tokens, length: int, chunk: int | None) -> None:
    model = family_called(name).build("eager")
    cache = stale_cache(model, tokens)
    before = [layer.keys.clone() for layer in cache.layers]
    with pytest.raises((PagedCacheError, RuntimeError, IndexError)) as refusal:
        answer(model, tokens(length), cache, prefill_chunk_size=chunk)
    if name != "GPT-2":  # which adds position embeddings before it builds a mask, and fails by itself
        assert re.search(r"cache holds \d+ (tokens|columns).* take a new cache, or `reset\(\)`", str(refusal.value))
    assert cache.get_seq_length() == NUM_CACHED
    assert same_cache(cache, before)
    cache.reset()
    assert answer(model, tokens(length), cache).equal(answer(model, tokens(length), None))


def test_the_refusal_names_both_numbers(llama: Models, tokens: Tokens) -> None:
    with pytest.raises(CacheStateError, match=r"(position 7|prompt has 40 tokens), but the cache holds 47 tokens"):
        answer(llama(), tokens(40), stale_cache(llama(), tokens))


def test_a_forward_pass_by_hand_under_positions_of_another_prompt(llama: Models, tokens: Tokens) -> None:
    cache = stale_cache(llama(), tokens)
    with pytest.raises(CacheStateError, match="row 0 has position 0, but the cache holds 47"):
        logits(llama(), tokens(5), cache, position_ids=torch.arange(5)[None])


def test_generate_inside_of_another_module(llama: Models, tokens: Tokens) -> None:
    """Its arguments are not those of the model."""
    model = llama()

    class Policy(torch.nn.Module):
        def forward(self, ids: Tensor, cache: PagedCache, position_ids: Tensor | None = None) -> Tensor:
            return answer(model, ids, cache)

    with pytest.raises(CacheStateError, match="but the cache holds 47 tokens"):
        Policy()(tokens(40), stale_cache(model, tokens))


def test_a_stale_row_of_a_padded_batch(llama: Models, prompts: Callable[..., dict[str, Tensor]]) -> None:
    model, prompt = llama(), prompts(5, 30)
    cache = PagedCache(model.config, block_size=16)
    logits(model, prompt["input_ids"], cache, attention_mask=prompt["attention_mask"])
    new = prompt["input_ids"][:, -3:]
    mask = torch.cat([prompt["attention_mask"], torch.ones_like(new)], dim=1)
    positions = torch.tensor([[5, 6, 7], [5, 6, 7]])
    with pytest.raises(CacheStateError, match="row 1 has position 5, but the cache holds 30"):
        logits(model, new, cache, attention_mask=mask, position_ids=positions)
    positions[1] += 25
    logits(model, new, cache, attention_mask=mask, position_ids=positions)


def test_a_prompt_without_a_cache_at_every_step_is_refused_with_one(llama: Models, tokens: Tokens) -> None:
    prompt = {"input_ids": tokens(20), "attention_mask": torch.ones(1, 20)}
    with pytest.raises(PagedCacheError, match="Under use_cache=False"):
        generate(llama(), prompt, PagedCache(llama().config), max_new_tokens=5, use_cache=False)


def test_a_stale_cache_of_an_encoder_decoder(tokens: Tokens) -> None:
    family = family_called("T5")
    model, prompt = family.build("eager"), inputs(family, (20,))
    cache = EncoderDecoderCache(PagedCache(model.config), PagedCache(model.config, cross_attention=True))
    generate(model, prompt, cache, max_new_tokens=5)
    with pytest.raises(CacheStateError, match="the prompt has 21 tokens, but the cache holds 25"):
        generate(model, prompt, cache, max_new_tokens=5)


class TestWhatGoesOnFromTheCache:
    """The ways to go on that stay open: each gives what a quantized run gives."""

    @MODELS
    @pytest.mark.parametrize("chunk", [None, 5])
    def test_the_whole_sequence(self, name, tokens, chunk):
        model, ids = family_called(name).build("eager"), tokens(60)
        cache = PagedCache(model.config, block_size=16)
        logits(model, ids[:, :NUM_CACHED], cache)
        if chunk and CACHE_ARGUMENT != "cache":
            pytest.skip("older transformers cut the mask as if nothing were cached")
        assert answer(model, ids, cache, prefill_chunk_size=chunk).equal(answer(model, ids, None))

    @MODELS
    @pytest.mark.parametrize("num_new", [1, 13])
    def test_new_tokens_under_the_mask_of_the_whole_sequence(self, name, tokens, num_new):
        model, ids = family_called(name).build("eager"), tokens(NUM_CACHED + num_new)
        cache = PagedCache(model.config, block_size=16)
        logits(model, ids[:, :NUM_CACHED], cache)
        new = answer(model, ids[:, NUM_CACHED:], cache, attention_mask=torch.ones_like(ids))
        assert new[:, num_new:].equal(answer(model, ids, None)[:, ids.shape[1] :])

    @MODELS
    def test_new_tokens_by_hand_without_mask_and_positions(self, name, tokens):
        model, ids = family_called(name).build("eager"), tokens(60)
        cache = PagedCache(model.config, block_size=16)
        pieces = [logits(model, piece, cache) for piece in ids.split([20, 1, 26, 13], dim=1)]
        expected = logits(model, ids, None, use_cache=False)
        torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-3, atol=1e-3)

    def test_positions_beyond_the_cached_tokens(self, llama, tokens):
        """Tokens may have been left out on purpose."""
        cache = stale_cache(llama(), tokens)
        assert logits(llama(), tokens(3), cache, position_ids=torch.arange(90, 93)[None]).isfinite().all()

    @MODELS
    def test_a_right_padded_batch(self, name, tokens):
        """transformers warns of it, and goes on with the positions that it counts."""
        model, ids = family_called(name).build("eager"), torch.cat([tokens(21, seed=1), tokens(21, seed=2)])
        mask = torch.ones_like(ids)
        mask[0, -6:] = 0
        cache = PagedCache(model.config, block_size=16)
        assert answer(model, ids, cache, attention_mask=mask).equal(answer(model, ids, None, attention_mask=mask))

    def test_a_model_that_begins_every_pass_at_position_0(self, tokens):
        """Bamba does where it is given none, with any cache."""
        model = family_called("Bamba").build("hf_paged")
        cache = PagedCache(model.config, block_size=16)
        logits(model, tokens(7), cache)
        assert logits(model, tokens(5), cache).isfinite().all()
        assert cache.get_seq_length() == 12


class TestPackedSequences:
    POSITIONS = torch.tensor([[*range(7), *range(6)]])

    def test_they_are_refused_with_a_cache(self, llama, tokens):
        cache = PagedCache(llama().config)
        with pytest.raises(InvalidArgumentError, match="begin anew at new column 7: position 0 after 7 tokens"):
            logits(llama(), tokens(13), cache, position_ids=self.POSITIONS)
        assert cache.get_seq_length() == 0

    def test_they_are_refused_behind_cached_tokens(self, llama, tokens):
        cache = stale_cache(llama(), tokens)
        with pytest.raises(InvalidArgumentError, match="begin anew at new column 2"):
            logits(llama(), tokens(4), cache, position_ids=torch.tensor([[47, 48, 0, 1]]))

    @pytest.mark.parametrize("attention", ["eager", "hf_paged"])
    def test_without_a_cache_they_do_not_see_each_other(self, llama, tokens, attention):
        ids = tokens(13)
        packed = logits(llama(attention), ids, None, position_ids=self.POSITIONS, use_cache=False)
        alone = logits(llama(attention), ids[:, 7:], None, use_cache=False)
        torch.testing.assert_close(packed[:, 7:], alone, rtol=1e-3, atol=1e-3)

    def test_the_positions_of_padding_do_not_matter(self, llama, prompts):
        model, prompt = llama(), prompts(5, 9)
        positions = (prompt["attention_mask"].cumsum(1) - 1).masked_fill(prompt["attention_mask"] == 0, 3)
        actual = logits(
            model, cache=PagedCache(model.config), ids=prompt.pop("input_ids"), position_ids=positions, **prompt
        )
        assert actual.isfinite().all()


def test_transformers_has_the_names_that_are_looked_for() -> None:
    """Positions and masks are read from the frame of one function, the length of a prompt from that of another."""
    builder = masking_utils._preprocess_mask_arguments.__code__
    assert {"attention_mask", "position_ids"} <= {*builder.co_varnames[: builder.co_argcount]}
    prefill = GenerationMixin._prefill.__code__
    assert {"cache", "next_sequence_length", "input_ids", "generation_config", "attention_mask"} <= {
        *prefill.co_varnames,
        *prefill.co_cellvars,
    }
