"""`generate` over quantized blocks gives what it gives with the oracle: codecs x modes x families x attention.

Models run in float64, so that both compute the same keys to the last bit that counts: a code is a step, and a number in
the middle between two could otherwise become either. The sizes are such that blocks are quantized in most prompts, at
once and while tokens are generated, and that windowed layers still look at them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from transformers import Cache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from hf_paged_cache import KVQuant, PagedCache
from tests.support.families import family_called, inputs
from tests.support.generate_modes import MODES, Mode, Result, assert_same, prompt_names
from tests.support.quantized_oracle import Quantization, QuantizedOracle, quantization

BLOCK = EXACT_RECENT = SINK = 16
WINDOW = 40
NAMES = ("int8", "fp8", "int4", "k8v4", "k4v2", "kivi2")
PADDED_BATCH = (5, 49, 70)
CHANGES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma 3": {"sliding_window": WINDOW},
    "DeepSeek V3": {"first_k_dense_replace": 2},  # experts need float32
    "LFM2": {},
    "T5": {},
}
"""Families, and what is changed in their configs."""
QUICK_MODES = {
    "greedy": ("int8", "int4"),
    "beam search": ("int8", "int4"),
    "assisted, weak draft": ("int4",),
    "chunked prefill": ("int8",),
    "three-turn chat": ("int4",),
}
MODE_OF = {mode.name: mode for mode in MODES}

How = Callable[[int, bool], Quantization | None]


def small(name: str, **layers: Any) -> KVQuant:
    """A codec with the small sizes of these tests."""
    if name in ("int8", "fp8"):
        return KVQuant(name, layers=layers)
    return KVQuant(name, exact_recent=EXACT_RECENT, exact_sinks=SINK, layers=layers)


def default_rule(name: str) -> How:
    """Layers with a window stay exact under codecs that quantize whole blocks."""
    rule = quantization(small(name), BLOCK)
    return lambda layer_idx, is_sliding: rule if not is_sliding or name in ("int8", "fp8") else None


@functools.lru_cache(maxsize=8)
def model_of(family: str, attention: str) -> PreTrainedModel:
    config = family_called(family).config()
    for name, value in CHANGES[family].items():
        setattr(config, name, value)
    return family_called(family).build_from(config, attention).double()


def inputs_of(family: str, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    return {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in inputs(family_called(family), lengths).items()
    }


def cache_for(model: PreTrainedModel, build: Callable[[PreTrainedConfig, bool], Cache]) -> Cache:
    """`build(config, is_cross_attention)`, twice for an encoder-decoder."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(build(model.config, False), build(model.config, True))
    return build(model.config, False)


def run_paged(family: str, mode: Mode, lengths: tuple[int, ...], attention: str, kv: Any, **options: Any) -> Result:
    model = model_of(family, attention)
    options = {"block_size": BLOCK, "kv": kv} | options
    cache = cache_for(model, lambda config, is_cross: PagedCache(config, cross_attention=is_cross, **options))
    return mode.run(model, inputs_of(family, lengths), cache)


@functools.lru_cache(maxsize=64)
def expected(family: str, mode: Mode, lengths: tuple[int, ...], name: str) -> Result:
    return run_oracle(family, mode, lengths, default_rule(name))


def run_oracle(family: str, mode: Mode, lengths: tuple[int, ...], how: How) -> Result:
    model, batch = model_of(family, family_called(family).attentions[0]), inputs_of(family, lengths)
    # `generate` puts the start token of an encoder-decoder before the padding, which then is a hole of the mask.
    padding = (batch[prompt_names(model)[1]] == 0).sum(1) * (not model.config.is_encoder_decoder)

    def build(config: PreTrainedConfig, is_cross_attention: bool) -> Cache:
        return QuantizedOracle(config, how, padding.tolist())

    return mode.run(model, batch, cache_for(model, build))


def is_quick(family: str, mode: Mode, name: str, lengths: tuple[int, ...]) -> bool:
    if len(lengths) == 1 and mode.batched:
        return False
    if family == "Llama":
        return mode.name in QUICK_MODES and name in QUICK_MODES[mode.name]
    return mode.name == "greedy" and name == "int4"


def marks_of(family: str, mode: Mode, name: str, lengths: tuple[int, ...]) -> Any:
    """With the slow tests, each family runs each length of each mode once, the codecs in turn; the rest is evidence."""
    if is_quick(family, mode, name, lengths):
        return ()
    turn = [*CHANGES].index(family) + MODES.index(mode) + forms_of(mode).index(lengths)
    return pytest.mark.slow if name == NAMES[turn % len(NAMES)] else pytest.mark.evidence


def forms_of(mode: Mode) -> list[tuple[int, ...]]:
    return [(40,), (70,), *([PADDED_BATCH] if mode.batched else [])]


def cases() -> list[object]:
    """Family, mode, codec and prompt lengths, as parameters of a test."""
    return [
        pytest.param(
            family,
            mode,
            name,
            lengths,
            id=f"{family}-{mode.name}-{name}-{'+'.join(map(str, lengths))}",
            marks=marks_of(family, mode, name, lengths),
        )
        for family in CHANGES
        for mode in MODES
        if not family_called(family).refuses(mode.name) and not mode.eager_only
        for name in NAMES
        for lengths in forms_of(mode)
    ]


@pytest.mark.parametrize(("family", "mode", "name", "lengths"), cases())
def test_same_as_with_the_oracle(family: str, mode: Mode, name: str, lengths: tuple[int, ...]) -> None:
    actual = run_paged(family, mode, lengths, "hf_paged", small(name))
    assert_same(actual, expected(family, mode, lengths, name), codes_may_flip=True)


@pytest.mark.parametrize("sliding", [KVQuant("int8"), small("int4")], ids=["int8", "int4"])
@pytest.mark.parametrize("mode", [MODE_OF[name] for name in ("greedy", "chunked prefill")], ids=lambda mode: mode.name)
def test_windowed_layers_can_be_quantized_too(sliding: KVQuant, mode: Mode) -> None:
    rules = {is_sliding: quantization(kv, BLOCK) for is_sliding, kv in ((True, sliding), (False, small("int4")))}
    actual = run_paged("Gemma 3", mode, PADDED_BATCH, "hf_paged", small("int4", sliding=sliding))
    assert_same(actual, run_oracle("Gemma 3", mode, PADDED_BATCH, lambda layer_idx, is_sliding: rules[is_sliding]))


@pytest.mark.parametrize("name", NAMES)
def test_attention_that_copies_keys_out_of_blocks(name: str) -> None:
    mode = MODE_OF["greedy"]
    assert_same(
        run_paged("Llama", mode, PADDED_BATCH, "sdpa", small(name)), expected("Llama", mode, PADDED_BATCH, name)
    )
