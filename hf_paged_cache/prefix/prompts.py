"""A batch of prompts as the tokens of its rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged_cache.errors import InvalidArgumentError
from hf_paged_cache.prefix.extra_keys import Spans


class Prompts(NamedTuple):
    """A batch of prompts.

    Attributes:
        rows: tokens of each row, int64 `[n]`, padding left out.
        padding: int32 `[num_rows]`, leading columns of each row that are not tokens.
        num_columns: columns of the batch.
        why_unknown: why its tokens alone do not tell its keys and values, in words; empty if they do.
        spans: of each row the tokens that stand for something else; `()` where there are none.
    """

    rows: list[np.ndarray]
    padding: np.ndarray
    num_columns: int
    why_unknown: str
    spans: list[Spans]

    @property
    def images(self) -> list[Spans]:
        """The spans of each row that images, or other inputs beside tokens, are put in the place of."""
        return [tuple(span for span in spans if span.is_image) for spans in self.spans]

    @property
    def columns_before_images(self) -> int:
        """Columns before the first image in any row."""
        pads = self.padding.tolist()
        firsts = [pad + spans[0].start for spans, pad in zip(self.images, pads, strict=True) if spans]
        return min(firsts, default=self.num_columns)

    def uncut(self, row: int, num_tokens: int) -> int:
        """The most tokens of a row, up to `num_tokens`, that do not end inside of a span."""
        cut = (span.start for span in self.spans[row] if span.start < num_tokens < span.stop)
        return next(cut, num_tokens)

    def check_cached(self, num_columns: int, why: str) -> None:
        """Raises `InvalidArgumentError` if images that are not given belong to columns that are not cached.

        Args:
            num_columns: columns that are cached.
            why: why it is not more, in words; empty for no reason but that nothing more was cached.
        """
        missing = sum(
            span.stop - span.start
            for spans, pad in zip(self.images, self.padding.tolist(), strict=True)
            for span in spans
            if span.name is not None and pad + span.start >= num_columns
        )
        if missing:
            raise InvalidArgumentError(
                f"{missing} tokens of the prompt stand for images or the like that are not cached under this "
                f"extra_key{f' ({why})' if why else ''}: pass these inputs to `cache_for` and `generate`"
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
        return Prompts(list(ids), np.zeros(len(ids), dtype=np.int32), ids.shape[1], "", [()] * len(ids))
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != input_ids.shape:
        shape = list(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask)
        raise InvalidArgumentError(f"attention_mask is {shape}: expected {list(input_ids.shape)}, as input_ids")
    attended = attention_mask.cpu().numpy().astype(bool)
    padding = np.where(attended.any(axis=1), attended.argmax(axis=1), ids.shape[1]).astype(np.int32)
    is_left_padded = np.array_equal(attended, np.arange(ids.shape[1])[None] >= padding[:, None])
    rows = [tokens[pad:] for tokens, pad in zip(ids, padding.tolist(), strict=True)]
    why = "" if is_left_padded else "the attention mask hides tokens after the first one of a row"
    return Prompts(rows, padding, ids.shape[1], why, [()] * len(rows))


def inferred_mask(input_ids: Any, pads: Sequence[int], ends: Sequence[int]) -> torch.Tensor | None:
    """The attention mask that `generate` takes where it is given none: `None` unless there are pad tokens, and these do
    not end answers too."""
    if not isinstance(input_ids, torch.Tensor) or not pads or {*pads} & {*ends}:
        return None
    mask = torch.isin(input_ids, torch.tensor(pads, device=input_ids.device), invert=True)
    return None if mask.all() else mask.long()
