"""A session returns every answer, also one that the store cannot know, and keeps what an interrupted turn computed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_paged_cache import CacheStateError, OutOfBlocksError
from tests.support.stores import INT4, SIZE, check_unheld, generate, make_store
from tests.support.word_models import word_llama, word_tokenizer

Models = Callable[..., PreTrainedModel]
Tokens = Callable[..., Tensor]


def call(ids: Tensor, num_new: int = 6, **options: Any) -> dict[str, Any]:
    return {"attention_mask": torch.ones_like(ids), "max_new_tokens": num_new, "do_sample": False, **options}


def only_new_ids(model: PreTrainedModel, input_ids: Tensor, **arguments: Any) -> Tensor:
    """A decoding loop that leaves the prompt out of what it returns."""
    arguments = {name: arguments[name] for name in ("attention_mask", "cache", "past_key_values") if name in arguments}
    return model.generate(input_ids, **arguments, max_new_tokens=5, do_sample=False)[:, input_ids.shape[1] :]


class TestAnswersThatTheStoreCannotKnow:
    def test_new_ids_only(self, llama, tokens, caplog):
        store, ids = make_store(llama()), tokens(30)
        expected = llama().generate(ids, **call(ids, 5))
        output = store.session().generate(ids, **call(ids, custom_generate=only_new_ids))
        assert output.equal(expected[:, 30:])
        assert "a turn was not committed to the store" in caplog.text
        assert store.stats().committed_tokens == 0

    def test_a_function_of_ones_own_begins_with_an_empty_cache(self, llama, tokens):
        """It may pass the whole prompt to the model, as it does without a session."""
        store, ids = make_store(llama()), tokens(30)
        store.session().generate(ids, **call(ids))
        chat = store.session()
        output = chat.generate(ids, **call(ids, custom_generate=only_new_ids))
        assert output.equal(llama().generate(ids, **call(ids, 5))[:, 30:])
        assert chat.cache.stats().reused_tokens == 0

    def test_a_prompt_that_token_healing_changes(self, caplog):
        tokenizer = word_tokenizer(["a page table maps what a program pro p calls an address"])
        tokenizer.pad_token, tokenizer.bos_token = tokenizer.eos_token, tokenizer.unk_token
        model = word_llama(tokenizer)
        with torch.no_grad():
            model.lm_head.weight.mul_(1000)  # so that it is sure of another word than "p"
        ids = tokenizer("a page table maps what a p", return_tensors="pt")["input_ids"]
        healing = call(ids, token_healing=True, tokenizer=tokenizer)
        store = make_store(model)
        store.session().generate(ids, **call(ids))
        expected = model.generate(ids, **healing)
        assert not expected[:, : ids.shape[1]].equal(ids)
        chat = store.session()
        assert chat.generate(ids, **healing).equal(expected)
        assert chat.cache.stats().reused_tokens == 0

    @pytest.mark.parametrize("error", [ValueError("unforeseen"), MemoryError(), CacheStateError("foreseen")], ids=repr)
    def test_an_error_while_it_is_committed(self, llama, tokens, caplog, monkeypatch, error):
        store, ids = make_store(llama()), tokens(30)

        def fails(*_: Any) -> int:
            raise error

        monkeypatch.setattr(store, "commit", fails)
        output = store.session().generate(ids, **call(ids))
        assert output.equal(llama().generate(ids, **call(ids)))
        record = caplog.records[-1]
        assert record.levelno == logging.WARNING
        assert bool(record.exc_info) != isinstance(error, CacheStateError)

    def test_weights_that_change_during_the_turn(self, tokens, caplog, llama):
        model, ids = copy.deepcopy(llama()), tokens(30)
        store = make_store(model)

        def changes(input_ids: Tensor, scores: Tensor) -> Tensor:
            with torch.no_grad():
                model.lm_head.weight.mul_(2.0)  # the order of the scores stays
            return scores

        output = store.session().generate(ids, **call(ids), logits_processor=LogitsProcessorList([_Hook(changes)]))
        assert output.equal(llama().generate(ids, **call(ids)))
        assert "the model has changed since" in caplog.text


class _Hook(LogitsProcessor):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.function(input_ids, scores)


class Interrupting(BaseStreamer):
    """Sees the prompt and some tokens, then raises."""

    def __init__(self, num_tokens: int) -> None:
        self.seen: list[Tensor] = []
        self.num_tokens = num_tokens

    def put(self, value: Tensor) -> None:
        self.seen.append(value.reshape(1, -1).cpu())
        if len(self.seen) > self.num_tokens:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


class TestInterruptedTurns:
    @pytest.mark.parametrize("kv", ["raw", INT4], ids=["raw", "int4"])
    @pytest.mark.parametrize("num_tokens", [0, 1, 2, SIZE + 3])
    def test_by_a_streamer(self, llama, tokens, num_tokens, kv):
        store, ids = make_store(llama(), kv=kv), tokens(30)
        expected = llama().generate(ids, **call(ids, num_tokens + 9))
        with store.session() as chat:
            with pytest.raises(KeyboardInterrupt):
                chat.generate(ids, **call(ids, 90), streamer=Interrupting(num_tokens))
            known = chat.keep_interrupted()
            if kv == "raw":
                assert chat.sequences.equal(expected[:, : chat.sequences.shape[1]])
            # The prompt is put before anything is computed, and of the last token nothing is computed yet.
            assert chat.sequences.shape[1] == 30 + num_tokens
            assert known == (chat.sequences.shape[1] - 1 if num_tokens else 0)
            following = torch.cat([chat.sequences, tokens(7, seed=1)], dim=1)
            output = chat.generate(following, **call(following))
            assert chat.cache.stats().reused_tokens == known
            if kv == "raw":
                assert output.equal(llama().generate(following, **call(following)))
        check_unheld(store)

    def test_without_a_session_by_what_a_streamer_saw(self, llama, tokens):
        model, store, ids = llama(), make_store(llama()), tokens(30)
        cache, streamer = store.cache_for(ids), Interrupting(4)
        with pytest.raises(KeyboardInterrupt):
            generate(model, cache, ids, streamer=streamer, max_new_tokens=90)
        cache.rollback()
        assert store.commit(cache, torch.cat(streamer.seen, dim=1)) == 33

    @pytest.mark.parametrize("layer", [0, 1, 2])
    def test_in_the_middle_of_a_pass(self, llama, tokens, layer):
        """Ctrl-C while the fifth pass runs: some layers have its token, and others have not."""
        model, store, ids = llama(), make_store(llama()), tokens(30)
        expected, passes = model.generate(ids, **call(ids)), []

        def interrupt(*_: Any) -> None:
            passes.append(1)
            if len(passes) == 5:
                raise KeyboardInterrupt

        chat = store.session()
        handle = model.model.layers[layer].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            chat.generate(ids, **call(ids))
        handle.remove()
        assert chat.keep_interrupted() == 33
        assert chat.sequences.equal(expected[:, :34])
        assert chat.generate(expected, **call(expected)).equal(model.generate(expected, **call(expected)))
        assert chat.cache.stats().reused_tokens == 33

    def test_in_the_prompt(self, llama, tokens):
        """The chunks that are finished are kept."""
        model, store, ids = llama(), make_store(llama()), tokens(50)
        passes: list[int] = []

        def interrupt(*_: Any) -> None:
            passes.append(1)
            if len(passes) == 3:
                raise KeyboardInterrupt

        chat = store.session()
        handle = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            chat.generate(ids, **call(ids, prefill_chunk_size=20))
        handle.remove()
        assert chat.keep_interrupted() == 40
        assert chat.generate(ids, **call(ids)).equal(model.generate(ids, **call(ids)))
        assert chat.cache.stats().reused_tokens == 40

    def test_by_a_lack_of_blocks(self, llama, tokens):
        store, ids = make_store(llama(), memory="100KiB"), tokens(40)
        chat = store.session()
        with pytest.raises(OutOfBlocksError):
            chat.generate(ids, **call(ids, 900))
        length = chat.cache.get_seq_length()
        assert chat.keep_interrupted() == length
        assert chat.sequences.shape[1] == length + 1

    @pytest.mark.parametrize(
        "options",
        [{"num_return_sequences": 2, "do_sample": True}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}],
        ids=["samples", "beams", "drafts"],
    )
    def test_of_several_rows_and_of_drafts(self, llama, tokens, options):
        model, store, ids = llama(), make_store(llama()), tokens(10).repeat(1, 3)
        calls: list[int] = []

        def interrupt(input_ids: Tensor, scores: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 6:
                raise KeyboardInterrupt
            return scores

        chat = store.session()
        hooks = LogitsProcessorList([_Hook(interrupt)])
        with pytest.raises(KeyboardInterrupt):
            chat.generate(ids, **{**call(ids, 20), **options}, logits_processor=hooks)
        known = chat.keep_interrupted()
        rows = 1 if "prompt_lookup_num_tokens" in options else 2
        assert known >= rows * 30
        for row in chat.sequences:
            following = torch.cat([row[None], tokens(3, seed=2)], dim=1)
            assert (
                store.session()
                .generate(following, **call(following))
                .equal(model.generate(following, **call(following)))
            )

    @pytest.mark.parametrize("call_number", [3, 4, 5])
    def test_by_a_stopping_criterion_among_drafts(self, windowed, tokens, call_number):
        """The drafts were settled before: what has left a window cannot come back."""
        model, ids = windowed(["sliding_attention", "full_attention"]), tokens(10).repeat(1, 4)
        store, calls = make_store(model), []

        def interrupt(*_: Any, **__: Any) -> Tensor:
            calls.append(1)
            if len(calls) == call_number:
                raise KeyboardInterrupt
            return torch.zeros(1, dtype=torch.bool)

        chat = store.session()
        with pytest.raises(KeyboardInterrupt):
            chat.generate(ids, **call(ids, 30), prompt_lookup_num_tokens=3, stopping_criteria=[interrupt])
        assert chat.keep_interrupted() == chat.sequences.shape[1] - 1

    def test_a_finished_turn_is_known_already(self, llama, tokens):
        store, ids = make_store(llama()), tokens(30)
        chat = store.session()
        output = chat.generate(ids, **call(ids))
        assert chat.sequences.equal(output)
        assert chat.keep_interrupted() == output.shape[1] - 1

    def test_without_a_turn_there_is_nothing_to_keep(self, llama, tokens):
        chat = make_store(llama()).session()
        with pytest.raises(CacheStateError, match="there is no turn to keep"):
            chat.keep_interrupted()
        chat.generate(tokens(9), **call(tokens(9)))
        chat.close()
        with pytest.raises(CacheStateError, match="there is no turn to keep"):
            chat.keep_interrupted()
