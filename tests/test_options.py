"""Options of `generate` mean what they mean to `generate`, wherever they are given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, MptConfig, PreTrainedModel

from hf_paged_cache import BlockStore, InvalidArgumentError, PagedCache, prefill
from hf_paged_cache.options import _ARGUMENTS, _ATTRIBUTES, _OF_PROMPTS, generate_options
from tests.support.compat import generate
from tests.support.families import family_called
from tests.support.stores import make_store

Models = Callable[..., PreTrainedModel]
Tokens = Callable[..., Tensor]

# One option, and where it is given: in the call, in the `generation_config` of the call, in that of the model.
PLACES = pytest.mark.parametrize("place", ["call", "config", "model"])


def placed(model: PreTrainedModel, place: str, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model and a call that have these options in one place."""
    model = copy.deepcopy(model)
    if place == "call":
        return model, options
    if place == "config":
        return model, {"generation_config": GenerationConfig(**options)}
    model.generation_config.update(**options)
    return model, {}


class TestResolution:
    @PLACES
    @pytest.mark.parametrize(
        "options", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}], ids=["beams", "samples"]
    )
    def test_copies(self, llama, place, options):
        model, call = placed(llama(), place, **options)
        assert generate_options(model, call).copies == 3
        assert generate_options(model, {**call, "num_beams": 4}).copies == 4

    @PLACES
    @pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"token_healing": True}], ids=str)
    def test_what_begins_with_an_empty_cache(self, llama, place, options):
        model, call = placed(llama(), place, **options)
        assert generate_options(model, call).why_empty
        assert not generate_options(llama(), {}).why_empty

    def test_assistants_and_functions_are_arguments_only(self, llama):
        assert generate_options(llama(), {"assistant_model": llama()}).why_empty
        assert generate_options(llama(), {"custom_generate": lambda *_: None}).why_empty

    def test_a_config_of_the_call_leaves_the_rest_to_the_model(self, llama):
        model, call = placed(llama(), "model", eos_token_id=[9, 11], pad_token_id=3)
        call["generation_config"] = GenerationConfig(num_beams=2, pad_token_id=5)
        options = generate_options(model, call)
        assert options.ends_and_pads == ([9, 11], [5])
        assert generate_options(model, {**call, "eos_token_id": 7}).ends_and_pads == ([7], [5])

    def test_nothing_of_the_model_or_the_call_changes(self, llama):
        model, call = placed(llama(), "config", num_beams=2)
        before = (model.generation_config.to_dict(), call["generation_config"].to_dict())
        generate_options(model, {**call, "max_new_tokens": 9}).for_prompt()
        assert (model.generation_config.to_dict(), call["generation_config"].to_dict()) == before

    def test_every_attribute_is_known(self):
        """An attribute that a new transformers brings is reset for prompts, unless it decides how they are computed."""
        assert {*_OF_PROMPTS} <= _ATTRIBUTES
        assert {"assistant_model", "custom_generate", "generation_config", "streamer", "inputs"} <= _ARGUMENTS
        assert not _ATTRIBUTES & _ARGUMENTS
        assert {*GenerationConfig().to_dict()} - {"transformers_version", "_from_model_config"} <= _ATTRIBUTES

    def test_it_is_what_generate_resolves(self, llama, tokens, monkeypatch):
        """The config that a loop of `generate` gets."""
        model, call = placed(llama(), "config", num_beams=2, length_penalty=0.5)
        model.generation_config.update(repetition_penalty=1.5, num_beams=4, num_return_sequences=2)
        call |= {"max_new_tokens": 3, "num_beams": 3}
        seen: list[GenerationConfig] = []
        beam_search = GenerationMixin._beam_search

        def looked_at(self: Any, *arguments: Any, generation_config: GenerationConfig, **options: Any) -> Any:
            seen.append(generation_config)
            return beam_search(self, *arguments, generation_config=generation_config, **options)

        monkeypatch.setattr(type(model), "_beam_search", looked_at, raising=False)
        model.generate(tokens(5), **call)
        resolved = generate_options(model, call).config
        differing = {name for name in _ATTRIBUTES if getattr(seen[0], name) != getattr(resolved, name)}
        assert differing <= {"max_length", "min_length"}  # which `generate` derives from the prompt


