"""Prompts that begin like earlier ones: the same answers, and less work."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForCausalLM,
    FalconMambaConfig,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.falcon_mamba import FalconMambaForCausalLM

from hf_paged_cache import (
    CODECS,
    BlockStore,
    CacheStateError,
    InvalidArgumentError,
    OutOfBlocksError,
    PagedCache,
    PagedCacheError,
    UnsupportedError,
)
from hf_paged_cache.prefill import CACHE_ARGUMENT
from hf_paged_cache.prefix.tree import tokens_of
from tests.conftest import FIRST_WORD, VOCABULARY
from tests.support.combinations import combined, later
from tests.support.stores import INT4, SIZE, check_unheld, generate, make_store, nodes_of


def words(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(FIRST_WORD, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def cold(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return generate(model, PagedCache(model.config, block_size=SIZE), ids, mask, **options)


def turn(store: BlockStore, ids: Tensor, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, int]:
    """Looks up, generates and commits: the output, and the tokens that were reused."""
    cache = store.cache_for(ids, mask)
    reused = cache.stats().reused_tokens
    output = generate(store.model, cache, ids, mask, **options)
    store.commit(cache, output)
    return output, reused


@pytest.fixture(params=["full", "windows"])
def model(request: pytest.FixtureRequest, llama: Callable, windowed: Callable) -> PreTrainedModel:
    """Full attention in all layers, and every other one with a window of 20."""
    if request.param == "full":
        return llama()
    return windowed(["sliding_attention", "full_attention", "sliding_attention"], window=20)


class TestOneRow:
    # In the quick run those around a border of blocks, of the prompt or of the answer of 6 tokens.
    @combined(length=[33, 34, 42, 43, 47, 48, *later(*range(35, 42), 44, 45, 46)])
    def test_warm_equals_cold_for_every_residue_of_the_prompt(self, model, length):
        store, ids = make_store(model), words(1, 64)
        first, reused = turn(store, ids[:, :length])
        assert reused == 0
        again, reused = turn(store, ids[:, :length])
        assert torch.equal(again, first)
        assert reused == length - 1
        longer, reused = turn(store, ids)
        assert torch.equal(longer, cold(model, ids))
        # The first generated token may be the next one of the prompt by chance.
        assert length <= reused < length + 3
        check_unheld(store)

    def test_the_next_turn_of_a_chat_computes_only_what_is_new(self, model):
        store, history, known = make_store(model), words(1, 40), 0
        for number in range(4):
            expected = cold(model, history)
            output, reused = turn(store, history)
            assert torch.equal(output, expected)
            assert reused == known
            known = output.shape[1] - 1  # the last token was never fed
            history = torch.cat([output, words(1, 7, seed=number + 1)], dim=1)
        check_unheld(store)

    def test_a_prompt_that_parts_in_the_middle_of_a_block_reuses_to_the_token(self, llama):
        store, ids = make_store(llama()), words(1, 60)
        turn(store, ids)
        other = torch.cat([ids[:, :37], (ids[:, 37:50] - FIRST_WORD + 1) % (VOCABULARY - FIRST_WORD) + FIRST_WORD], 1)
        output, reused = turn(store, other)
        assert reused == 37
        assert torch.equal(output, cold(llama(), other))
        assert store.stats().copies == 1
        again, reused = turn(store, ids)
        assert torch.equal(again, cold(llama(), ids))
        assert reused == 59

    def test_at_least_one_token_is_computed(self, model):
        store, ids = make_store(model), words(1, 3 * SIZE)
        turn(store, ids)
        for length in (2 * SIZE, 2 * SIZE + 1, SIZE - 1, 2, 1):
            cache = store.cache_for(ids[:, :length])
            assert cache.get_seq_length() <= length - 1
            assert torch.equal(generate(model, cache, ids[:, :length]), cold(model, ids[:, :length]))

    @pytest.mark.parametrize("kv", ["int8", "fp8", "int4", "kivi2"])
    def test_quantized_blocks_are_reused_bit_for_bit(self, model, kv):
        store, ids = make_store(model, kv=kv), words(1, 100)
        cache = store.cache_for(ids)
        output = generate(model, cache, ids, max_new_tokens=30)
        before = [layer.keys.materialize()[..., :64, :] for layer in cache.layers if layer.is_sliding is False]
        store.commit(cache, output)
        warm = store.cache_for(ids)
        assert warm.stats().reused_tokens == 99
        after = [layer.keys.materialize()[..., :64, :] for layer in warm.layers if layer.is_sliding is False]
        # Tokens that the longer sequence read exactly are exact here too, or their codes are.
        for first, second in zip(before, after, strict=True):
            assert torch.equal(first, second)
        del cache
        first = generate(model, warm, ids)
        assert torch.equal(generate(model, store.cache_for(ids), ids), first)
        check_conserved_after(store, warm)

    def test_other_attention_implementations_use_it_too(self, llama):
        model = llama("sdpa")
        store, ids = make_store(model), words(1, 50)
        turn(store, ids)
        output, reused = turn(store, torch.cat([ids, words(1, 5, seed=1)], 1))
        assert reused >= 50
        assert torch.equal(output, cold(model, torch.cat([ids, words(1, 5, seed=1)], 1)))


def check_conserved_after(store: BlockStore, *caches: PagedCache) -> None:
    for cache in caches:
        cache.reset()
    check_unheld(store)


class TestBatches:
    def test_rows_find_their_own_beginnings_and_go_on_together(self, model):
        store = make_store(model)
        first, second = words(1, 50, seed=1), words(1, 50, seed=2)
        for ids in (first, second):
            turn(store, ids)
        ids = torch.cat([first[:, :41], second[:, :41]])
        output, reused = turn(store, ids)
        assert reused == 2 * 40
        assert torch.equal(output, cold(model, ids))
        check_unheld(store)

    @pytest.mark.parametrize("share", [True, False])
    def test_left_padding_does_not_matter(self, model, prompts, share):
        store, batch = make_store(model), prompts(50, 31, 44)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        for row in range(3):
            turn(store, ids[row : row + 1, -int(mask[row].sum()) :])
        cache = store.cache_for(ids, mask, share=share)
        assert cache.stats().reused_tokens == 49 + 30 + 43
        assert torch.equal(generate(model, cache, ids, mask), cold(model, ids, mask))

    def test_a_padded_batch_is_found_by_single_rows(self, model, prompts):
        store, batch = make_store(model), prompts(50, 31)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        output, _ = turn(store, ids, mask)
        for row, length in enumerate((50, 31)):
            alone = ids[row : row + 1, 50 - length :]
            again, reused = turn(store, alone)
            assert reused == length - 1
            assert torch.equal(again[0], output[row, 50 - length :])

    def test_what_rows_share_is_computed_once(self, llama):
        model, store = llama(), make_store(llama())
        ids = torch.cat([words(1, 48).repeat(4, 1), words(4, 8, seed=1)], dim=1)
        cache = store.cache_for(ids)
        assert (cache.get_seq_length(), cache.stats().reused_tokens) == (48, 3 * 48)
        assert cache.stats().blocks_used == 3
        assert torch.equal(generate(model, cache, ids), cold(model, ids))
        assert store.cache_for(ids, share=False).get_seq_length() == 48

    def test_without_share_nothing_is_computed_ahead(self, llama):
        store = make_store(llama())
        ids = torch.cat([words(1, 48).repeat(4, 1), words(4, 8, seed=1)], dim=1)
        assert store.cache_for(ids, share=False).get_seq_length() == 0

    def test_a_row_that_lags_is_brought_up(self, model):
        store, ids = make_store(model), words(5, 40)
        for row in range(4):
            turn(store, ids[row : row + 1])
        cache = store.cache_for(ids)
        assert cache.get_seq_length() == 39
        assert cache.stats().reused_tokens == 4 * 39
        assert torch.equal(generate(model, cache, ids), cold(model, ids))

    def test_copies_are_ready_for_beams_and_samples(self, model, prompts):
        store, batch = make_store(model), prompts(40, 25)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        cache = store.cache_for(ids, mask, copies=3)
        assert (cache.batch_size, cache.get_seq_length()) == (6, 39)
        output = generate(model, cache, ids, mask, num_beams=3)
        assert torch.equal(output, cold(model, ids, mask, num_beams=3))
        torch.manual_seed(0)
        sampled = generate(
            model, store.cache_for(ids, mask, copies=2), ids, mask, do_sample=True, num_return_sequences=2
        )
        torch.manual_seed(0)
        assert torch.equal(sampled, cold(model, ids, mask, do_sample=True, num_return_sequences=2))

    def test_a_mask_is_inferred_as_generate_infers_it(self, llama):
        model, store, ids = llama(), make_store(llama()), words(2, 40)
        ids[0, :9] = 0
        for expected in (0, 39 + 30):
            cache = store.cache_for(ids, share=False)
            assert cache.stats().reused_tokens == expected
            output = model.generate(ids, max_new_tokens=6, do_sample=False, **{CACHE_ARGUMENT: cache})
            assert torch.equal(output, cold(model, ids, (ids != 0).long()))
            store.commit(cache, output)
        ids[0, 20] = 0
        assert "hides tokens" in store.cache_for(ids).stats().why
        assert store.cache_for(ids, torch.ones_like(ids)).stats().why == ""

    def test_holes_in_the_mask_are_computed_and_not_kept(self, llama):
        store, ids = make_store(llama()), words(2, 40)
        mask = torch.ones_like(ids)
        mask[0, 7] = 0
        cache = store.cache_for(ids, mask)
        assert "hides tokens" in cache.stats().why
        output = generate(llama(), cache, ids, mask)
        assert torch.equal(output, cold(llama(), ids, mask))
        assert store.commit(cache, output) == 0
        assert store.stats().nodes == 0


class TestCommit:
    def test_after_beam_search_the_prompts_are_known(self, model):
        store, ids = make_store(model), words(1, 40)
        cache = store.cache_for(ids, copies=3)
        output = generate(model, cache, ids, num_beams=3, num_return_sequences=3)
        assert store.commit(cache, output) == 3 * 40
        assert store.cache_for(output[:1]).get_seq_length() in (40, 41)  # by chance, a token more
        check_conserved_after(store, cache)

    def test_what_follows_the_end_of_an_answer_is_not_kept(self, llama):
        model, ids = llama(), words(2, 20)
        free = cold(model, ids, max_new_tokens=12)
        end = int(free[0, 24])
        model.generation_config.eos_token_id = [end]
        try:
            store = make_store(model)
            cache = store.cache_for(ids)
            output = generate(model, cache, ids, max_new_tokens=12)
            lengths = [int((row[20:] == end).nonzero()[0]) + 21 if end in row[20:] else 31 for row in output]
            assert lengths[0] < lengths[1]
            assert store.commit(cache, output) == sum(lengths)
        finally:
            model.generation_config.eos_token_id = None

    @pytest.mark.parametrize("helper", ["prompt_lookup_num_tokens", "assistant_model"])
    def test_only_accepted_tokens_are_kept(self, model, llama, helper):
        store, ids = make_store(model), words(1, 10).repeat(1, 4)
        helper = {helper: 3 if helper == "prompt_lookup_num_tokens" else llama("sdpa", num_layers=1)}
        output, _ = turn(store, ids, **helper, max_new_tokens=12)
        assert torch.equal(output, cold(model, ids, max_new_tokens=12))
        following = torch.cat([output, words(1, 4, seed=1)], dim=1)
        again, reused = turn(store, following)
        assert reused >= output.shape[1] - 1
        assert torch.equal(again, cold(model, following))

    def test_assisted_decoding_begins_with_an_empty_cache(self, llama):
        model, store, ids = llama(), make_store(llama()), words(1, 10).repeat(1, 4)
        turn(store, ids)
        with pytest.raises(UnsupportedError, match="reuse=False"):
            generate(model, store.cache_for(ids), ids, prompt_lookup_num_tokens=3)
        cache = store.cache_for(ids, reuse=False)
        assert cache.stats().why == "reuse=False was asked for"
        output = generate(model, cache, ids, prompt_lookup_num_tokens=3)
        assert torch.equal(output, cold(model, ids))
        assert store.commit(cache, output) == output.shape[1] - 1
        chat = store.session()
        again = chat.generate(
            output, attention_mask=torch.ones_like(output), prompt_lookup_num_tokens=3, max_new_tokens=6
        )
        assert torch.equal(again, cold(model, output))

    def test_turns_that_end_inside_of_a_sequence_are_kept(self, llama):
        model, ids = llama(), words(1, 20)
        model.generation_config.eos_token_id = [9]
        try:
            store = make_store(model)
            cache = store.cache_for(ids)
            output = generate(model, cache, ids, suppress_tokens=[*range(8), 9])
            store.commit(cache, output)
            longer = torch.cat([output, torch.tensor([[9]]), words(1, 12, seed=1)], dim=1)
            output = generate(model, cache, longer, suppress_tokens=[*range(8), 9])
            assert store.commit(cache, output) == output.shape[1] - 1
        finally:
            model.generation_config.eos_token_id = None

    def test_what_was_cropped_is_not_known(self, llama):
        model, store, ids = llama(), make_store(llama()), words(1, 40)
        cache = store.cache_for(ids)
        old = generate(model, cache, ids)
        cache.crop(-30)
        other = torch.cat([ids[:, :15], words(1, 25, seed=1)], dim=1)
        generate(model, cache, other)
        assert store.commit(cache, old) == 15
        output, reused = turn(store, ids)
        assert reused == 15
        assert torch.equal(output, cold(model, ids))

    def test_an_output_that_is_longer_than_what_was_generated_is_refused(self, llama):
        model, store, ids = llama(), make_store(llama()), words(1, 40)
        cache = store.cache_for(ids)
        output = generate(model, cache, ids)
        longer = torch.cat([output, words(1, 1, seed=1)], dim=1)
        with pytest.raises(InvalidArgumentError, match="47 tokens, but the cache holds 45"):
            store.commit(cache, longer)
        cache.crop(-3)
        with pytest.raises(InvalidArgumentError, match="After `crop`, pass what is left"):
            store.commit(cache, output)
        assert store.stats().nodes == 0
        assert store.commit(cache, output[:, :42]) == 42

    def test_what_was_committed_stays_what_the_cache_begins_with(self, llama):
        model, store, ids = llama(), make_store(llama()), words(1, 40)
        cache = store.cache_for(ids)
        output = generate(model, cache, ids)
        store.commit(cache, output)
        written_differently = torch.cat([output, words(1, 9, seed=1)], dim=1)
        written_differently[0, 42] = FIRST_WORD + (written_differently[0, 42] == FIRST_WORD)
        output = generate(model, cache, written_differently)
        with pytest.raises(InvalidArgumentError, match="does not begin with"):
            store.commit(cache, output)

    def test_more_tokens_than_the_output_has_are_not_known(self, llama):
        model, store, ids = llama(), make_store(llama()), words(1, 40)
        cache = store.cache_for(ids)
        output = generate(model, cache, ids)
        with pytest.raises(CacheStateError, match="holds 45 tokens of a row, but the output has 43"):
            store.commit(cache, output[:, :-3])

    def test_another_mask_than_that_of_the_lookup_is_noticed(self, llama):
        store, ids = make_store(llama()), words(1, 40)
        cache = store.cache_for(ids, torch.ones_like(ids))
        mask = torch.ones_like(ids)
        mask[0, :9] = 0
        output = generate(llama(), cache, ids, mask)
        with pytest.raises(CacheStateError, match="attention_mask that `generate` gets"):
            store.commit(cache, output)

    def test_copies_that_nobody_asked_for(self, llama):
        model, store, ids = llama(), make_store(llama()), words(2, 40)
        cache = store.cache_for(ids, share=False)
        output = generate(model, cache, ids, num_beams=3)
        assert torch.equal(output, cold(model, ids, num_beams=3))
        assert store.commit(cache, output) == 6 * 40
        cache = store.cache_for(words(2, 40, seed=1), share=False)
        output = generate(model, cache, words(2, 40, seed=1), do_sample=True, num_return_sequences=2)
        assert store.commit(cache, output) == 4 * 45
        with pytest.raises(InvalidArgumentError, match="expected what `generate` returned"):
            store.commit(cache, output[0])
        with pytest.raises(InvalidArgumentError, match="the output has 3 rows, but the cache has 4"):
            store.commit(cache, output[:3])

    @pytest.mark.parametrize("kv", [*CODECS])
    def test_tokens_that_fill_no_block(self, llama, kv):
        store = make_store(llama(), kv=kv)
        for length in (1, 2, SIZE - 6, SIZE - 5, SIZE + 1):
            output, _ = turn(store, words(1, length, seed=length))
            assert store.cache_for(output).stats().reused_tokens == length + 5
        batch = torch.cat([words(1, 40), words(1, 40)]), (torch.arange(40)[None] >= torch.tensor([[0], [34]])).long()
        turn(store, *batch)
        assert store.cache_for(words(1, 40)).stats().reused_tokens == 39
        check_unheld(store)

    def test_after_beam_search_the_prompts_are_checked_too(self, llama):
        store, ids = make_store(llama()), words(2, 40)
        cache = store.cache_for(ids, copies=2)
        output = generate(llama(), cache, ids, num_beams=2)
        with pytest.raises(InvalidArgumentError, match="row 0 of the output does not begin"):
            store.commit(cache, output.flip(0))
        assert store.commit(cache, output) == 4 * 40

    def test_a_cache_can_go_on_after_it(self, model):
        store, ids = make_store(model), words(1, 40)
        cache = store.cache_for(ids)
        output = generate(model, cache, ids)
        store.commit(cache, output)
        longer = torch.cat([output, words(1, 9, seed=1)], dim=1)
        output = generate(model, cache, longer)
        assert torch.equal(output, cold(model, longer))
        assert store.commit(cache, output) == output.shape[1] - 1
        again, reused = turn(store, longer)
        assert torch.equal(again, output)
        assert reused == longer.shape[1] - 1
        check_conserved_after(store, cache)

    def test_equal_sequences_end_up_in_the_same_blocks(self, model):
        store, ids = make_store(model), words(1, 50)
        first, second = store.cache_for(ids), store.cache_for(ids)
        outputs = [generate(model, cache, ids) for cache in (first, second)]
        used = first.stats().blocks_used
        for cache, output in zip((first, second), outputs, strict=True):
            store.commit(cache, output)
        assert first.stats().blocks_used < used
        assert torch.equal(
            *[generate(model, cache, torch.cat([outputs[0], ids[:, :3]], 1)) for cache in (first, second)]
        )
        check_conserved_after(store, first, second)

    def test_mistakes_are_named(self, llama):
        model, store, ids = llama(), make_store(llama()), words(1, 20)
        cache = store.cache_for(ids)
        output = generate(model, cache, ids)
        for other in (PagedCache(model.config), make_store(model).cache_for(ids), object()):
            with pytest.raises(InvalidArgumentError, match="of this store"):
                store.commit(other, output)
        with pytest.raises(InvalidArgumentError, match="row 0 of the output does not begin"):
            store.commit(cache, output[:, 3:])
        assert store.commit(cache, output) == 25
        cache.reset()
        with pytest.raises(InvalidArgumentError, match="of this store"):
            store.commit(cache, output)


class TestIdentity:
    def test_nothing_of_changed_weights_is_served(self, llama):
        model = copy.deepcopy(llama())
        store, ids = make_store(model), words(1, 40)
        turn(store, ids)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        output, reused = turn(store, ids)
        assert reused == 0
        assert torch.equal(output, cold(model, ids))
        assert turn(store, ids)[1] == 39

    def test_a_change_while_generating_is_not_committed(self, llama):
        model = copy.deepcopy(llama())
        store, ids = make_store(model), words(1, 40)
        cache = store.cache_for(ids)
        output = generate(model, cache, ids)
        model.train()
        with pytest.raises(CacheStateError, match="training: True here, False then"):
            store.commit(cache, output)
        model.eval()
        assert store.commit(cache, output) == 45

    def test_a_model_of_another_dtype_begins_anew(self, llama):
        model = copy.deepcopy(llama())
        store, ids = make_store(model), words(1, 40)
        turn(store, ids)
        model.to(torch.bfloat16)
        assert torch.equal(turn(store, ids)[0], cold(model, ids))
        assert turn(store, ids)[1] == 39
        check_unheld(store)

    def test_invalidate_forgets(self, llama):
        store, ids = make_store(llama()), words(1, 40)
        turn(store, ids)
        store.invalidate()
        assert store.stats().blocks_cached == 0
        assert turn(store, ids)[1] == 0
        assert turn(store, ids)[1] == 39

    def test_salts_and_contents_are_apart(self, llama):
        store, ids = make_store(llama()), words(1, 40)
        keys = [{}, {"salt": "a"}, {"salt": "b"}, {"extra_key": "a"}, {"salt": "a", "extra_key": "a"}]
        for key in keys:
            cache = store.cache_for(ids, **key)
            assert cache.get_seq_length() == 0
            store.commit(cache, generate(llama(), cache, ids))
        for key in keys:
            assert store.cache_for(ids, **key).stats().reused_tokens == 39
        with pytest.raises(InvalidArgumentError, match="salt"):
            store.cache_for(ids, salt=7)

    def test_inputs_beside_tokens_need_a_key(self, llama):
        store, ids = make_store(llama()), words(1, 40)
        turn(store, ids)
        for images in (torch.zeros(1, 3, 4, 4), [torch.zeros(3, 4, 4)]):
            assert store.cache_for(ids, pixel_values=images).get_seq_length() == 0
        assert store.cache_for(ids, adapter_names=["a"]).get_seq_length() == 0
        cache = store.cache_for(ids, pixel_values=torch.zeros(1, 3, 4, 4), token_type_ids=torch.zeros_like(ids))
        assert cache.get_seq_length() == 0
        assert cache.stats().why == "the input has pixel_values beside tokens, and no tokens that stand for them"
        assert store.commit(cache, ids) == 0
        assert store.cache_for(ids, token_type_ids=torch.zeros_like(ids)).get_seq_length() == 39

    def test_one_key_names_what_all_tokens_depend_on(self, llama):
        """Positions of one's own: another model, as far as keys are concerned, for every token."""
        model, store, ids = llama(), make_store(llama()), words(1, 40)
        turn(store, ids)
        positions = {"position_ids": 2 * torch.arange(40)[None]}
        expected = cold(model, ids, **positions)
        assert not torch.equal(expected, cold(model, ids))
        for key, reused in ((None, 0), ("two apart", 0), ("two apart", 39), ("other", 0)):
            cache = store.cache_for(ids, **positions, extra_key=key)
            assert cache.stats().reused_tokens == reused
            output = generate(model, cache, ids, **positions)
            assert torch.equal(output, expected)
            store.commit(cache, output)
        assert "no extra_key= that names all of it" in store.cache_for(ids, **positions).stats().why
        assert turn(store, ids)[1] == 39
        assert {run.extra_keys for run in store.nodes() if run.parent is None} == {(), ("two apart",), ("other",)}

    def test_negative_prompts_have_a_cache_of_their_own(self, model):
        store, ids, negative = make_store(model), words(1, 40), words(1, 25, seed=5)
        options = {"guidance_scale": 2.0, "negative_prompt_ids": negative, "max_new_tokens": 6, "do_sample": False}
        options["negative_prompt_attention_mask"] = mask = torch.ones_like(negative)
        expected = cold(model, ids, **options)
        assert not torch.equal(expected, cold(model, ids))
        for reused in (0, 39, 39):
            chat = store.session()
            output = chat.generate(ids, attention_mask=torch.ones_like(ids), **options)
            assert torch.equal(output, expected)
            assert chat.cache.stats().reused_tokens == reused
        assert mask.shape == negative.shape

    def test_adapters_that_apply_from_certain_tokens_on_are_not_reused(self, llama):
        model = copy.deepcopy(llama())
        store, ids = make_store(model), words(1, 40)
        turn(store, ids)
        model.peft_config = {"a": SimpleNamespace(alora_invocation_tokens=[9, 10]), "b": SimpleNamespace()}
        model.active_adapters = lambda: ["b"]
        assert turn(store, ids)[1] == 39
        model.active_adapters = lambda: ["a"]
        cache = store.cache_for(ids)
        assert cache.stats().why == "adapter 'a' applies from its invocation tokens on, so keys depend on what follows"
        assert (cache.get_seq_length(), store.commit(cache, ids)) == (0, 0)
        with pytest.raises(UnsupportedError, match="invocation tokens"):
            store.pin(ids)


