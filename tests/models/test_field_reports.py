"""What users of KV caches met elsewhere, replayed here. Each test is named after the report it comes from.

`HF` is huggingface/transformers. Reports whose kind of fault is a subject of its own (windows, padding, rollback,
batch operations, memory) have their tests there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
    T5GemmaConfig,
    T5GemmaModuleConfig,
)

from hf_paged_cache import CacheStateError, InvalidArgumentError, OutOfBlocksError, PagedCache, prefill
from tests.support.combinations import combined, later
from tests.support.compat import CACHE_ARGUMENT, generate
from tests.support.families import family_called as family
from tests.support.families import inputs, randomize
from tests.support.family_configs import FIRST_WORD, IMAGE, PAD, VOCABULARY

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., dict[str, Tensor]]

SLIDING, FULL = "sliding_attention", "full_attention"
ATTENTIONS = pytest.mark.parametrize("attention", ["eager", "sdpa", "hf_paged"])


def new_cache(model: PreTrainedModel, **options: Any) -> PagedCache:
    return PagedCache(model.config, block_size=16, **options)


def answer(model: PreTrainedModel, inputs: dict[str, Tensor], cache: Any, length: int = 16, **options: Any) -> Tensor:
    """The new tokens, `[batch, length]`."""
    return generate(model, inputs, cache, max_new_tokens=length, do_sample=False, **options)[:, -length:]


def answers_alone(model: PreTrainedModel, batch: dict[str, Tensor], length: int = 16) -> Tensor:
    """The new tokens of each row of a left-padded batch, run alone with transformers' own cache."""
    alone = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        row = ids[mask.bool()][None]
        alone.append(answer(model, {"input_ids": row, "attention_mask": torch.ones_like(row)}, None, length))
    return torch.cat(alone)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, cache: DynamicCache, pieces: Sequence[int]) -> Tensor:
    """Logits of all tokens, computed in pieces of these sizes."""
    return torch.cat([model(it, **{CACHE_ARGUMENT: cache}).logits for it in ids.split(list(pieces), dim=1)], dim=1)


# Positions, masks, padding


@pytest.mark.parametrize("attention", ["eager", "hf_paged"])
@pytest.mark.parametrize("name", ["GPT-NeoX", "GPT-2", "Qwen2", "Phi-3"])
def test_unsloth_3795_and_hf_22161_rows_have_positions_of_their_own(name: str, attention: str) -> None:
    model = family(name).build(attention)
    batch = inputs(family(name), [3, 17, 40])
    assert answer(model, batch, new_cache(model), 32).equal(answers_alone(model, batch, 32))


@pytest.mark.parametrize("attention", ["eager", "hf_paged"])
def test_hf_32848_all_rows_of_a_soft_capped_batch_are_right(attention: str) -> None:
    model = family("Gemma 2").build(attention)
    batch = inputs(family("Gemma 2"), [1, 9, 17, 40])
    assert answer(model, batch, new_cache(model)).equal(answers_alone(model, batch))


@ATTENTIONS
def test_hf_34824_rows_with_unequal_counts_of_images(attention: str) -> None:
    model = family("LLaVA").build(attention)
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(FIRST_WORD, VOCABULARY, (2, 9), generator=generator)
    image = torch.full((4,), IMAGE)
    rows = [torch.cat([image, words[0]]), torch.cat([image, words[1, :3], image, words[1]])]
    pixels = torch.randn(3, 3, 8, 8, generator=generator)
    padding = len(rows[1]) - len(rows[0])
    batch = {
        "input_ids": torch.stack([torch.cat([torch.full((padding,), PAD), rows[0]]), rows[1]]),
        "attention_mask": torch.tensor([[0] * padding + [1] * len(rows[0]), [1] * len(rows[1])]),
        "pixel_values": pixels,
    }
    actual = answer(model, batch, new_cache(model))
    for row, its_pixels in enumerate((pixels[:1], pixels[1:])):
        ids = rows[row][None]
        alone = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": its_pixels}
        assert actual[row : row + 1].equal(answer(model, alone, None))


@ATTENTIONS
def test_hf_39814_no_position_is_zero_when_a_cache_goes_on(llama: Models, prompts: Prompts, attention: str) -> None:
    model, ids = llama(attention), prompts(15)["input_ids"]
    cache = new_cache(model)
    with torch.no_grad():
        model(ids[:, :10], **{CACHE_ARGUMENT: cache})
        actual = model(ids[:, 10:], position_ids=torch.arange(10, 15)[None], **{CACHE_ARGUMENT: cache}).logits
        expected = llama("eager")(ids, use_cache=False).logits[:, 10:]
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def chunked_llama4(attention: str) -> PreTrainedModel:
    config = family("Llama 4").config()
    config.attention_chunk_size = 8
    return family("Llama 4").build_from(config, attention)


