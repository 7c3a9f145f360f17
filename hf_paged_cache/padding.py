"""How a cache learns which columns of a batch are padding.

`Cache.update` is not told the attention mask. But before the layers run, transformers sizes its masks by asking the
cache, in `masking_utils._preprocess_mask_arguments`, and there the 2-D mask is at hand.
"""

import sys
from typing import NamedTuple

import numpy as np
import torch

from hf_paged_cache.errors import InvalidArgumentError, other_batch_size
from hf_paged_cache.tables import BlockTable

_MAX_FRAMES = 4  # the cache's own method and `untraced` around it, and that of an `EncoderDecoderCache`


class MaskRequest(NamedTuple):
    """A mask that is about to be built.

    Attributes:
        attention_mask: the 2-D mask, bool `[batch, columns]`; `None` if there is no padding.
    """

    attention_mask: torch.Tensor | None


def current_mask_request() -> MaskRequest | None:
    """The mask for whose sizes the cache is being asked; `None` if the question comes from elsewhere.

    Without it padding is stored like any other token: more memory, the same result.
    """
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name == "_preprocess_mask_arguments":
            attention_mask = frame.f_locals.get("attention_mask")
            is_padding_mask = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2
            if is_padding_mask and attention_mask.dtype != torch.bool:  # a compiled frame may not have converted it yet
                attention_mask = attention_mask.bool()
            return MaskRequest(attention_mask) if attention_mask is None or is_padding_mask else None
        frame = frame.f_back
    return None


class Announcement(NamedTuple):
    """The 2-D attention mask of the forward pass that is about to run.

    Attributes:
        first_column: columns before the pass.
        num_new: columns it adds.
        attention_mask: bool `[batch, first_column + num_new or more]`; `None` for no padding.
    """

    first_column: int
    num_new: int
    attention_mask: torch.Tensor | None

    def was_missed_by(self, num_columns: int, num_new: int) -> bool:
        """Whether a layer with `num_columns` columns, about to be given `num_new`, lacks what came before the pass."""
        return num_columns == 0 and self.first_column > 0 and num_new == self.num_new

    def new_columns(self, table: BlockTable, num_new: int) -> np.ndarray | None:
        """The mask of the new columns, bool `[batch, num_new]`, where `table` has to know it; else `None`.

        Only rows that have no token yet can have leading padding, so decode steps do not look at the mask, which on
        an accelerator would mean to wait for it.
        """
        if self.attention_mask is None or (self.first_column, self.num_new) != (table.num_columns, num_new):
            return None
        if table.num_columns and (table.seq_lens > 0).all():
            return None
        return self.attention_mask[:, self.first_column : self.first_column + num_new].cpu().numpy()


def check_mask(attention_mask: torch.Tensor | None, table: BlockTable, num_new: int) -> None:
    """Checks a 2-D attention mask against what a table holds.

    Raises:
        InvalidArgumentError: it has another batch size, is too short, or lets padding be seen that was not stored.
    """
    num_columns = table.num_columns
    if attention_mask is None:
        if num_columns and table.padding.any():
            raise InvalidArgumentError(
                f"no attention_mask, but the cache was filled with one: {int(table.padding.max())} of its "
                f"{num_columns} columns are padding. Pass the mask of all {num_columns + num_new} columns, ones for "
                "the new tokens"
            )
        return
    if num_columns and attention_mask.shape[0] != table.num_rows:
        raise InvalidArgumentError(other_batch_size(table.num_rows, attention_mask.shape[0], "attention_mask"))
    if attention_mask.shape[1] < num_columns + num_new:
        raise InvalidArgumentError(
            f"attention_mask covers {attention_mask.shape[1]} columns, but the cache holds {num_columns} and "
            f"{num_new} are new: expected {num_columns + num_new}. Pass the mask of the whole sequence"
        )
    if num_columns and table.padding.any() and attention_mask.device.type == "cpu":
        padding = np.arange(num_columns)[None] < table.padding[:, None]
        seen = attention_mask[:, :num_columns].numpy() & padding
        if seen.any():
            raise InvalidArgumentError(
                f"attention_mask shows {int(seen.sum())} columns that were padding when the cache was filled, and so "
                "were not stored. Keep the zeros of the prompt's mask, or start with a new cache"
            )
