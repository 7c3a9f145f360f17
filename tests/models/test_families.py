"""The fixtures bite: what the tiny models and the modes are meant to exercise does change results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from tests.support.combinations import Later, combined
from tests.support.compat import CACHE_ARGUMENT, new_cache
from tests.support.families import ATTENTIONS, FAMILIES, PAD, Family, inputs
from tests.support.family_configs import FIRST_WORD, VOCABULARY
from tests.support.generate_modes import (
    MODES,
    NEW_TOKENS,
    Mode,
    answer,
    assert_same,
    assisted_by_equal_draft,
    assisted_by_weak_draft,
    beam_search,
    greedy,
    prompt_lookup,
    prompt_names,
    stop_strings,
)

BY_NAME = {family.name: family for family in FAMILIES}
MODE_BY_NAME = {mode.name: mode for mode in MODES}
PADDED_BATCH = (3, 17, 40)

# One of each kind: full attention, windows, recurrent layers, an encoder, images. The others run with the slow tests.
QUICK = ("Llama", "Gemma 3", "Jamba", "T5", "Qwen2-VL")
every_family = combined(family={family.name: family if family.name in QUICK else Later(family) for family in FAMILIES})


def families(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", [BY_NAME[name] for name in names], ids=names)


def dynamic_cache(model: PreTrainedModel) -> Cache:
    return new_cache(model, lambda config: DynamicCache(config=config))


def build(family: Family) -> PreTrainedModel:
    return family.build(family.attentions[0])


def answers(model: PreTrainedModel, prompt: dict[str, Tensor]) -> Tensor:
    """The new tokens of a greedy answer, `[batch, NEW_TOKENS]`."""
    return answer(model, prompt, None)[:, -NEW_TOKENS:]


def filled_cache(family: Family) -> Cache:
    model = build(family)
    cache = dynamic_cache(model)
    answer(model, inputs(family, (40,)), cache)
    return cache


@every_family
def test_inputs_are_padded_on_the_left(family: Family) -> None:
    ids_name, mask_name = prompt_names(build(family))
    batch = inputs(family, PADDED_BATCH)
    mask = batch[mask_name]
    assert mask.sum(dim=1).tolist() == [length + len(family.prompt_start) for length in PADDED_BATCH]
    assert (mask.diff(dim=1) >= 0).all()
    assert ((batch[ids_name] == PAD) == (mask == 0)).all()
    assert inputs(family, (17, 17))[mask_name].all()


@every_family
def test_an_early_word_changes_the_answer(family: Family) -> None:
    model = build(family)
    changed = 8
    prompt = {
        name: tensor.repeat(1 + changed, *[1] * (tensor.dim() - 1)) for name, tensor in inputs(family, (40,)).items()
    }
    ids = prompt[prompt_names(model)[0]]
    for row in range(1, 1 + changed):
        word = ids[row, len(family.prompt_start) + row - 1]
        word.copy_((word - FIRST_WORD + 1) % (VOCABULARY - FIRST_WORD) + FIRST_WORD)
    original, *others = answers(model, prompt)
    assert any((other != original).any() for other in others)


@every_family
def test_an_answer_does_not_repeat_one_word(family: Family) -> None:
    assert len(answers(build(family), inputs(family, (40,))).unique()) > 2


def test_families_answer_differently() -> None:
    given = {tuple(answers(build(family), inputs(family, (17,)))[0].tolist()) for family in FAMILIES}
    assert len(given) == len(FAMILIES)


@families("T5", "BART", "Whisper", "LLaVA", "Gemma 3 with images", "Qwen2-VL", "Mllama")
def test_what_comes_with_the_prompt_changes_the_answer(family: Family) -> None:
    model = build(family)
    prompt = inputs(family, (17,))
    companions = {"input_features", "pixel_values", "input_ids" if model.config.is_encoder_decoder else ""}
    other = {name: tensor.flip(-1) if name in companions else tensor for name, tensor in prompt.items()}
    assert (answers(model, prompt) != answers(model, other)).any()


@every_family
def test_the_best_beam_changes_its_place(family: Family) -> None:
    model = build(family)
    beams = (beam_search(model, inputs(family, (length,)), None)["beams"] for length in (17, 40))
    assert any(len(path[path >= 0].unique()) > 1 for path in beams)


@families("Mistral", "Gemma 2", "Gemma 3", "gpt-oss", "Gemma 3n", "Gemma 4", "Gemma 3 with images", "Llama 4")
def test_a_wide_window_changes_the_answer(family: Family) -> None:
    config = family.config()
    text_config = config.get_text_config()
    setattr(text_config, "attention_chunk_size" if family.name == "Llama 4" else "sliding_window", 1024)
    wide = family.build_from(config, family.attentions[0])
    prompt = inputs(family, (40,))
    assert (answers(build(family), prompt) != answers(wide, prompt)).any()


def test_the_soft_cap_changes_the_answer() -> None:
    family = BY_NAME["Gemma 2"]
    config = family.config()
    config.attn_logit_softcapping = None
    prompt = inputs(family, (40,))
    assert (answers(build(family), prompt) != answers(family.build_from(config, "eager"), prompt)).any()


def test_the_sinks_change_the_answer() -> None:
    family = BY_NAME["gpt-oss"]
    without_sinks = build(family)
    for layer in without_sinks.model.layers:
        layer.self_attn.sinks.data.fill_(-1e9)
    prompt = inputs(family, (40,))
    assert (answers(build(family), prompt) != answers(without_sinks, prompt)).any()


def test_latent_keys_and_values_have_other_widths() -> None:
    layer = filled_cache(BY_NAME["DeepSeek V3"]).layers[0]
    assert (layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1]) == (1, 16, 8)


def test_full_layers_of_gemma_4_have_wider_heads() -> None:
    sliding, full = filled_cache(BY_NAME["Gemma 4"]).layers[:2]
    assert (sliding.keys.shape[-1], full.keys.shape[-1]) == (8, 16)


@families("Gemma 3n", "Gemma 4")
def test_layers_that_share_keys_store_none(family: Family) -> None:
    storing = [layer for layer in filled_cache(family).layers if layer.keys is not None]
    assert len(storing) == family.config().num_hidden_layers - 2


def test_the_keys_of_an_image_are_not_those_of_the_prompt() -> None:
    first, cross, _ = filled_cache(BY_NAME["Mllama"]).layers
    assert cross.keys.shape[-2] != first.keys.shape[-2]


def number_of_passes(family: Family, run: Callable[..., Any], length: int) -> int:
    """Forward passes of the model itself, its draft's not counted."""
    model = build(family)
    passes = 0

    def count(module: PreTrainedModel, *_: Any) -> None:
        nonlocal passes
        passes += module is model

    model.register_forward_hook(count)
    run(model, inputs(family, (length,)), None)
    return passes