@ATTENTIONS
def test_hf_40324_chunks_begin_at_the_first_real_token(attention: str) -> None:
    model = chunked_llama4(attention)
    batch = inputs(family("Llama 4"), [5, 21])
    assert answer(model, batch, new_cache(model)).equal(answers_alone(model, batch))


@ATTENTIONS
@pytest.mark.parametrize("length", [1, 7, 8, 9, 17])
def test_hf_37385_chunks_of_attention_and_their_borders(attention: str, length: int) -> None:
    model = chunked_llama4(attention)
    ids = inputs(family("Llama 4"), [length + 12])["input_ids"]
    actual = logits(model, ids, new_cache(model), [length, 1, 1, 7, 1, 1, 1])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("reuses_cache", [True, False], ids=["cache reset", "new cache"])
def test_hf_43952_positions_of_an_image_do_not_outlive_its_call(reuses_cache: bool) -> None:
    model = family("Qwen2-VL").build("hf_paged")
    cache = new_cache(model)
    text = {"input_ids": torch.arange(FIRST_WORD, FIRST_WORD + 20)[None]}
    for call in [inputs(family("Qwen2-VL"), [9]), inputs(family("Qwen2-VL"), [17], seed=1), text]:
        cache.reset()
        cache = cache if reuses_cache else new_cache(model)
        fresh = family("Qwen2-VL").build("hf_paged")
        assert answer(model, call, cache).equal(answer(fresh, call, None))


# Going on


@ATTENTIONS
def test_hf_36151_a_warm_cache_takes_all_ids_or_the_new_ones(llama: Models, prompts: Prompts, attention: str) -> None:
    model, ids = llama(attention), prompts(30)["input_ids"]
    expected = answer(model, {"input_ids": ids}, None)
    mask = torch.ones_like(ids)
    for call in [{"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}]:
        cache = new_cache(model)
        prefill(model, cache, input_ids=ids[:, :21])
        assert answer(model, call, cache).equal(expected)
    cache = new_cache(model)
    prefill(model, cache, input_ids=ids[:, :21])
    assert answer(model, {"input_ids": ids[:, 20:], "attention_mask": mask}, cache).equal(expected)
    cache = prefill(model, new_cache(model), input_ids=ids[:, :21])
    with pytest.raises(InvalidArgumentError, match="mask of the whole sequence"):
        answer(model, {"input_ids": ids[:, 20:]}, cache)  # `generate` takes these for the first ones, and cuts them


def test_qwen3_819_a_prompt_shorter_than_the_cache_is_refused(llama: Models, prompts: Prompts) -> None:
    model, prompt = llama(), prompts(20)
    prompt["attention_mask"][0, 0] = 0  # else `generate` drops the mask
    cache = new_cache(model)
    answer(model, prompt, cache)
    with pytest.raises(CacheStateError, match="the prompt has 20 tokens, but the cache holds 35"):
        answer(model, prompt, cache)


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, PagedCache.fork], ids=["deepcopy", "fork"])
def test_hf_32159_a_prefilled_cache_is_copied_with_and_without_gradients(
    llama: Models, prompts: Prompts, with_gradients: bool, duplicate: Callable[[PagedCache], PagedCache]
) -> None:
    model, ids = llama(), prompts(20)["input_ids"]
    cache = new_cache(model)
    with torch.set_grad_enabled(with_gradients):
        model(ids[:, :19], **{CACHE_ARGUMENT: cache})
    copies = [duplicate(cache), duplicate(cache)]
    answers = [answer(model, {"input_ids": ids}, it) for it in copies]
    assert answers[0].equal(answers[1])
    assert answers[0].equal(answer(model, {"input_ids": ids}, None))


@pytest.mark.parametrize("rows", [[17], [17, 5]], ids=["same batch size", "another batch size"])
@pytest.mark.parametrize("name", ["Jamba", "LFM2", "Falcon-H1", "Qwen3-Next", "Gemma 3n"])
def test_hf_48809_reset_forgets_every_kind_of_state(name: str, rows: list[int]) -> None:
    model = family(name).build("hf_paged")
    cache = new_cache(model)
    answer(model, inputs(family(name), [20]), cache)
    cache.reset()
    assert cache.stats().blocks_used == 0
    prompt = inputs(family(name), rows, seed=1)
    assert answer(model, prompt, cache).equal(answer(model, prompt, new_cache(model)))


