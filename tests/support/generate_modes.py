"""The ways people call `generate`, each as a function of a model, its inputs and a cache.

A mode returns named tensors, so that two caches can be compared: integer tensors must be equal, floating-point ones
close. Whatever is random in a mode is seeded inside it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from tests.support.compat import generate
from tests.support.family_configs import FIRST_WORD, VOCABULARY

Inputs = Mapping[str, Tensor]
Result = dict[str, Tensor]

NEW_TOKENS = 20
TURN_LENGTH = 5
ANSWER_LENGTH = 10
# What an image needs only once: it is in the cache from the second turn on.
FIRST_TURN_ONLY = {
    "pixel_values",
    "image_grid_thw",
    "token_type_ids",
    "mm_token_type_ids",
    "aspect_ratio_ids",
    "aspect_ratio_mask",
    "cross_attention_mask",
}


@dataclass(frozen=True)
class Mode:
    """One way to call `generate`.

    `lengths` are the prompt lengths of its runs with a batch of one row; `batched` says whether it also takes a
    left-padded batch; `eager_only` that transformers offers it under eager attention alone.
    """

    name: str
    run: Callable[[PreTrainedModel, Inputs, Cache | None], Result]
    lengths: tuple[int, ...] = (17,)
    batched: bool = True
    eager_only: bool = False


def assert_same(result: Result, reference: Result, *, codes_may_flip: bool = False) -> None:
    """Fails unless both hold the same tensors: the same integers, and floating-point numbers within 1e-4.

    That is 1e-4 of the largest number of a tensor, if that is more than 1: what is added up to a small one is as large,
    and so are its rounding errors.

    Args:
        codes_may_flip: let 2 % of the floating-point numbers be off by up to 0.01: where a key lies between two
            codes, the last bits decide, and kernels round otherwise than the reference does.
    """
    assert result.keys() == reference.keys()
    for name, tensor in result.items():
        tolerance = 1e-4 if tensor.is_floating_point() else 0
        if codes_may_flip and tolerance:
            difference = (tensor - reference[name]).abs()
            is_off = difference > tolerance * (1 + reference[name].abs())
            if float(is_off.float().mean()) <= 0.02 and float(difference.nan_to_num(0.0).max()) <= 0.01:
                continue
        largest = max(float(reference[name].nan_to_num(0.0, 0.0, 0.0).abs().max()), 1.0) if tolerance else 0.0
        torch.testing.assert_close(
            tensor,
            reference[name],
            rtol=tolerance,
            atol=tolerance * largest,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def prompt_names(model: PreTrainedModel) -> tuple[str, str]:
    """The names of the token ids that `generate` continues, and of their mask."""
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    return prefix + "input_ids", prefix + "attention_mask"


def unprompted(inputs: Inputs) -> Inputs:
    """`inputs` without a decoder prompt, beside which Whisper takes no draft and returns no more than one sequence."""
    return {name: tensor for name, tensor in inputs.items() if not name.startswith("decoder_")}


def whole_sequences(prompt: Tensor, sequences: Tensor) -> Tensor:
    """Prompt and answer, `[batch, prompt + new]`, also where `generate` returns the answer alone (Whisper)."""
    if torch.equal(sequences[:, : prompt.shape[1]], prompt):
        return sequences
    return torch.cat([prompt, sequences], dim=1)


def next_turn(model: PreTrainedModel, inputs: Inputs, sequences: Tensor, seed: int) -> dict[str, Tensor]:
    """The inputs of the turn after `inputs` got `sequences` as answer: all tokens so far and `TURN_LENGTH` new ones."""
    ids_name, mask_name = prompt_names(model)
    history = whole_sequences(inputs[ids_name], sequences)
    generator = torch.Generator().manual_seed(seed)
    message = torch.randint(FIRST_WORD, VOCABULARY, (len(history), TURN_LENGTH), generator=generator)
    ids = torch.cat([history, message], dim=1)
    mask = inputs[mask_name]
    mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)
    rest = {name: tensor for name, tensor in inputs.items() if name not in FIRST_TURN_ONLY}
    return {**rest, ids_name: ids, mask_name: mask}


def answer(model: PreTrainedModel, inputs: Inputs, cache: Cache | None, length: int = NEW_TOKENS) -> Tensor:
    return generate(model, inputs, cache, max_new_tokens=length, do_sample=False)


def second_turn(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> dict[str, Tensor]:
    """Answer a first prompt into `cache` and return the inputs of the turn after it."""
    sequences = answer(model, inputs, cache, ANSWER_LENGTH)
    return next_turn(model, inputs, sequences, seed=1)


def greedy(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    return {"sequences": answer(model, inputs, cache)}


def sample(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    torch.manual_seed(0)
    sequences = generate(
        model,
        unprompted(inputs),
        cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        top_k=0,
        num_return_sequences=2,
    )
    return {"sequences": sequences}


def beams(model: PreTrainedModel, inputs: Inputs, cache: Cache | None, returned: int) -> Result:
    output = generate(
        model,
        inputs,
        cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=4,
        num_return_sequences=returned,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return {
        "sequences": output.sequences,
        "scores": output.sequences_scores,
        "beams": output.beam_indices,
    }


def beam_search(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    return beams(model, inputs, cache, returned=1)


def beam_search_returning_three(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    return beams(model, unprompted(inputs), cache, returned=3)


@lru_cache(maxsize=2)
def draft_of(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """A draft for `model`: a copy whose weights are off by `noise` of their own spread, so that it is right now and
    then."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                spread = noise * parameter.std()
                parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    draft.generation_config.assistant_confidence_threshold = 0.0
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return draft