def _begins(ids: Tensor, run: bytes) -> bool:
    """Whether a prompt begins with these tokens, as the index has them."""
    known = torch.from_numpy(tokens_of(run))[: ids.shape[1]]
    return torch.equal(ids[0, : len(known)], known)


class TestMemory:
    @pytest.mark.parametrize("kv", ["raw", "int4"])
    def test_answers_stay_right_when_everything_is_evicted_all_the_time(self, model, kv):
        block = PagedCache(model.config, block_size=SIZE, kv=kv)
        generate(model, block, words(1, 8))
        num_bytes = block.stats().bytes_allocated
        store = make_store(model, memory=12 * num_bytes, kv=kv)
        base = words(3, 100)
        for number in range(12):
            ids = torch.cat([base[number % 3 : number % 3 + 1, : 30 + 3 * number], words(1, 5, seed=number)], dim=1)
            output, _ = turn(store, ids)
            if kv == "raw":
                assert torch.equal(output, cold(model, ids))
        stats = store.stats()
        assert stats.reclaimed_blocks > 0
        assert stats.hit_tokens > 0
        assert stats.bytes_allocated <= 12 * num_bytes
        check_unheld(store)

    def test_what_was_used_longest_ago_goes_first_and_its_end_before_its_beginning(self, llama):
        store = make_store(llama())
        first, second = words(1, 64, seed=1), words(1, 64, seed=2)
        turn(store, first)
        turn(store, second)
        turn(store, first[:, :20])
        store.evict(store.stats().bytes_cached // 3)
        assert store.cache_for(first).get_seq_length() >= 20
        assert store.cache_for(second).get_seq_length() == 63
        freed = store.evict(10**9)
        assert freed > 0
        assert store.stats().blocks_cached == 0
        assert store.evict(10**9) == 0
        check_unheld(store)

    @pytest.mark.parametrize("kv", ["raw", INT4])
    def test_eviction_is_by_age_whatever_kind_of_layers_a_block_is_of(self, windowed, kv):
        """Two prompts let go of in turn: nothing of the younger one goes before the older one is gone."""
        model = windowed(["sliding_attention", "full_attention", "sliding_attention"], window=20)
        store, old, young = make_store(model, kv=kv), words(1, 64, seed=1), words(1, 64, seed=2)
        turn(store, old)
        turn(store, young)
        kinds = store._cached.allocators
        of_young = [
            {node.blocks[kind] for key, node in nodes_of(store).items() if _begins(young, key[-1])} - {0}
            for kind in range(len(kinds))
        ]
        assert all(of_young)
        gone: list[bool] = []
        while any(allocator.num_evictable for allocator in kinds):
            before = [allocator._cached.copy() for allocator in kinds]
            store.evict(1)
            for kind, allocator in enumerate(kinds):
                gone += [block in of_young[kind] for block in before[kind] - allocator._cached]
        assert gone == sorted(gone)
        assert 0 < sum(gone) < len(gone)

    def test_memory_for_less_than_a_block_is_refused(self, llama):
        with pytest.raises(InvalidArgumentError, match=r"memory=1,024 bytes .* 16 tokens in 3 layers.* 6,144 bytes"):
            make_store(llama(), memory=1024)
        with pytest.raises(InvalidArgumentError, match="fewer bits"):
            make_store(llama(), memory=4096, kv="int4")
        make_store(llama(), memory=6144)

    def test_pins_stay(self, model):
        store, system = make_store(model), words(1, 40)
        pin = store.pin(system[0])
        assert pin.num_tokens == 40
        store.evict(10**9)
        ids = torch.cat([system, words(1, 9, seed=1)], dim=1)
        assert store.cache_for(ids).stats().reused_tokens == 40
        pin.release()
        store.evict(10**9)
        assert store.cache_for(ids).stats().reused_tokens == 0
        assert torch.equal(turn(store, ids)[0], cold(model, ids))
        with pytest.raises(InvalidArgumentError, match="one prompt"):
            store.pin(words(2, 10))
        check_unheld(store)

    def test_clear_forgets_all_and_leaves_caches_alone(self, model):
        store, ids = make_store(model), words(1, 40)
        store.pin(ids)
        cache = store.cache_for(ids)
        store.clear()
        assert store.stats().blocks_cached == 0
        assert torch.equal(generate(model, cache, ids), cold(model, ids))
        assert store.cache_for(ids).get_seq_length() == 0
        check_conserved_after(store, cache)

    def test_a_prompt_that_does_not_fit_says_so_and_leaves_the_store_usable(self, llama):
        store, ids = make_store(llama(), memory="64KiB"), words(1, 40)
        turn(store, ids)
        with pytest.raises(OutOfBlocksError):
            turn(store, words(1, 2000))
        assert turn(store, ids)[1] == 39
        check_unheld(store)

    def test_a_store_that_is_given_up_frees_its_memory(self, llama, memory):
        store = make_store(llama())
        turn(store, words(1, 40))
        assert memory.alive > 0
        del store
        gc.collect()
        assert memory.alive == 0


def test_runs_show_what_is_known_and_held(llama):
    store, ids = make_store(llama()), words(1, 2 * SIZE + 5)
    cache = store.cache_for(ids, salt="me")
    store.commit(cache, generate(llama(), cache, ids, max_new_tokens=1))
    other = torch.cat([ids[:, :SIZE], words(1, 9, seed=1)], dim=1)
    cache = store.cache_for(other, salt="me")
    store.commit(cache, generate(llama(), cache, other, max_new_tokens=1))
    runs = store.nodes()
    assert torch.equal(torch.from_numpy(runs[0].tokens), ids[0, :SIZE])
    assert sorted((len(run.tokens), run.parent, run.is_held) for run in runs[1:]) == sorted(
        [(SIZE, 0, False), (5, 1 + (len(runs[1].tokens) != SIZE), False), (9, 0, True)]
    )
    assert {(run.salt, run.extra_keys) for run in runs} == {("me", ())}
    assert runs[0].is_held


class TestSessions:
    def test_a_conversation_with_beams_samples_and_plain_turns(self, model):
        store = make_store(model)
        with store.session() as chat:
            history, known = words(1, 40), 0
            for options in ({}, {"num_beams": 3}, {}, {"do_sample": True, "num_return_sequences": 2, "top_k": 1}, {}):
                mask = torch.ones_like(history)
                output = chat.generate(
                    history, attention_mask=mask, **{"max_new_tokens": 6, "do_sample": False, **options}
                )
                expected = cold(model, history, **options)
                assert torch.equal(output, expected)
                assert chat.cache.stats().reused_tokens >= known
                known = history.shape[1] - 1
                history = torch.cat([output[:1], words(1, 5, seed=known)], dim=1)
        check_unheld(store)

    def test_the_lists_of_a_caller_stay_as_they_are(self, llama):
        store, ids, criteria = make_store(llama()), words(1, 40), StoppingCriteriaList([MaxLengthCriteria(44)])
        options = {"num_beams": 2, "stopping_criteria": criteria}
        output = store.session().generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert torch.equal(output, cold(llama(), ids, **options, max_new_tokens=4))
        assert len(criteria) == 1

    def test_generating_without_a_cache_is_refused(self, llama):
        with pytest.raises(InvalidArgumentError, match="use_cache=False"):
            make_store(llama()).session().generate(words(1, 4), use_cache=False)

    def test_its_last_turn_is_not_evicted(self, llama):
        store, ids = make_store(llama()), words(1, 40)
        chat = store.session(salt="me")
        output = chat.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
        store.evict(10**9)
        assert store.cache_for(output, salt="me").get_seq_length() == output.shape[1] - 1
        chat.close()
        store.evict(10**9)
        assert store.cache_for(output, salt="me").get_seq_length() == 0


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_holds_blocks_of_a_store_cannot_be_copied(llama, copying):
    store = make_store(llama())
    for thing in (store, store.session(), store.pin(words(1, 20))):
        with pytest.raises(UnsupportedError, match=rf"a {type(thing).__name__} cannot be copied .*store\.save\(path\)"):
            copying(thing)


def test_the_former_name_of_a_key_is_refused(llama):
    """It would be taken for an input of the model that changes nothing."""
    with pytest.raises(InvalidArgumentError, match="extra_key="):
        make_store(llama()).cache_for(torch.ones(1, 9, dtype=torch.long), content_key="an image")


def test_an_argument_that_nobody_takes_is_refused(llama):
    """A mistyped salt would let users share what is known."""
    with pytest.raises(InvalidArgumentError, match="slat"):
        make_store(llama()).cache_for(torch.ones(1, 9, dtype=torch.long), slat="user 17")


def test_a_cache_of_a_store_is_not_pickled(llama):
    store, ids = make_store(llama()), words(1, 20)
    cache = store.cache_for(ids)
    generate(llama(), cache, ids)
    with pytest.raises(UnsupportedError, match=r"store.save"):
        pickle.dumps(cache)
    assert copy.deepcopy(cache).provenance.rows[0].tolist() == ids[0].tolist()


def test_autocast_is_another_identity(llama):
    store, ids = make_store(llama()), words(1, 40)
    turn(store, ids)
    with torch.autocast("cpu", torch.bfloat16):
        assert turn(store, ids)[1] == 0
    assert turn(store, ids)[1] == 0
    assert turn(store, ids)[1] == 39


def test_threads_may_share_a_store(model):
    store, base = make_store(model), words(1, 48)
    prompts = [torch.cat([base, words(1, 9, seed=seed)], dim=1) for seed in range(4)]
    expected = [cold(model, ids) for ids in prompts]

    def work(number: int) -> None:
        for round_ in range(4):
            place = (number + round_) % 4
            assert torch.equal(turn(store, prompts[place])[0], expected[place])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))  # raises what a thread has raised
    assert store.stats().hit_tokens > 0
    check_unheld(store)


