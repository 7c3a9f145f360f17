"""Which columns of a batch are padding, and whether masks and positions fit what the cache holds."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged_cache.blocks.tables import BlockTable
from hf_paged_cache.errors import CacheStateError, InvalidArgumentError, other_batch_size
from hf_paged_cache.hf.lazy import has_numbers
from hf_paged_cache.hf.mask_request import MaskRequest, prompt_without_new_tokens

_WITHOUT_CACHE = "Under use_cache=False, which computes everything again at every step, pass no cache"


class PendingMask(NamedTuple):
    """The 2-D attention mask of the forward pass that is running.

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


def check_request(request: MaskRequest, tables: Sequence[BlockTable], num_columns: int, cache: Any) -> None:
    """Checks what a forward pass builds its masks from against a cache of `num_columns` columns.

    Raises:
        InvalidArgumentError: there is nothing new, or mask or positions do not fit the tables.
        CacheStateError: the cache holds other tokens than those before the new ones, as far as that can be told.
    """
    num_new, attention_mask, position_ids, _ = request
    if num_new == 0:
        raise InvalidArgumentError(
            f"no new tokens: the cache holds {num_columns} columns, and the input has none after them. "
            "Pass the ids of the whole sequence, or the new ones with the attention_mask of the whole sequence; "
            "for another prompt take a new cache, or `reset()` this one"
        )
    try:
        for table in tables:
            check_mask(attention_mask, table, num_new)
    except InvalidArgumentError:
        _check_prompt(request, num_columns, cache)  # the reason, if the prompt has been cut the wrong way round
        raise
    if position_ids is not None and _is_readable(position_ids, num_new):
        check_positions(request, num_columns, tables[0].padding if tables and num_columns else None)
    elif num_columns:
        _check_prompt(request, num_columns, cache)


def check_mask(attention_mask: torch.Tensor | None, table: BlockTable, num_new: int) -> None:
    """Checks a 2-D attention mask against what a table holds.

    What a mask shows is looked at on the CPU, and elsewhere in passes of several tokens: a step would have to wait for
    the device. There `LazyMask.key_mask` looks at it, which fetches the mask in any case.

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
        hint = f". {_WITHOUT_CACHE}" if attention_mask.shape[1] == num_new else ""
        raise InvalidArgumentError(
            f"attention_mask covers {attention_mask.shape[1]} columns, but the cache holds {num_columns} and "
            f"{num_new} are new: expected {num_columns + num_new}. Pass the mask of the whole sequence{hint}"
        )
    if num_columns and table.padding.any() and _is_readable(attention_mask, num_new):
        padding = np.arange(num_columns)[None] < table.padding[:, None]
        seen = attention_mask[:, :num_columns].cpu().numpy() & padding
        if seen.any():
            raise InvalidArgumentError(
                f"attention_mask shows {int(seen.sum())} columns that were padding when the cache was filled, and so "
                "were not stored. Keep the zeros of the prompt's mask, or start with a new cache"
            )


def check_positions(request: MaskRequest, num_columns: int, padding: np.ndarray | None) -> None:
    """Checks that every new token stands behind the tokens that it follows, in the cache and in the pass.

    A position may be larger than the number of tokens before it: where padding is counted, or tokens were left out.
    Rows with padding behind cached tokens are not judged: transformers counts their positions from that padding on.

    Args:
        request: the pass, with positions.
        num_columns: columns of the cache.
        padding: int32 `[batch]`, leading columns of them that are not tokens; `None` for an empty cache.

    Raises:
        CacheStateError: the cache holds other tokens than those before the new ones.
        InvalidArgumentError: positions begin anew in the middle of a row.
    """
    num_new, attention_mask, position_ids, _ = request
    if position_ids.shape[1] != num_new:
        if position_ids.shape[1] == 0:  # a prompt's chunks, behind all of its positions
            raise _stale_cache(f"no positions are left for {num_new} new tokens", num_columns)
        return
    positions = position_ids.cpu().numpy()
    is_step = num_new == 1 and padding is not None and len(positions) in (1, len(padding))
    if is_step and (positions[:, 0] >= num_columns - padding).all():  # right, without a look at the mask
        return
    if attention_mask is None:
        num_before = np.arange(num_columns, num_columns + num_new)[None]
        is_early = positions < num_before
    else:
        attended = attention_mask[:, : num_columns + num_new].cpu().numpy()
        cached, new = attended[:, :num_columns], attended[:, num_columns:]
        if len(positions) not in (1, len(new)):
            return
        num_before = cached.sum(axis=1, keepdims=True) + np.cumsum(new, axis=1) - 1
        is_right_padded = (cached & ~attended[:, 1 : num_columns + 1]).any(axis=1, keepdims=True)
        is_early = (positions < num_before) & new & ~is_right_padded
    if not is_early.any() or not request.has_positions_of_the_caller:
        return
    row, column = (int(index) for index in np.argwhere(is_early)[0])
    expected = int(np.broadcast_to(num_before, is_early.shape)[row, column])
    position = int(np.broadcast_to(positions, is_early.shape)[row, column])
    is_first = column == 0 or (attention_mask is not None and not new[row, :column].any())
    if is_first and num_columns:
        raise _stale_cache(f"the first new token of row {row} has position {position}", expected)
    raise InvalidArgumentError(
        f"position_ids of row {row} begin anew at new column {column}: position {position} after {expected} tokens. "
        "With a cache the sequences packed into a row would see each other. Pass them as rows of a batch, or without a "
        "cache, use_cache=False"
    )


def _check_prompt(request: MaskRequest, num_columns: int, cache: Any) -> None:
    """Raises `CacheStateError` if the pass computes a prompt that has no token behind the cached ones."""
    num_tokens = prompt_without_new_tokens(request, cache)
    if num_tokens is not None:
        raise _stale_cache(f"the prompt has {num_tokens} tokens", num_columns)


def _stale_cache(what: str, num_tokens: int) -> CacheStateError:
    """The error for an input that does not go on from the cached tokens; `what` says how that shows."""
    return CacheStateError(
        f"{what}, but the cache holds {num_tokens} tokens before it: the input does not go on from them. Pass the ids "
        "of the whole sequence, of which the cache holds the beginning, or the new ids with the attention_mask of the "
        f"whole sequence. For another prompt take a new cache, or `reset()` this one. {_WITHOUT_CACHE}"
    )


def _is_readable(tensor: torch.Tensor, num_new: int) -> bool:
    """Whether a mask or positions may be looked at: in decode steps an accelerator would have to be waited for."""
    return (num_new > 1 or tensor.device.type == "cpu") and has_numbers(tensor)
