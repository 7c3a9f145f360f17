"""A batch of prompts as the tokens of its rows."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged_cache.errors import InvalidArgumentError


class Prompts(NamedTuple):
    """A batch of prompts.

    Attributes:
        rows: tokens of each row, int64 `[n]`, padding left out.
        padding: int32 `[num_rows]`, leading columns of each row that are not tokens.
        num_columns: columns of the batch.
        why_unknown: why nothing can be known of it from its tokens alone, in words; empty if it can.
    """

    rows: list[np.ndarray]
    padding: np.ndarray
    num_columns: int
    why_unknown: str

    def check_known(self, num_columns: int, placeholders: Sequence[int]) -> None:
        """Raises `InvalidArgumentError` if inputs beside tokens belong to a part of the prompts that is not known.

        Args:
            num_columns: columns that are known.
            placeholders: tokens that stand for such inputs.
        """
        missing = sum(
            int(np.isin(tokens[max(num_columns - pad, 0) :], placeholders).sum())
            for tokens, pad in zip(self.rows, self.padding.tolist(), strict=True)
        )
        if missing:
            raise InvalidArgumentError(
                f"{missing} tokens of the prompt stand for images or the like that are not known under this "
                "content_key: pass these inputs to `cache_for` and `generate`"
            )


def read_prompts(input_ids: Any, attention_mask: Any) -> Prompts:
    """The rows of `input_ids` `[num_rows, num_columns]` under an attention mask of that shape, or none.

    Raises:
        InvalidArgumentError: they are something else.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        what = f"{input_ids.dtype} {list(input_ids.shape)}" if isinstance(input_ids, torch.Tensor) else input_ids
        raise InvalidArgumentError(f"input_ids: expected token ids [batch, tokens] as a tensor, not {what}")
    if not input_ids.numel():
        raise InvalidArgumentError(f"input_ids {list(input_ids.shape)}: expected at least one token")
    ids = input_ids.cpu().numpy().astype(np.int64)
    if attention_mask is None:
        return Prompts(list(ids), np.zeros(len(ids), dtype=np.int32), ids.shape[1], "")
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != input_ids.shape:
        shape = list(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask)
        raise InvalidArgumentError(f"attention_mask is {shape}: expected {list(input_ids.shape)}, as input_ids")
    attended = attention_mask.cpu().numpy().astype(bool)
    padding = np.where(attended.any(axis=1), attended.argmax(axis=1), ids.shape[1]).astype(np.int32)
    is_left_padded = np.array_equal(attended, np.arange(ids.shape[1])[None] >= padding[:, None])
    rows = [tokens[pad:] for tokens, pad in zip(ids, padding.tolist(), strict=True)]
    why = "" if is_left_padded else "the attention mask hides tokens after the first one of a row"
    return Prompts(rows, padding, ids.shape[1], why)


def ends_and_pads(generation_config: Any, options: Mapping[str, Any]) -> list[list[int]]:
    """The tokens that end an answer, and those that fill rows up, as `generate` has them with these options."""
    config = options.get("generation_config") or generation_config
    tokens = [options.get(name, getattr(config, name, None)) for name in ("eos_token_id", "pad_token_id")]
    return [[] if token is None else token if isinstance(token, list) else [token] for token in tokens]


def inferred_mask(input_ids: Any, pads: Sequence[int], ends: Sequence[int]) -> torch.Tensor | None:
    """The attention mask that `generate` takes where it is given none: `None` unless there are pad tokens, and these do
    not end answers too."""
    if not isinstance(input_ids, torch.Tensor) or not pads or {*pads} & {*ends}:
        return None
    mask = torch.isin(input_ids, torch.tensor(pads, device=input_ids.device), invert=True)
    return None if mask.all() else mask.long()


def inputs_beside_tokens(inputs: Mapping[str, Any]) -> list[str]:
    """The names of inputs that keys and values depend on beside tokens: images, embeddings, positions of one's own,
    adapters chosen for each row."""
    return sorted(
        name
        for name, value in inputs.items()
        if (name == "adapter_names" and value is not None)
        or (_holds_arrays(value) and not (name == "token_type_ids" and not torch.as_tensor(value, device="cpu").any()))
    )


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_arrays, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_arrays, value))
    return isinstance(value, torch.Tensor | np.ndarray)