class TestModels:
    def test_recurrent_models_say_why_nothing_is_reused(self):
        config = FalconMambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4)
        store, ids = make_store(FalconMambaForCausalLM(config).eval()), words(1, 20)
        cache = store.cache_for(ids)
        assert "recurrent states" in cache.stats().why
        assert "recurrent states" in store.stats().why
        with pytest.raises(UnsupportedError, match="recurrent states"):
            store.pin(ids)

    def test_encoder_decoders_are_refused(self):
        config = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        with pytest.raises(UnsupportedError, match="encoder"):
            make_store(T5ForConditionalGeneration(config))

    def test_prompts_that_attend_in_both_directions_are_not_reused(self, llama):
        model = copy.deepcopy(llama())
        model.config.use_bidirectional_attention = True
        assert "depend on what follows" in make_store(model).cache_for(words(1, 20)).stats().why

    def test_padded_rows_of_models_that_count_columns_are_not_reused(self, prompts):
        config = BartConfig(
            vocab_size=VOCABULARY, d_model=16, decoder_layers=1, decoder_attention_heads=2, pad_token_id=0
        )
        config.is_encoder_decoder = False
        model = BartForCausalLM(config).eval()
        store, batch = make_store(model), prompts(30, 18)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        cache = store.cache_for(ids, mask)
        assert "takes no positions" in cache.stats().why
        assert store.commit(cache, generate(model, cache, ids, mask)) == 0
        alone = ids[:1]
        turn(store, alone)
        assert turn(store, alone)[1] == 29

    def test_images_are_given_once(self, llama):
        """Placeholders as Llava has them; the images themselves matter to nobody here but the key."""
        model = copy.deepcopy(llama())
        model.config.image_token_id = image = FIRST_WORD
        store, ids = make_store(model), words(1, 40).clamp(min=FIRST_WORD + 1)
        ids[0, 10:20] = image
        pixels = {"pixel_values": torch.zeros(1, 3, 4, 4), "extra_key": "a"}
        cache = store.cache_for(ids, **pixels)
        output = generate(model, cache, ids)
        store.commit(cache, output)
        assert store.cache_for(output, **pixels).stats().reused_tokens == 10
        assert store.cache_for(output, extra_key="a").stats().reused_tokens == 45
        with pytest.raises(InvalidArgumentError, match="10 tokens of the prompt stand for images"):
            store.cache_for(output, extra_key="b")

    @pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
    def test_keys_that_depend_on_the_length_are_not_reused(self, llama, rope_type):
        model = copy.deepcopy(llama())
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": rope_type, "factor": 2.0}
        assert rope_type in make_store(model).cache_for(words(1, 20)).stats().why


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": [[1, 2]]}, "expected token ids"),
        ({"input_ids": torch.zeros(1, 2)}, "expected token ids"),
        ({"input_ids": torch.zeros(3, dtype=torch.long)}, "expected token ids"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "at least one token"),
        ({"input_ids": words(1, 4), "attention_mask": torch.ones(1, 3)}, r"attention_mask is \[1, 3\]"),
        ({"input_ids": words(1, 4), "copies": 0}, "copies=0"),
    ],
)
def test_wrong_arguments_are_named(llama, arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make_store(llama()).cache_for(**arguments)
    assert issubclass(InvalidArgumentError, PagedCacheError)
