"""To ask a cache for the sizes of a mask changes nothing, whoever asks and how often."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from hf_paged_cache import InvalidArgumentError, OutOfBlocksError, PagedCache
from tests.support.compat import CACHE_ARGUMENT, generate
from tests.support.families import family_called, inputs
from tests.support.stores import INT4

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., dict[str, Tensor]]

SLIDING, FULL = "sliding_attention", "full_attention"


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, cache: DynamicCache | None, **options: Any) -> Tensor:
    return model(ids, **{CACHE_ARGUMENT: cache}, **options).logits


def causal_mask(model: PreTrainedModel, cache: PagedCache, mask: Tensor | None, num_new: int) -> Any:
    """Transformers' own mask for `num_new` tokens behind those of `cache`."""
    states = torch.zeros(1 if mask is None else len(mask), num_new, 1)
    return create_causal_mask(
        config=model.config, inputs_embeds=states, attention_mask=mask, position_ids=None, **{CACHE_ARGUMENT: cache}
    )


def snapshot(cache: PagedCache) -> tuple[Any, ...]:
    """All that can be seen of a cache."""
    allocators = [group.pool.allocator for group in cache.groups]
    return (
        cache.stats(),
        [(it.num_free, it.num_evictable, it.num_referenced) for it in allocators],
        [group.table.block_ids.tolist() for group in cache.groups],
        [group.table.exact_ids.tolist() for group in cache.groups],
        [layer.keys.clone() for layer in cache.layers if getattr(layer, "keys", None) is not None],
    )


def assert_equal(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert actual[:-1] == expected[:-1]
    assert all(map(torch.equal, actual[-1], expected[-1]))


@pytest.mark.parametrize("kv", ["raw", INT4], ids=["raw", "int4"])
def test_asking_for_sizes_changes_nothing(windowed: Models, prompts: Prompts, kv: Any) -> None:
    """Blocks that the next step would quantize or give back are what they were."""
    model, ids = windowed([SLIDING, FULL]), prompts(70)["input_ids"]
    cache = PagedCache(model.config, block_size=16, num_blocks=8, kv=kv)
    logits(model, ids[:, :65], cache)
    logits(model, ids[:, 65:69], cache)
    before = snapshot(cache)
    for layer_idx in (1, 0, 1):
        for num_new in (0, 1, 500):
            cache.get_mask_sizes(num_new, layer_idx)
    for num_new in (1, 20, 500):
        causal_mask(model, cache, None, num_new)
    assert_equal(snapshot(cache), before)
    expected = logits(model, ids, None, use_cache=False)[:, 69:]
    torch.testing.assert_close(logits(model, ids[:, 69:], cache), expected, rtol=0.1, atol=0.3 if kv is INT4 else 1e-4)


@pytest.mark.parametrize("kv", ["raw", INT4], ids=["raw", "int4"])
def test_room_for_recurrent_models_is_looked_for_without_a_change(kv: Any) -> None:
    family = family_called("Jamba")
    model, ids = family.build("hf_paged"), inputs(family, [70])["input_ids"]
    cache = PagedCache(model.config, block_size=16, num_blocks=4, kv=kv)
    logits(model, ids[:, :64], cache)
    before = snapshot(cache)
    for _ in range(2):
        with pytest.raises(OutOfBlocksError):
            logits(model, ids[:, 64:], cache)
        assert_equal(snapshot(cache), before)
    cache.reset()
    logits(model, ids[:, :16], cache)


@pytest.mark.parametrize("kv", ["raw", INT4], ids=["raw", "int4"])
@pytest.mark.parametrize("has_fork", [False, True])
def test_what_a_step_gives_back_is_known_before(windowed: Models, kv: Any, has_fork: bool) -> None:
    cache = PagedCache(windowed([SLIDING, FULL]).config, block_size=16, kv=kv)
    kept, total = [], 0
    for num_new in (40, 1, 15, 17, 1, 30, 1):
        states = torch.zeros(2, 2, num_new, 8)
        for layer_idx in range(2):
            cache.update(states, states, layer_idx)
        kept += [cache.fork()] * has_fork
        for group in cache.groups:
            allocators = [
                group.pool.allocator,
                *([] if group.pool.exact_pool is None else [group.pool.exact_pool.allocator]),
            ]
            before = [it.num_available for it in allocators]
            state, pairs = group.table.before_next_step()
            foreseen = group.table.blocks_let_go(state)
            with cache.lock, group.pool.ledger:
                group.pool.quantize(pairs)
                group.table.commit(state)
            given_back = [it.num_available - number for it, number in zip(allocators, before, strict=True)]
            assert [*foreseen][: len(allocators)] == given_back
            total += sum(given_back)
    assert total > 4 or kept  # a fork goes on holding what this one gives back


def assert_dense_masks_are_followed(model: PreTrainedModel, ids: Tensor, cache: PagedCache) -> None:
    """Two passes under masks of four dimensions, of which the cache learns nothing."""
    rows, length = ids.shape
    dense = torch.ones(rows, 1, length, length, dtype=torch.bool).tril()
    pieces = [logits(model, ids, cache, attention_mask=dense)]
    assert not cache.groups[0].table.padding.any()
    pieces += [logits(model, ids[:, :1], cache, attention_mask=dense.new_ones(rows, 1, 1, length + 1))]
    expected = logits(model, torch.cat([ids, ids[:, :1]], dim=1), None, use_cache=False)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-4)


