"""What the layers of a cache keep outside blocks: recurrent states, and kinds of layers that are not paged.

Their own methods change them one by one, so they are called on copies, and what came out becomes a `Change`.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from hf_paged_cache.hf.layers import PagedLayer
from hf_paged_cache.ledger import Change


def reordered(layers: Sequence[Any], rows: torch.Tensor) -> list[Change]:
    """What replaces the rows by `rows`, int64 `[batch]`."""
    return [_after(layer, lambda part, copied: part.reorder_cache(copied, rows)) for layer in _unpaged(layers)]


def repeated(layers: Sequence[Any], repeats: int) -> list[Change]:
    """What lets every row stand `repeats` times in a row."""
    changes = []
    for layer in _unpaged(layers):
        num_rows = _num_rows(layer)
        if num_rows and repeats > 1:
            rows = torch.arange(num_rows, device="cpu").repeat_interleave(repeats)
            changes.append(_after(layer, lambda part, copied, rows=rows: part.reorder_cache(copied, rows)))
    return changes


def cropped(layers: Sequence[Any], tokens_to_remove: int) -> list[Change]:
    """What removes the last tokens of every row; `tokens_to_remove` is minus their number."""
    return [_after(layer, lambda part, copied: part.crop(copied, tokens_to_remove)) for layer in _unpaged(layers)]


def emptied(layers: Sequence[Any]) -> list[Change]:
    """What forgets everything. Recurrent states are dropped: zeroed, as transformers does it, they would keep their
    rows."""
    return [_after(layer, _empty) for layer in _unpaged(layers)]


def _empty(part: type, copied: Any) -> None:
    if not isinstance(copied, LinearAttentionCacheLayerMixin):
        # The layer's own method zeroes its tensors where they are, which the original shares.
        for name, value in vars(copied).items():
            if isinstance(value, torch.Tensor):
                setattr(copied, name, value.clone())
        copied.reset()
        return
    record_past = copied.record_past
    LinearAttentionCacheLayerMixin.__init__(copied, number_of_states=copied.number_of_states)
    copied.record_past = record_past


def _after(layer: Any, operation: Callable[[type, Any], None]) -> Change:
    """What `operation` does to a layer, tried on a copy of it."""
    copied = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict | list):
            setattr(copied, name, copy.copy(value))
    operation(_part(layer), copied)
    return Change(layer, vars(copied))


def have_states(layers: Sequence[Any]) -> bool:
    """Whether some layer holds recurrent states."""
    return any(
        isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.has_previous_state.values()) for layer in layers
    )


def _unpaged(layers: Sequence[Any]) -> Iterator[Any]:
    for layer in layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin) or not isinstance(layer, PagedLayer):
            yield layer


def _part(layer: Any) -> type:
    """The class whose methods treat the part of a layer that is not paged."""
    return LinearAttentionLayer if isinstance(layer, LinearAttentionCacheLayerMixin) else type(layer)


def _num_rows(layer: Any) -> int:
    """Rows of the part of a layer that is not paged; 0 if it holds nothing."""
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    if not isinstance(layer, PagedLayer):
        states.append(getattr(layer, "keys", None))
    return next((state.shape[0] for state in states if state is not None), 0)
