"""Prompts of an exact length from real English text that comes with Python."""

from __future__ import annotations

from collections.abc import Sequence
from pydoc_data import topics

import torch
from transformers import PreTrainedTokenizerBase

# Fewer characters than the tokens of most texts need, so that seldom more than one doubling is wasted.
_CHARACTERS_A_TOKEN = 4


def _row(tokenizer: PreTrainedTokenizerBase, text: str, length: int) -> list[int]:
    characters = length * _CHARACTERS_A_TOKEN
    while True:
        # `verbose=False`: cut to `length` below, the text may well be longer than the model's context.
        ids = tokenizer(text[:characters], verbose=False)["input_ids"]
        if len(ids) >= length:
            return ids[:length]
        if characters >= len(text):
            raise ValueError(f"the prompt text gives {len(ids)} tokens, {length} are needed")
        characters *= 2


def text_prompts(tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    """Makes a left-padded batch whose row i holds `lengths[i]` tokens of text, each row from another place.

    Returns:
        `input_ids` and `attention_mask`, int64, `[len(lengths), max(lengths)]`.

    Raises:
        ValueError: if the text is too short for a row.
    """
    text = "\n".join(topics.topics.values())
    longest = max(lengths)
    pad = tokenizer.pad_token_id or 0
    ids = torch.full((len(lengths), longest), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        start = row * len(text) // len(lengths)
        ids[row, longest - length :] = torch.tensor(_row(tokenizer, text[start:] + text[:start], length))
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}