@families("Llama", "GPT-NeoX", "Falcon")
def test_an_equal_draft_is_always_right_and_a_weak_one_now_and_then(family: Family) -> None:
    with_equal_draft = number_of_passes(family, assisted_by_equal_draft, 15)
    with_weak_draft = number_of_passes(family, assisted_by_weak_draft, 15)
    assert with_equal_draft == NEW_TOKENS // 5 < with_weak_draft < NEW_TOKENS


@families("Gemma 3", "GPT-NeoX", "Qwen3")
def test_prompt_lookup_is_right_now_and_then(family: Family) -> None:
    assert NEW_TOKENS // 5 < number_of_passes(family, prompt_lookup, 40) < NEW_TOKENS


def test_a_stop_string_ends_an_answer() -> None:
    model, prompt = build(BY_NAME["Llama"]), inputs(BY_NAME["Llama"], (17,))
    assert stop_strings(model, prompt, None)["sequences"].shape[1] < 17 + NEW_TOKENS


@pytest.mark.slow
@every_family
def test_the_library_agrees_with_itself_under_each_attention(family: Family) -> None:
    prompt = inputs(family, PADDED_BATCH)
    results = []
    for attention in set(family.attentions) - {"hf_paged"}:
        model = family.build(attention)
        results += [greedy(model, prompt, dynamic_cache(model)), greedy(model, prompt, None)]
    for result in results[1:]:
        assert_same(result, results[0])


def forms(mode: Mode) -> list[tuple[int, ...]]:
    return [*((length,) for length in mode.lengths), *([PADDED_BATCH] if mode.batched else [])]


def test_refusals_name_modes_and_attentions() -> None:
    known = {*MODE_BY_NAME, *ATTENTIONS}
    assert {name for family in FAMILIES for name in (*family.refused, *family.remarks)} <= known


@families("Jamba", "Bamba")
def test_the_library_s_own_cache_gives_something_else_for_a_prompt_in_chunks(family: Family) -> None:
    assert family.remarks.keys() == {"chunked prefill"}
    model, ids = build(family), inputs(family, (40,))["input_ids"]
    with torch.no_grad():
        whole, cache = model(ids).logits, dynamic_cache(model)
        chunks = [model(chunk, **{CACHE_ARGUMENT: cache}).logits for chunk in ids.split(16, dim=1)]
    assert (torch.cat(chunks, dim=1) - whole).abs().max() > 0.1


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(family, MODE_BY_NAME[name], id=f"{family.name}-{name}")
        for family in FAMILIES
        for name in family.refused
        if name in MODE_BY_NAME and family.refuses(name)
    ],
)
def test_transformers_still_refuses(family: Family, mode: Mode) -> None:
    model = build(family)
    failures = 0
    for lengths in forms(mode):
        try:
            mode.run(model, inputs(family, lengths), dynamic_cache(model))
        except (KeyError, RuntimeError, TypeError, ValueError):
            failures += 1
    assert failures > 0


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param(family, name, id=f"{family.name}-{name}")
        for family in FAMILIES
        for name in family.refused
        if name in ATTENTIONS and family.refuses(name)
    ],
)
def test_transformers_still_refuses_the_attention(family: Family, attention: str) -> None:
    prompt = inputs(family, (17,))
    try:
        result = answers(family.build(attention), prompt)
    except (KeyError, ValueError):
        return
    assert (result != answers(family.build("eager"), prompt)).any()


class ForgetsReorder(DynamicCache):
    def reorder_cache(self, beam_idx: Tensor) -> None:
        pass


class KeepsRejectedTokens(DynamicCache):
    def crop(self, tokens_to_remove: int) -> None:
        pass


class LosesFirstKey(DynamicCache):
    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        keys[:, :, 0] = 0
        return keys, values


class MixesRows(DynamicCache):
    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        return keys.roll(1, dims=0), values


@pytest.mark.parametrize(
    ("broken", "mode", "lengths"),
    [
        (ForgetsReorder, "beam search", (17,)),
        (KeepsRejectedTokens, "assisted, weak draft", (15,)),
        (KeepsRejectedTokens, "prompt lookup", (40,)),
        (LosesFirstKey, "greedy", (17,)),
        (MixesRows, "greedy", PADDED_BATCH),
    ],
)
def test_a_broken_cache_is_noticed(broken: type[DynamicCache], mode: str, lengths: tuple[int, ...]) -> None:
    family, run = BY_NAME["Llama"], MODE_BY_NAME[mode].run
    model, prompt = build(family), inputs(family, lengths)
    reference = run(model, prompt, dynamic_cache(model))
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        assert_same(run(model, prompt, broken(config=model.config)), reference)
