"""The model that `generate` is measured with."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from eval.card.settings import Settings
from hf_paged_cache.demo import small_models


def load(settings: Settings, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The chosen model, or random weights in a real model's shape, and a tokenizer.

    Times depend on the shape only; the tokens of random weights mean nothing.

    Raises:
        ModelError: there is no such model.
    """
    if settings.model is not None:
        return small_models.load(settings.model, "sdpa")
    tokenizer = _byte_tokenizer()
    config = LlamaConfig(**{"vocab_size": len(tokenizer)} | settings.random_model, pad_token_id=0)
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa")
    return model.eval(), tokenizer


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte of any text."""
    letters = ["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
