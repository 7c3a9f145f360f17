"""Computes a prompt once, for many continuations."""

from typing import Any

import torch

from hf_paged_cache.cache import PagedCache
from hf_paged_cache.errors import CacheStateError, InvalidArgumentError, UnsupportedError
from hf_paged_cache.options import CACHE_ARGUMENT, generate_options

# Inputs with one entry a token in their last dimension.
_PER_TOKEN = (
    "attention_mask",
    "input_ids",
    "mm_token_type_ids",
    "moe_mm_token_type_ids",
    "position_ids",
    "token_type_ids",
)


def prefill(model: Any, cache: PagedCache, **inputs: Any) -> PagedCache:
    """Computes a prompt into `cache`, all but its last token.

    `model.generate(**inputs, past_key_values=cache)` with the same inputs goes on from there. So do forks of the
    cache, also with `num_beams=n` or `num_return_sequences=n` on `cache.fork(n)`: the prompt is then computed and
    stored once. A cache that holds the beginning of the prompt already is continued.

    Args:
        model: a decoder-only model with `generate`.
        cache: a cache made for the model.
        **inputs: what `generate` takes, `input_ids` `[batch, tokens]` or `inputs_embeds` `[batch, tokens, hidden]`
            among them, and options of it such as `prefill_chunk_size`. What chooses tokens (beams, samples, lengths,
            assistants, ..) is left to the call that follows.

    Returns:
        `cache`.

    Raises:
        InvalidArgumentError: there is no prompt, the cache holds as much or more, or `use_cache=False` or another
            cache is asked for.
        UnsupportedError: the model is an encoder-decoder; its prompt is the encoder's.
        CacheStateError: an option of `generate` has computed something else.
    """
    if not isinstance(cache, PagedCache):
        raise InvalidArgumentError(f"prefill fills a PagedCache(model.config), not a {type(cache).__name__}")
    if model.config.is_encoder_decoder:
        raise UnsupportedError(
            "prefill is for decoder-only models: the prompt of an encoder-decoder goes through the encoder, which "
            "`generate` runs once by itself"
        )
    prompt = inputs.get("inputs_embeds", inputs.get("input_ids"))
    if not isinstance(prompt, torch.Tensor) or prompt.ndim < 2:
        raise InvalidArgumentError("prefill needs a prompt: input_ids=[batch, tokens], or inputs_embeds")
    num_tokens, num_cached = prompt.shape[1], cache.get_seq_length()
    if num_cached == num_tokens - 1:
        return cache
    if num_cached >= num_tokens:
        raise InvalidArgumentError(
            f"the prompt has {num_tokens} tokens and the cache holds {num_cached}: pass the whole prompt, which the "
            "cache holds the beginning of, or use a new cache"
        )
    beginning = generate_options(model, inputs).for_prompt()
    for name in _PER_TOKEN:
        if isinstance(inputs.get(name), torch.Tensor) and inputs[name].shape[-1] == num_tokens:
            beginning[name] = inputs[name][..., :-1]
    if "inputs_embeds" in inputs:
        beginning["inputs_embeds"] = inputs["inputs_embeds"][:, :-1]
    # `generate` prepares positions, masks and images as each model wants them; its one token is not cached.
    model.generate(**beginning, **{CACHE_ARGUMENT: cache})
    if cache.get_seq_length() != num_tokens - 1:
        raise CacheStateError(
            f"the cache holds {cache.get_seq_length()} tokens and not {num_tokens - 1}: an option of `generate` has "
            "kept the prompt from being computed once. Pass it to the call that follows only"
        )
    return cache