class TestCachesOfTheirOwn:
    """A session, and `prefill`, bring the cache that `generate` uses."""

    def test_a_model_that_generates_without_a_cache_by_default(self, tokens):
        model, _ = placed(family_called("MPT").build("eager"), "model", use_cache=False)
        assert MptConfig().use_cache is False  # and so that of MPT's generation_config
        ids = tokens(30)
        call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
        expected = model.generate(ids, **call)
        chat = make_store(model).session()
        assert chat.generate(ids, **call).equal(expected)
        longer = torch.cat([expected, tokens(5, seed=1)], dim=1)
        call["attention_mask"] = torch.ones_like(longer)
        assert chat.generate(longer, **call).equal(model.generate(longer, **call))
        assert chat.cache.stats().reused_tokens == expected.shape[1] - 1

    @pytest.mark.parametrize("place", ["call", "config"])
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"use_cache": False}, "use_cache=False"),
            ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ],
        ids=["none", "static"],
    )
    def test_what_the_call_itself_asks_for_is_refused(self, llama, tokens, place, options, message):
        model, call = placed(llama(), place, **options)
        with pytest.raises(InvalidArgumentError, match=message):
            make_store(model).session().generate(tokens(9), max_new_tokens=2, **call)
        with pytest.raises(InvalidArgumentError, match=message):
            prefill(model, PagedCache(model.config), input_ids=tokens(9), **call)

    @pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "dynamic"}], ids=str)
    def test_what_the_model_says_of_caches_is_a_default(self, llama, tokens, options):
        ids = tokens(20)
        call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
        expected = llama().generate(ids, **call)
        model, _ = placed(llama(), "model", **options)
        assert make_store(model).session().generate(ids, **call).equal(expected)
        assert (
            make_store(model)
            .session()
            .generate(ids, num_beams=2, **call)
            .equal(llama().generate(ids, num_beams=2, **call))
        )
        cache = prefill(model, PagedCache(model.config), input_ids=ids, **call)
        assert cache.get_seq_length() == 19

    @pytest.mark.parametrize("place", ["call", "config"])
    def test_a_cache_that_grows_is_what_it_gets(self, llama, tokens, place):
        model, call = placed(llama(), place, cache_implementation="dynamic")
        ids = tokens(20)
        call |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
        expected = llama().generate(ids, **{"attention_mask": call["attention_mask"], "max_new_tokens": 6})
        assert make_store(model).session().generate(ids, **call).equal(expected)

    @pytest.mark.parametrize("name", ["cache", "past_key_values"])
    def test_another_cache_is_refused(self, llama, tokens, name):
        with pytest.raises(InvalidArgumentError, match=f"{name}=: the cache is made here"):
            make_store(llama()).session().generate(tokens(9), **{name: PagedCache(llama().config)})


class TestPrefill:
    """It computes the prompt once, all but its last token, whatever the call that follows is asked for."""

    @PLACES
    @pytest.mark.parametrize(
        "options",
        [
            {"num_beams": 3, "num_return_sequences": 2},
            {"prompt_lookup_num_tokens": 3},
            {"token_healing": True},
            {"guidance_scale": 2.0},
            {"max_length": 5},
            {"min_length": 90},
            {"stop_strings": ["a"]},
            {"return_dict_in_generate": True, "output_scores": True},
            {"penalty_alpha": 0.6, "top_k": 4},
            {"forced_bos_token_id": 9},
            {"max_time": 0.0},
            {"num_assistant_tokens": 3, "assistant_early_exit": 1},
        ],
        ids=lambda options: "-".join(options),
    )
    def test_options_that_choose_tokens_have_no_part_in_it(self, llama, tokens, place, options):
        model, call = placed(llama(), place, **options)
        cache = prefill(model, PagedCache(model.config), input_ids=tokens(20), **call)
        assert (cache.batch_size, cache.get_seq_length()) == (1, 19)
        plain = prefill(llama(), PagedCache(model.config), input_ids=tokens(20))
        assert all(torch.equal(a.keys.clone(), b.keys.clone()) for a, b in zip(cache.layers, plain.layers, strict=True))

    @PLACES
    def test_the_size_of_chunks_is_kept(self, llama, tokens, place):
        model, call = placed(llama(), place, prefill_chunk_size=7)
        passes: list[int] = []
        handle = model.register_forward_hook(lambda module, arguments, output: passes.append(output.logits.shape[1]))
        prefill(model, PagedCache(model.config), input_ids=tokens(20), **call)
        handle.remove()
        assert len(passes) == 3

    def test_the_mask_is_inferred_from_the_pad_token_that_is_asked_for(self, llama, prompts):
        inputs = prompts(5, 9)
        ids = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 77)
        cache = prefill(llama(), PagedCache(llama().config), input_ids=ids, pad_token_id=77)
        assert cache.groups[0].table.padding.tolist() == [4, 0]

    @PLACES
    def test_a_store_infers_it_too(self, llama, prompts, place):
        inputs = prompts(5, 9)
        ids = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 77)
        model, call = placed(llama(), place, pad_token_id=77)
        cache = BlockStore(model, memory="4MiB").cache_for(ids, **call)
        assert cache.provenance.padding.tolist() == [4, 0]
        output = generate(model, {"input_ids": ids}, cache, max_new_tokens=3, **call)
        assert cache.groups[0].table.padding.tolist() == [4, 0]
        assert output.shape == (2, 12)
