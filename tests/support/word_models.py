"""Tiny random models that take text: a tokenizer of the words of given texts, or of letters, and a Llama for it."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def word_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A token for each word and sign of the texts, with a chat template."""
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text)})
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte of any text."""
    letters = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def vocabulary_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    """What a model's config says of its tokenizer."""
    end = tokenizer.eos_token_id
    return {"vocab_size": len(tokenizer), "eos_token_id": end, "pad_token_id": end, "bos_token_id": None}


def word_llama(tokenizer: PreTrainedTokenizerFast, **sizes: int) -> LlamaForCausalLM:
    """Two small layers; `sizes` are those of the config that matter to the test."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**vocabulary_ids(tokenizer), num_hidden_layers=2, **small | sizes)).eval()