@pytest.mark.parametrize("name", ["Jamba", "LFM2", "Falcon-H1"])
def test_hf_48809_a_smaller_batch_follows_one_that_did_not_fit(name: str) -> None:
    model = family(name).build("hf_paged")
    cache = new_cache(model, num_blocks=3)
    with pytest.raises(OutOfBlocksError, match="use a smaller batch"):
        answer(model, inputs(family(name), [20, 20]), cache)
    prompt = inputs(family(name), [20])
    assert answer(model, prompt, cache).equal(answer(model, prompt, new_cache(model)))


def test_discuss_173571_a_cache_kind_in_the_generation_config_is_cleared(llama: Models, prompts: Prompts) -> None:
    model, prompt = copy.deepcopy(llama()), prompts(5)
    model.generation_config.cache_implementation = "static"
    with pytest.raises(ValueError, match="cache_implementation"):
        answer(model, prompt, new_cache(model))
    model.generation_config.cache_implementation = None  # what the README says
    assert answer(model, prompt, new_cache(model)).equal(answer(llama(), prompt, None))


@ATTENTIONS
def test_hf_33852_a_cache_filled_by_hand_is_a_prefix(windowed: Models, prompts: Prompts, attention: str) -> None:
    model, ids = windowed([SLIDING, FULL], attention), prompts(9, 9)["input_ids"]
    virtual = torch.randn(2, 2, 1, 2, 20, 8).expand(-1, -1, 2, -1, -1, -1)  # layers, K and V, rows, ...
    ours, theirs = new_cache(model), DynamicCache(config=model.config)
    for cache in (ours, theirs):
        for layer in range(2):
            cache.update(*virtual[layer], layer)
    call = {"input_ids": ids, "attention_mask": torch.ones(2, 29, dtype=torch.long)}
    assert answer(model, call, ours).equal(answer(model, call, theirs))


def test_hf_27449_beams_compute_and_store_the_prompt_once(llama: Models, prompts: Prompts) -> None:
    model, prompt = llama(), prompts(129)
    computed = []
    handle = model.model.embed_tokens.register_forward_hook(lambda *call: computed.append(call[2].shape[:2].numel()))
    try:
        cache = prefill(model, new_cache(model), **prompt)
        fork = cache.fork(8)
        beams = generate(model, prompt, fork, num_beams=8, do_sample=False, max_new_tokens=5)
    finally:
        handle.remove()
    assert sum(computed) == 128 + 8 * 5
    assert fork.stats().blocks_used <= 8 + 8
    assert beams.equal(generate(model, prompt, None, num_beams=8, do_sample=False, max_new_tokens=5))


def test_vllm_5578_many_samples_of_one_prompt_fit_a_small_pool(llama: Models, prompts: Prompts) -> None:
    model, prompt = llama(), prompts(129)
    options = {"num_return_sequences": 8, "do_sample": True, "max_new_tokens": 8}
    cache = prefill(model, new_cache(model, num_blocks=8 + 8), **prompt)
    torch.manual_seed(0)
    samples = generate(model, prompt, cache.fork(8), **options)
    torch.manual_seed(0)
    assert samples.equal(generate(model, prompt, None, **options))
    with pytest.raises(OutOfBlocksError):
        generate(model, prompt, new_cache(model, num_blocks=8 + 8), **options)


# Kinds of layers


@pytest.mark.parametrize("name", ["Gemma 3n", "Gemma 4"])
def test_hf_45242_layers_that_read_the_keys_of_others_take_no_blocks(name: str) -> None:
    model = family(name).build("hf_paged")
    ids = inputs(family(name), [40])["input_ids"]
    cache = new_cache(model)
    cache.activate_past_recording()
    actual = logits(model, ids, cache, [9, 1, 20, 1, 1, 8])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)

    owners = [layer for layer in cache.layers if getattr(layer, "group", None) and layer.is_initialized]
    assert len(owners) == 3  # of five layers, two share
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([0, 0]))
    again = logits(model, ids[:, 37:].repeat(2, 1), cache, [2, 1])
    torch.testing.assert_close(again, expected[:, 37:].repeat(2, 1, 1), rtol=1e-3, atol=1e-3)
    cache.reset()
    assert cache.stats().blocks_used == 0


def t5gemma(attention: str) -> PreTrainedModel:
    module = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "layer_types": [SLIDING, FULL],
        "attn_logit_softcapping": None,
        "pad_token_id": PAD,
        "bos_token_id": 2,
        "eos_token_id": None,
    }
    config = T5GemmaConfig(encoder=T5GemmaModuleConfig(**module), decoder=T5GemmaModuleConfig(**module))
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention)
    randomize(model)
    return model.eval()


