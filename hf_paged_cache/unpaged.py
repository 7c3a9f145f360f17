"""What the layers of a cache keep outside blocks: recurrent states, and kinds of layers that are not paged."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from hf_paged_cache.layers import PagedLayer


def reorder(layers: Sequence[Any], rows: torch.Tensor) -> None:
    """Replaces the rows by `rows`, int64 `[batch]`."""
    for layer in _unpaged(layers):
        _part(layer).reorder_cache(layer, rows)


def repeat(layers: Sequence[Any], repeats: int) -> None:
    """Lets every row stand `repeats` times in a row."""
    for layer in _unpaged(layers):
        num_rows = _num_rows(layer)
        if num_rows and repeats > 1:
            _part(layer).reorder_cache(layer, torch.arange(num_rows, device="cpu").repeat_interleave(repeats))


def crop(layers: Sequence[Any], tokens_to_remove: int) -> None:
    """Removes the last tokens of every row; `tokens_to_remove` is minus their number."""
    for layer in _unpaged(layers):
        _part(layer).crop(layer, tokens_to_remove)


def reset(layers: Sequence[Any]) -> None:
    """Forgets everything. Recurrent states are dropped: zeroed, as transformers does it, they would keep their rows."""
    for layer in _unpaged(layers):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.reset()
            continue
        record_past = layer.record_past
        LinearAttentionCacheLayerMixin.__init__(layer, number_of_states=layer.number_of_states)
        layer.record_past = record_past


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
