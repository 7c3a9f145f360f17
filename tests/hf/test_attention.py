"""The attention implementation `"hf_paged"`, and any other one over a `PagedCache`: every feature of a model counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import flex_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged_cache import ATTENTION_NAME, PagedCache
from hf_paged_cache.hf.lazy import LazyKV
from tests.support.compat import CACHE_ARGUMENT, generate
from tests.support.families import family_called, randomize

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., dict[str, Tensor]]

SLIDING, FULL = "sliding_attention", "full_attention"
ATTENTIONS = pytest.mark.parametrize("attention", ["eager", "sdpa", "hf_paged"])
STACKS = pytest.mark.parametrize("layer_types", [[FULL, FULL], [SLIDING, FULL]], ids="-".join)
# A prompt, steps, a long chunk, a draft.
PIECES = [slice(0, 14), slice(14, 15), slice(15, 35), slice(35, 36), slice(36, 37), slice(37, 45), slice(45, 46)]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def build(config: PreTrainedConfig, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    randomize(model)
    return model.to(dtype).eval()


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> Tensor:
    """Logits of all tokens, computed in pieces."""
    return torch.cat([model(ids[:, piece], **{CACHE_ARGUMENT: cache}).logits for piece in PIECES], dim=1)


# Features of models


def gemma2(**changes: Any) -> Gemma2Config:
    features = {
        "layer_types": [SLIDING, FULL],
        "sliding_window": 16,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
    }
    return Gemma2Config(**SIZES, **{**features, **changes})


def gpt_oss(**changes: Any) -> GptOssConfig:
    # All experts are used: to choose some is not continuous, so that a last bit could change everything.
    features = {"sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 2}
    return GptOssConfig(**SIZES, **{**features, **changes})


FEATURES: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, Any]]] = {
    "softcap": (gemma2, {"attn_logit_softcapping": 50.0}),
    "softcap left out": (gemma2, {"attn_logit_softcapping": None}),
    "scale": (gemma2, {"query_pre_attn_scalar": 64}),
    "window": (gemma2, {"sliding_window": 5}),
    "window left out": (gemma2, {"layer_types": [FULL, FULL]}),
    "window beside sinks": (gpt_oss, {"sliding_window": 5}),
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("attention", ["eager", "hf_paged"])
def test_a_feature_changes_the_result_as_it_does_in_the_library(prompts: Prompts, name: str, attention: str) -> None:
    make, change = FEATURES[name]
    ids = prompts(46)["input_ids"]
    results = []
    for config in (make(), make(**change)):
        actual = logits(build(config, attention), ids, PagedCache(config, block_size=16))
        expected = logits(build(config, "eager"), ids, DynamicCache(config=config))
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
        results.append(actual)
    assert (results[0].argmax(-1) != results[1].argmax(-1)).any()


@pytest.mark.parametrize("attention", ["eager", "hf_paged"])
def test_sinks_take_their_share(prompts: Prompts, attention: str) -> None:
    config = gpt_oss()
    ids = prompts(46)["input_ids"]
    model, reference = build(config, attention), build(config, "eager")
    results = []
    for sink in (-20.0, 3.0):
        with torch.no_grad():
            for layer in [*model.model.layers, *reference.model.layers]:
                layer.self_attn.sinks.fill_(sink)
        actual = logits(model, ids, PagedCache(config, block_size=16))
        expected = logits(reference, ids, DynamicCache(config=config))
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
        results.append(actual)
    assert (results[0].argmax(-1) != results[1].argmax(-1)).any()


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 8), (14, 2), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [16, 40, 80, 96, 256])
def test_head_counts_and_sizes(prompts: Prompts, heads: tuple[int, int], head_dim: int) -> None:
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_dim}
    config = LlamaConfig(**{**SIZES, **sizes, "num_hidden_layers": 1, "hidden_size": 8 * heads[0]})
    ids = prompts(46)["input_ids"]
    actual = logits(build(config, "hf_paged"), ids, PagedCache(config, block_size=16))
    expected = logits(build(config, "eager"), ids, DynamicCache(config=config))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_later_tokens_have_no_influence_on_earlier_ones(windowed: Models, prompts: Prompts) -> None:
    model = windowed([SLIDING, FULL])
    ids = prompts(46)["input_ids"]
    changed = ids.clone()
    changed[:, 40] = 8 + (changed[:, 40] - 7) % 120
    before, after = (logits(model, tokens, PagedCache(model.config, block_size=16)) for tokens in (ids, changed))
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not before[:, 40].equal(after[:, 40])


# Weights


@STACKS
def test_the_weights_are_those_of_eager(windowed: Models, prompts: Prompts, layer_types: list[str]) -> None:
    model, reference = windowed(layer_types, "hf_paged"), windowed(layer_types, "eager")
    inputs = prompts(20, 14)
    options = {"max_new_tokens": 8, "do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    actual = generate(model, inputs, PagedCache(model.config, block_size=16), **options)
    expected = generate(reference, inputs, DynamicCache(config=model.config), **options)
    assert actual.sequences.equal(expected.sequences)
    assert len(actual.attentions) == len(expected.attentions) == 8
    for ours, theirs in zip(actual.attentions, expected.attentions, strict=True):
        for our_weights, their_weights in zip(ours, theirs, strict=True):
            assert our_weights.shape == their_weights.shape
            assert our_weights.isfinite().all()
            # Of the last query: earlier ones may be padding, whose weights mean nothing.
            torch.testing.assert_close(our_weights[:, :, -1], their_weights[:, :, -1], rtol=1e-3, atol=1e-4)


def test_weights_of_a_soft_capped_model(prompts: Prompts) -> None:
    config, ids = gemma2(), prompts(20)["input_ids"]
    weights = [
        build(config, attention)(ids, **{CACHE_ARGUMENT: cache}, output_attentions=True).attentions
        for attention, cache in [("hf_paged", PagedCache(config)), ("eager", DynamicCache(config=config))]
    ]
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


# Training


@pytest.mark.parametrize(
    "make",
    [lambda: LlamaConfig(**SIZES, attention_dropout=0.5), lambda: gemma2(attention_dropout=0.5)],
    ids=["plain", "soft-capped"],
)
@pytest.mark.parametrize("attention", ["eager", "hf_paged"])
def test_dropout_is_applied_in_training_and_nowhere_else(
    prompts: Prompts, make: Callable[[], PreTrainedConfig], attention: str
) -> None:
    config = make()
    model, ids = build(config, attention), prompts(46)["input_ids"]
    settled = logits(model, ids, PagedCache(config, block_size=16))
    assert settled.equal(logits(model, ids, PagedCache(config, block_size=16)))
    model.train()
    one, other = (logits(model, ids, PagedCache(config, block_size=16)) for _ in range(2))
    assert one.isfinite().all()
    assert not one.equal(other)
    assert not one.equal(settled)


def gradients(model: PreTrainedModel, ids: Tensor, cache: DynamicCache, cached: int) -> dict[str, Tensor]:
    """Gradients of a loss over the tokens from `cached` on, the ones before being cached without gradients."""
    model = copy.deepcopy(model).train()
    if cached:
        with torch.no_grad():
            model(ids[:, :cached], **{CACHE_ARGUMENT: cache})
    model(ids[:, cached:], labels=ids[:, cached:], **{CACHE_ARGUMENT: cache}).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@ATTENTIONS
@STACKS
@pytest.mark.parametrize("cached", [0, 10, 30])
def test_gradients_are_those_of_the_library(
    windowed: Models, prompts: Prompts, attention: str, layer_types: list[str], cached: int
) -> None:
    model, ids = windowed(layer_types, attention), prompts(40)["input_ids"]
    actual = gradients(model, ids, PagedCache(model.config, block_size=16), cached)
    expected = gradients(windowed(layer_types, "sdpa"), ids, DynamicCache(config=model.config), cached)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-4)


@ATTENTIONS
@pytest.mark.parametrize("cached", [0, 10])
def test_gradients_of_queries_alone(llama: Models, prompts: Prompts, attention: str, cached: int) -> None:
    ids = prompts(30)["input_ids"]
    results = []
    for name, kind in [(attention, PagedCache), ("sdpa", DynamicCache)]:
        model = copy.deepcopy(llama(name)).requires_grad_(False)
        model.model.layers[-1].self_attn.q_proj.weight.requires_grad_(True)
        results.append(gradients(model, ids, kind(config=model.config), cached))
    assert list(results[0]) == ["model.layers.2.self_attn.q_proj.weight"]
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)


def test_gradients_of_queries_through_several_passes(llama: Models, prompts: Prompts) -> None:
    """A graph that held blocks would find them written to by the next pass."""
    ids, results = prompts(12)["input_ids"], []
    for name, kind in [("hf_paged", PagedCache), ("sdpa", DynamicCache)]:
        model = copy.deepcopy(llama(name)).requires_grad_(False)
        model.model.layers[-1].self_attn.q_proj.weight.requires_grad_(True)
        cache = kind(config=model.config)
        passes = [model(ids[:, at : at + 1], **{CACHE_ARGUMENT: cache}).logits for at in range(12)]
        torch.cat(passes).square().mean().backward()
        results.append(model.model.layers[-1].self_attn.q_proj.weight.grad)
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-4)


@ATTENTIONS
def test_gradients_of_a_padded_batch(llama: Models, prompts: Prompts, attention: str) -> None:
    inputs = prompts(20, 7)
    results = []
    for name, kind in [(attention, PagedCache), ("sdpa", DynamicCache)]:
        model = copy.deepcopy(llama(name)).train()
        output = model(**inputs, **{CACHE_ARGUMENT: kind(config=model.config)})
        output.logits[inputs["attention_mask"].bool()].square().mean().backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(results[0], results[1], rtol=1e-2, atol=1e-4)


def test_a_cache_filled_with_gradients_keeps_no_graph(llama: Models, prompts: Prompts) -> None:
    model = copy.deepcopy(llama()).train()
    cache, ids = PagedCache(model.config), prompts(20)["input_ids"]
    model(ids[:, :10], **{CACHE_ARGUMENT: cache}).logits.sum().backward()
    model(ids[:, 10:], **{CACHE_ARGUMENT: cache}).logits.sum().backward()  # fails if it reaches the first graph
    assert not cache.layers[0].keys.clone().requires_grad
    assert copy.deepcopy(cache).get_seq_length() == 20


# Masks of one's own


def custom_mask(dtype: str) -> Tensor:
    """A causal mask `[1, 1, 46, 46]` that hides tokens 3 to 5 later on, and every pair of tokens 8 apart."""
    visible = torch.ones(46, 46, dtype=torch.bool).tril()
    visible[10:, 3:6] = False
    visible &= (torch.arange(46)[:, None] - torch.arange(46)[None]) != 8
    visible = visible[None, None]
    hidden = {"float, -inf": float("-inf"), "float, min": torch.finfo(torch.float32).min}
    return visible if dtype == "bool" else torch.zeros(visible.shape).masked_fill(~visible, hidden[dtype])


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        ("eager", "float, min"),
        ("sdpa", "bool"),
        ("sdpa", "float, min"),
        ("hf_paged", "bool"),
        ("hf_paged", "float, -inf"),
        ("hf_paged", "float, min"),
    ],
)
def test_a_mask_of_four_dimensions(llama: Models, prompts: Prompts, attention: str, dtype: str) -> None:
    model, ids, mask = llama(attention), prompts(46)["input_ids"], custom_mask(dtype)

    @torch.no_grad()
    def run(cache: DynamicCache) -> Tensor:
        pieces = [
            model(ids[:, it], attention_mask=mask[:, :, it, : it.stop], **{CACHE_ARGUMENT: cache}).logits
            for it in PIECES
        ]
        return torch.cat(pieces, dim=1)

    actual, expected = run(PagedCache(model.config, block_size=16)), run(DynamicCache(config=model.config))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    assert not actual.argmax(-1).equal(logits(model, ids, DynamicCache(config=model.config)).argmax(-1))


# Without a cache, and with other tensors


@pytest.mark.parametrize("lengths", [(20,), (20, 7)], ids=str)
@STACKS
def test_without_a_cache_it_is_sdpa(
    windowed: Models, prompts: Prompts, layer_types: list[str], lengths: tuple[int, ...]
) -> None:
    inputs = prompts(*lengths)
    mask = inputs["attention_mask"].bool()
    actual, expected = (
        windowed(layer_types, attention)(**inputs, use_cache=False).logits for attention in ("hf_paged", "sdpa")
    )
    torch.testing.assert_close(actual[mask], expected[mask], rtol=1e-4, atol=1e-4)


def test_packed_sequences_do_not_see_each_other(llama: Models, prompts: Prompts) -> None:
    ids = prompts(20)["input_ids"]
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    actual, expected, unpacked = (
        llama(attention)(ids, position_ids=where, use_cache=False).logits
        for attention, where in [("hf_paged", positions), ("sdpa", positions), ("hf_paged", None)]
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(actual, unpacked)


@pytest.mark.parametrize("lengths", [(20,), (20, 7)], ids=str)
def test_with_the_library_s_own_cache(windowed: Models, prompts: Prompts, lengths: tuple[int, ...]) -> None:
    inputs = prompts(*lengths)
    actual, expected = (
        generate(windowed([SLIDING, FULL], attention), inputs, None, max_new_tokens=20, do_sample=False)
        for attention in ("hf_paged", "eager")
    )
    assert actual.equal(expected)


@pytest.mark.parametrize("queries", [1, 5])
def test_keys_of_another_step_are_read_as_a_tensor(llama: Models, queries: int) -> None:
    module = llama().model.layers[0].self_attn
    paged, sdpa = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME], ALL_ATTENTION_FUNCTIONS["sdpa"]
    cache = PagedCache(llama().config, block_size=16)
    states = torch.randn(1, 2, 30, 8)
    cache.update(states[:, :, :20], states[:, :, :20], 0)
    key, value = cache.update(states[:, :, 20:23], -states[:, :, 20:23], 0)
    cache.update(states[:, :, 23:], states[:, :, 23:], 0)
    query = torch.randn(1, 4, queries, 8)
    mask = torch.rand(1, 1, queries, 23) < 0.7
    mask[..., 0] = True
    actual, _ = paged(module, query, key, value, mask, scaling=0.5)
    expected, _ = sdpa(module, query, key.clone(), value.clone(), mask, scaling=0.5)
    torch.testing.assert_close(actual, expected)


def test_stored_keys_are_read_as_a_tensor(llama: Models) -> None:
    module = llama().model.layers[0].self_attn
    paged, sdpa = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME], ALL_ATTENTION_FUNCTIONS["sdpa"]
    cache = PagedCache(llama().config, block_size=16)
    states = torch.randn(1, 2, 30, 8)
    cache.update(states, -states, 0)
    query = torch.randn(1, 4, 1, 8)
    actual, _ = paged(module, query, cache.layers[0].keys, cache.layers[0].values, None, scaling=0.5)
    expected, _ = sdpa(module, query, states, -states, None, scaling=0.5)
    torch.testing.assert_close(actual, expected)


def test_the_implementation_may_change_in_the_middle_of_a_sequence(windowed: Models, prompts: Prompts) -> None:
    layer_types = [SLIDING, FULL]
    ids = prompts(46)["input_ids"]
    cache = PagedCache(windowed(layer_types).config, block_size=16)
    implementations = ["hf_paged", "eager", "hf_paged", "sdpa", "hf_paged", "eager", "hf_paged"]
    with torch.no_grad():
        pieces = [
            windowed(layer_types, attention)(ids[:, piece], **{CACHE_ARGUMENT: cache}).logits
            for attention, piece in zip(implementations, PIECES, strict=True)
        ]
        expected = windowed(layer_types, "eager")(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-3, atol=1e-3)


def test_an_encoder_decoder_is_switched_after_its_cache_was_made() -> None:
    model = family_called("BART").build("sdpa")
    cache = PagedCache(model.config)
    states = torch.randn(1, 4, 3, 8)
    assert type(cache.update(states, states, 0)[0]) is Tensor
    model.set_attn_implementation(ATTENTION_NAME)
    assert isinstance(cache.update(states, states, 0)[0], LazyKV)


def test_a_loaded_model_is_switched_to_it(llama: Models, prompts: Prompts) -> None:
    model = copy.deepcopy(llama("eager"))
    inputs = prompts(20, 3)
    expected = generate(model, inputs, None, max_new_tokens=10, do_sample=False)
    model.set_attn_implementation(ATTENTION_NAME)
    assert generate(model, inputs, PagedCache(model.config), max_new_tokens=10, do_sample=False).equal(expected)


# Other dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [lambda: LlamaConfig(**SIZES), gemma2, gpt_oss], ids=["Llama", "Gemma 2", "gpt-oss"])
def test_sixteen_bits_stay_as_near_to_fp32_as_the_library_does(
    prompts: Prompts, make: Callable[[], PreTrainedConfig], dtype: torch.dtype
) -> None:
    config, ids = make(), prompts(46)["input_ids"]
    # The weights, rounded to 16 bits, are the same: what differs is the arithmetic.
    exact = logits(build(config, "eager", dtype).float(), ids, DynamicCache(config=config))
    theirs = logits(build(config, "eager", dtype), ids, DynamicCache(config=config)).float()
    for attention in ("eager", "hf_paged"):
        cache = PagedCache(config, block_size=16)
        ours = logits(build(config, attention, dtype), ids, cache).float()
        assert cache.layers[0].keys.dtype == dtype
        assert (ours - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


def test_float64_loses_nothing(prompts: Prompts) -> None:
    config, ids = gemma2(), prompts(46)["input_ids"]
    actual = logits(build(config, "hf_paged", torch.float64), ids, PagedCache(config, block_size=16))
    expected = logits(build(config, "eager", torch.float64), ids, DynamicCache(config=config))
    # The softmax of eager attention is float32 in transformers.
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@ATTENTIONS
def test_autocast_may_mix_dtypes(llama: Models, prompts: Prompts, attention: str) -> None:
    model, ids = llama(attention), prompts(46)["input_ids"]
    exact = logits(llama("sdpa"), ids, DynamicCache(config=model.config))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = logits(model, ids, PagedCache(model.config, block_size=16)).float()
        theirs = logits(llama("sdpa"), ids, DynamicCache(config=model.config)).float()
    assert (ours - exact).square().mean() < 2 * (theirs - exact).square().mean()


# Compilers


@pytest.mark.slow
def test_flex_attention_reads_the_cache(llama: Models, prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention as operator

    # Traced as on an accelerator, but run without inductor, whose code for CPUs does not always compile.
    compiled = torch.compile(operator, backend="eager")
    monkeypatch.setattr(flex_attention, "WrappedFlexAttention", lambda training: lambda: compiled)
    inputs = prompts(20, 5)
    expected = generate(llama("sdpa"), inputs, None, max_new_tokens=6, do_sample=False)
    model = llama("flex_attention")
    assert generate(model, inputs, PagedCache(model.config), max_new_tokens=6, do_sample=False).equal(expected)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "hf_paged"])
def test_a_compiled_model_gives_the_same_answer(llama: Models, prompts: Prompts, attention: str) -> None:
    model = copy.deepcopy(llama(attention))
    inputs = prompts(20, 5)
    expected = generate(model, inputs, None, max_new_tokens=10, do_sample=False)
    model.forward = torch.compile(model.forward, backend="eager")
    assert generate(model, inputs, PagedCache(model.config), max_new_tokens=10, do_sample=False).equal(expected)