def assisted(model: PreTrainedModel, inputs: Inputs, cache: Cache | None, noise: float) -> Result:
    sequences = generate(
        model,
        unprompted(inputs),
        cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        assistant_model=draft_of(model, noise),
    )
    return {"sequences": sequences}


def assisted_by_equal_draft(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    return assisted(model, inputs, cache, noise=0.0)


def assisted_by_weak_draft(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    return assisted(model, inputs, cache, noise=0.1)


def prompt_lookup(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    sequences = generate(
        model,
        inputs,
        cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        prompt_lookup_num_tokens=4,
        max_matching_ngram_size=1,
    )
    return {"sequences": sequences}


def chunked_prefill(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    sequences = generate(model, inputs, cache, max_new_tokens=NEW_TOKENS, do_sample=False, prefill_chunk_size=7)
    return {"sequences": sequences}


def warm_all_ids(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    turn = second_turn(model, inputs, cache)
    return {"sequences": answer(model, turn, cache, ANSWER_LENGTH)}


def warm_new_ids(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    turn = second_turn(model, inputs, cache)
    ids_name, _ = prompt_names(model)
    # The last token of an answer is not in the cache yet: nothing followed it.
    turn[ids_name] = turn[ids_name][:, -TURN_LENGTH - 1 :]
    return {"sequences": answer(model, turn, cache, ANSWER_LENGTH)}


def warm_embeddings(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    turn = second_turn(model, inputs, cache)
    ids_name, _ = prompt_names(model)
    embeddings = model.get_input_embeddings()(turn.pop(ids_name)).detach()
    turn[ids_name.replace("input_ids", "inputs_embeds")] = embeddings
    return {"sequences": answer(model, turn, cache, ANSWER_LENGTH)}


def chat(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    answers: Result = {}
    for number in range(3):
        sequences = answer(model, inputs, cache, ANSWER_LENGTH)
        answers[f"sequences {number}"] = sequences
        inputs = next_turn(model, inputs, sequences, seed=number)
    return answers


def scores_and_logits(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    output = generate(
        model,
        inputs,
        cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        repetition_penalty=1.5,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    return {
        "sequences": output.sequences,
        "scores": torch.stack(output.scores),
        "logits": torch.stack(output.logits),
    }


def attention_weights(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    output = generate(
        model,
        inputs,
        cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_attentions=True,
    )
    steps = output.decoder_attentions if model.config.is_encoder_decoder else output.attentions
    result = {"sequences": output.sequences}
    for step, layers in enumerate(steps):
        for layer, weights in enumerate(layers):
            if weights is not None:
                # The last query is a token of every row; earlier ones may be padding, whose weights mean nothing.
                result[f"step {step} layer {layer}"] = weights[:, :, -1]
    return result


class TokenCollector(BaseStreamer):
    """Keeps what is streamed to it."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.flatten())

    def end(self) -> None:
        self.ended = True


def streamed(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    collector = TokenCollector()
    sequences = generate(model, inputs, cache, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=collector)
    return {
        "sequences": sequences,
        "streamed": torch.cat(collector.tokens),
        "ended": torch.tensor(collector.ended),
    }


@lru_cache(maxsize=1)
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the word `w<i>`, but for token 0: transformers tries how tokens look after the text `abcdef`."""
    words = {"abcdef": 0} | {f"w{index}": index for index in range(1, VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="abcdef")))


def stop_strings(model: PreTrainedModel, inputs: Inputs, cache: Cache | None) -> Result:
    sequences = generate(
        model,
        inputs,
        cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        stop_strings=["7"],
        tokenizer=word_tokenizer(),
    )
    return {"sequences": sequences}


MODES = (
    Mode("greedy", greedy, lengths=(1, 15, 16, 17, 40)),
    Mode("sampling", sample),
    Mode("beam search", beam_search, lengths=(17, 40)),
    Mode("beam search, 3 returned", beam_search_returning_three),
    Mode("assisted, equal draft", assisted_by_equal_draft, lengths=(15,), batched=False),
    Mode("assisted, weak draft", assisted_by_weak_draft, lengths=(15, 40), batched=False),
    Mode("prompt lookup", prompt_lookup, lengths=(40,), batched=False),
    Mode("chunked prefill", chunked_prefill, lengths=(40,)),
    Mode("warm cache, all ids", warm_all_ids),
    Mode("warm cache, new ids", warm_new_ids),
    Mode("warm cache, embeddings", warm_embeddings),
    Mode("three-turn chat", chat),
    Mode("scores and logits", scores_and_logits),
    Mode("attention weights", attention_weights, eager_only=True),
    Mode("streamer", streamed),
    Mode("stop strings", stop_strings),
)