def test_a_mask_that_somebody_else_builds_is_not_that_of_the_pass(llama: Models, prompts: Prompts) -> None:
    model, prompt = llama(), prompts(7, 3)
    cache = PagedCache(model.config, block_size=16)
    causal_mask(model, cache, prompt["attention_mask"], 7)
    assert_dense_masks_are_followed(model, prompt["input_ids"], cache)


@pytest.mark.parametrize("keeps_error", [False, True])
def test_the_mask_of_a_failed_pass_is_not_that_of_the_next_one(
    llama: Models, prompts: Prompts, keeps_error: bool
) -> None:
    model, prompt = llama(), prompts(7, 3)
    cache, errors = PagedCache(model.config, block_size=16), []
    handle = model.model.layers[0].register_forward_pre_hook(lambda *call: 1 / 0)
    try:
        logits(model, prompt["input_ids"], cache, attention_mask=prompt["attention_mask"])
    except ZeroDivisionError as error:
        errors += [error] * keeps_error
    handle.remove()
    assert_dense_masks_are_followed(model, prompt["input_ids"], cache)


def test_a_failed_pass_may_be_tried_again_under_its_mask(llama: Models, prompts: Prompts) -> None:
    model, prompt = llama(), prompts(7, 3)
    cache = PagedCache(model.config, block_size=16)
    handle = model.model.layers[0].register_forward_pre_hook(lambda *call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, prompt, cache, max_new_tokens=5)
    handle.remove()
    answer = generate(model, prompt, cache, max_new_tokens=5, do_sample=False)
    assert cache.groups[0].table.padding.tolist() == [0, 4]
    assert answer.equal(generate(model, prompt, None, max_new_tokens=5, do_sample=False))


def test_a_cache_is_copied_and_pickled_between_the_question_and_the_pass(llama: Models, prompts: Prompts) -> None:
    model, prompt = llama(), prompts(7, 3)
    cache = PagedCache(model.config, block_size=16)
    copies: list[PagedCache] = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda *call: copies.extend((copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))))
    )
    expected = logits(model, cache=cache, ids=prompt["input_ids"], attention_mask=prompt["attention_mask"])
    handle.remove()
    for copied in copies:
        actual = logits(model, cache=copied, ids=prompt["input_ids"], attention_mask=prompt["attention_mask"])
        assert actual.equal(expected)


class TestImages:
    """Layers that are given an image have its tokens and not those of the text."""

    @staticmethod
    def family():
        return family_called("Mllama")

    def turns(self, num_text: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """A text turn of 6 tokens, and one of `num_text` with an image, both as they are given to the model."""
        turn = inputs(self.family(), [num_text - 1], seed=1)
        mask = torch.ones(1, 6 + num_text, dtype=torch.long)
        return {"input_ids": torch.arange(20, 26)[None]}, {**turn, "attention_mask": mask}

    def run(self, model: PreTrainedModel, cache: DynamicCache, num_text: int) -> tuple[Tensor, Tensor]:
        text, image = self.turns(num_text)
        with torch.no_grad():
            model(**text, **{CACHE_ARGUMENT: cache})
            turn = model(**image, **{CACHE_ARGUMENT: cache}).logits
            return turn, model(image["input_ids"][:, -1:], **{CACHE_ARGUMENT: cache}).logits

    @pytest.mark.parametrize("num_more", [-1, 0, 1])
    def test_an_image_turn_of_as_many_text_tokens_as_the_image_has(self, num_more):
        if CACHE_ARGUMENT != "cache":
            pytest.skip("older transformers give an image to the first turn only")
        model = self.family().build("hf_paged")
        measured = DynamicCache(config=model.config)
        self.run(model, measured, 4)
        num_text = measured.layers[1].keys.shape[2] + num_more
        actual = self.run(model, PagedCache(model.config, block_size=16), num_text)
        expected = self.run(model, DynamicCache(config=model.config), num_text)
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)

    def test_a_first_turn_of_as_many_text_tokens_as_the_image_has(self):
        model = self.family().build("hf_paged")
        prompt = inputs(self.family(), [5])
        cache = PagedCache(model.config, block_size=16)
        logits(model, cache=cache, ids=prompt.pop("input_ids"), **prompt)
        num_image = cache.layers[1].get_seq_length()
        prompt = inputs(self.family(), [num_image - 1])
        answers = [
            generate(model, prompt, it, max_new_tokens=5, do_sample=False)
            for it in (PagedCache(model.config, block_size=16), None)
        ]
        assert answers[0].equal(answers[1])


def test_no_new_tokens_are_refused_before_anything_runs(llama: Models, prompts: Prompts) -> None:
    cache = PagedCache(llama().config)
    logits(llama(), prompts(9)["input_ids"], cache)
    with pytest.raises(InvalidArgumentError, match="no new tokens: the cache holds 9 columns"):
        logits(llama(), prompts(9)["input_ids"][:, 9:], cache)