@pytest.mark.parametrize("attention", ["eager", "hf_paged"])
@pytest.mark.parametrize("cross_attention", [True, False])
def test_hf_41890_the_keys_of_an_encoder_are_not_cut_to_a_window(
    prompts: Prompts, attention: str, cross_attention: bool
) -> None:
    model = t5gemma(attention)
    call = {**prompts(30), "decoder_input_ids": torch.full((1, 1), 2)}
    expected = answer(model, call, None, use_cache=False)
    # The model puts a cache without windows in the place of the second one.
    cache = EncoderDecoderCache(new_cache(model), new_cache(model, cross_attention=cross_attention))
    assert answer(model, call, cache).equal(expected)
    assert isinstance(cache.cross_attention_cache, PagedCache)
    assert cache.cross_attention_cache.get_seq_length() == 30


@pytest.mark.parametrize("name", ["Qwen3-Next", "Bamba", "Jamba", "Falcon-H1", "LFM2"])
def test_hf_45513_recurrent_layers_take_more_than_one_token_at_a_time(name: str) -> None:
    model = family(name).build("hf_paged")
    ids = inputs(family(name), [20])["input_ids"]
    actual = logits(model, ids, new_cache(model), [7, 5, 1, 1, 6])
    expected = logits(model, ids, DynamicCache(config=model.config), [7, 5, 1, 1, 6])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Jamba", "LFM2", "Falcon-H1"])
def test_hf_46612_beams_move_recurrent_states_too(name: str) -> None:
    model = family(name).build("hf_paged")
    prompt = inputs(family(name), [9])
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 12, "do_sample": False}
    expected = generate(model, prompt, None, **options, use_cache=False)
    assert generate(model, prompt, new_cache(model), **options).equal(expected)


def test_hf_47761_latent_attention_stores_latents(prompts: Prompts) -> None:
    model = family("DeepSeek V3").build("hf_paged")
    cache = new_cache(model)
    with torch.no_grad():
        model(prompts(16)["input_ids"], **{CACHE_ARGUMENT: cache})
    config = model.config
    values = config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
    assert cache.stats().bytes_used == 16 * values * 4


@combined(
    layer_types={"-".join(types): types for types in ([FULL, FULL], [SLIDING, FULL])},
    draft=["right", "wrong", "lookup"],
    length=[8, 40, *later(3, 7, 9, 15, 16)],
)
def test_hf_46629_drafts_across_blocks_and_windows(
    windowed: Models, llama: Models, prompts: Prompts, layer_types: list[str], draft: str, length: int
) -> None:
    model, prompt = windowed(layer_types, window=8), prompts(length)
    # Transformers below 5.24 cannot run a windowed draft.
    assistant = copy.deepcopy(windowed([FULL, FULL]) if draft == "right" else llama())
    assistant.generation_config.assistant_confidence_threshold = 0.0
    options = {"prompt_lookup_num_tokens": 3} if draft == "lookup" else {"assistant_model": assistant}
    expected = answer(model, prompt, None, 24)
    assert generate(model, prompt, new_cache(model), max_new_tokens=24, do_sample=False, **options)[:, length:].equal(
        expected
    )


# The model around the cache


def test_hf_42586_a_model_in_training_generates(windowed: Models, prompts: Prompts) -> None:
    model = copy.deepcopy(windowed([SLIDING, FULL])).train()
    for seed in range(2):
        prompt = prompts(20, seed=seed)
        assert answer(model, prompt, new_cache(model)).equal(answer(windowed([SLIDING, FULL]), prompt, None))


@pytest.mark.parametrize("reentrant", [True, False])
def test_hf_46572_checkpointing_never_writes_twice(llama: Models, prompts: Prompts, reentrant: bool) -> None:
    model = copy.deepcopy(llama()).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    cache, ids = new_cache(model), prompts(20)["input_ids"]
    model(ids, labels=ids, **{CACHE_ARGUMENT: cache}).loss.backward()
    assert cache.get_seq_length() in (0, 20)


def test_hf_45943_an_error_inside_generate_leaves_the_model_as_it_was(llama: Models, prompts: Prompts) -> None:
    model, ids = copy.deepcopy(llama()), prompts(20)["input_ids"]
    expected = model(ids, labels=ids).loss
    with pytest.raises(OutOfBlocksError):
        answer(model, {"input_ids": ids}, new_cache(model, num_blocks=2), 40)
    assert model.config._attn_implementation == "hf_paged"
    assert model(ids, labels=ids).loss.equal(expected)
