"""The layers of a `PagedCache`: what transformers sees of one layer."""

from typing import Any, NoReturn

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from hf_paged_cache.codecs import Geometry
from hf_paged_cache.errors import InvalidArgumentError, UnsupportedAccessError, UnsupportedError
from hf_paged_cache.groups import LayerGroup
from hf_paged_cache.hf.lazy import KVSource, LazyKV, has_numbers


class PagedLayer(CacheLayerMixin):
    """Keys and values of a full-attention layer, in blocks.

    Args:
        layer_idx: index of the layer.
        group: the group whose block table the layer shares.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False
    record_past = False

    def __init__(self, layer_idx: int, group: LayerGroup) -> None:
        self.layer_idx = layer_idx
        self.group = group

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_seq_length()} tokens)"

    @property
    def is_initialized(self) -> bool:
        return self.layer_idx in self.group.pool.layers

    @property
    def keys(self) -> LazyKV | None:
        """Keys of the kept columns, `[batch, num_kv_heads, columns, key_dim]`; `None` before the first ones."""
        return self._stored("key")

    @keys.setter
    def keys(self, states: Any) -> NoReturn:
        self._refuse_assignment("keys")

    @property
    def values(self) -> LazyKV | None:
        """Values of the kept columns, `[batch, num_kv_heads, columns, value_dim]`; `None` before the first ones."""
        return self._stored("value")

    @values.setter
    def values(self, states: Any) -> NoReturn:
        self._refuse_assignment("values")

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes the layer's pool for keys and values of that shape, `[batch, num_kv_heads, any, dim]`."""
        with self.group.pool.lock:
            self.group.pool.layer(self.layer_idx, key_states, value_states)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        attended: np.ndarray | None = None,
        pass_number: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new keys and values, and returns all that the layer shows.

        Args:
            key_states: `[batch, num_kv_heads, query_length, key_dim]`
            value_states: `[batch, num_kv_heads, query_length, value_dim]`
            attended: bool `[batch, query_length]`, the attention mask of the new columns; `None` for no padding.
            pass_number: the forward pass, as the cache counts them.

        Returns:
            Keys and values `[batch, num_kv_heads, columns, dim]` as `LazyKV`; as ordinary tensors where gradients
            have to flow to the new ones.

        Raises:
            InvalidArgumentError: shape, dtype or device do not fit what the layer holds.
            OutOfBlocksError: there is no room for them.
        """
        self._check(key_states, value_states)
        group = self.group
        batch, _, num_new, _ = key_states.shape
        if num_new == 0:
            stored = (self.keys, self.values)
            return (key_states, value_states) if None in stored else stored
        first_column = self.get_mask_sizes(num_new)[1]
        with group.pool.lock:
            pool = group.pool.layer(self.layer_idx, key_states, value_states)
            step = group.begin(
                self.layer_idx, batch, num_new, attended, record_past=self.record_past, pass_number=pass_number
            )
            pool.write(key_states, value_states, step)
        group.finish(self.layer_idx)
        source = KVSource(pool, step, group.table, group.table.generation, first_column, group.table.window)
        keys = LazyKV.of(source, "key", key_states)
        values = LazyKV.of(source, "value", value_states)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return keys.with_gradients(), values.with_gradients()
        return keys, values

    def get_seq_length(self) -> int:
        return self.group.length(self.layer_idx)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: torch.LongTensor) -> NoReturn:
        self._refuse("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        self._refuse("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        self._refuse("batch_select_indices")

    def crop(self, tokens_to_remove: int) -> NoReturn:
        self._refuse("crop")

    def reset(self) -> NoReturn:
        self._refuse("reset")

    def offload(self) -> NoReturn:
        raise UnsupportedError("PagedCache does not offload layers; use a smaller block pool (memory=...) instead")

    def prefetch(self) -> NoReturn:
        raise UnsupportedError("PagedCache does not offload layers, so there is nothing to prefetch")

    def _refuse(self, method: str) -> NoReturn:
        raise UnsupportedError(
            f"the layers of a PagedCache share their block table, so `{method}` works on all of them: call "
            f"`cache.{method}(...)` instead of `cache.layers[{self.layer_idx}].{method}(...)`"
        )

    def _refuse_assignment(self, part: str) -> NoReturn:
        raise UnsupportedAccessError(
            f"cache.layers[{self.layer_idx}].{part} cannot be set: keys and values are in blocks, which other rows and "
            "caches may share. For other content take a new PagedCache(model.config) and fill it with "
            "`cache.update(keys, values, layer_idx)`; to remove tokens use `cache.crop(-n)`, to choose rows "
            "`cache.batch_select_indices(rows)`"
        )

    def _check(self, key: torch.Tensor, value: torch.Tensor) -> None:
        pool = self.group.pool.layers.get(self.layer_idx)
        if pool is None or type(key) is not torch.Tensor or type(value) is not torch.Tensor:
            self._check_numbers(key, value)
        if key.ndim != 4 or value.ndim != 4 or key.shape[:3] != value.shape[:3]:
            raise InvalidArgumentError(
                f"layer {self.layer_idx}: keys {tuple(key.shape)} and values {tuple(value.shape)} should both be "
                "[batch, num_kv_heads, tokens, head_dim], with the same batch, heads and tokens"
            )
        if pool is not None and not pool.geometry.fits(key, value):
            raise InvalidArgumentError(
                f"layer {self.layer_idx} of this cache holds {pool.geometry}, but was given "
                f"{Geometry.of(key, value)}. A cache belongs to one model, dtype and device: make a new one with "
                "PagedCache(model.config)"
            )

    def _check_numbers(self, key: torch.Tensor, value: torch.Tensor) -> None:
        if not (has_numbers(key) and has_numbers(value)):
            key_kind, value_kind = (f"{type(states).__name__} on {states.device}" for states in (key, value))
            raise InvalidArgumentError(
                f"layer {self.layer_idx} was given keys that are a {key_kind}, and values that are a {value_kind}: "
                "expected ordinary tensors, whose numbers can be stored. "
                "Pass the local part of a distributed tensor (`.to_local()`); run models without weights (meta, "
                "FakeTensorMode, export) without a PagedCache"
            )

    def _stored(self, part: str) -> LazyKV | None:
        pool, table = self.group.pool.layers.get(self.layer_idx), self.group.table
        if pool is None or self.get_seq_length() == 0:
            return None
        first_column = self.get_mask_sizes(0)[1]
        source = KVSource(pool, self.group.stored(self.layer_idx), table, table.generation, first_column, table.window)
        return LazyKV.of(source, part, None)


class PagedSlidingLayer(PagedLayer):
    """Keys and values of a layer that looks back `sliding_window` tokens, itself included, or attends in chunks.

    Blocks that have left the window go back to the pool.

    Args:
        layer_idx, group: as in `PagedLayer`.
        sliding_window: size of the window or chunk.
    """

    is_sliding = True

    def __init__(self, layer_idx: int, group: LayerGroup, sliding_window: int) -> None:
        super().__init__(layer_idx, group)
        self.sliding_window = sliding_window
        self.record_past = False
        # What iterating over a cache gives for each layer, and `DynamicCache` can be made from.
        self._sliding_window_tensor = torch.tensor(sliding_window, dtype=torch.int64, device="cpu")

    def activate_past_recording(self) -> None:
        """From now on tokens that leave the window are kept until the next `crop`, which may bring them back."""
        self.record_past = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = self.get_seq_length()
        kept = min(length, self.sliding_window - 1)
        return kept + query_length, length - kept

    def get_max_length(self) -> int:
        return self.sliding_window


class LinearAndPagedLayer(LinearAttentionLayer, PagedLayer):
    """A layer with a recurrent or convolutional state, kept by transformers' own class, and full attention."""

    is_compileable = False

    def __init__(self, layer_idx: int, group: LayerGroup, number_of_states: int = 1) -> None:
        PagedLayer.__init__(self, layer_idx, group)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: torch.Tensor, **kwargs: Any) -> None:
        # transformers passes keys and values by position, states by name.
        if args:
            PagedLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    reorder_cache = PagedLayer.reorder_cache
    crop = PagedLayer.crop
    reset = PagedLayer.reset
    offload = PagedLayer.offload
    prefetch = PagedLayer.prefetch
    get_max_length = PagedLayer.get_max_length
    __repr__ = PagedLayer.__repr__


class LinearAndPagedSlidingLayer(LinearAndPagedLayer, PagedSlidingLayer):
    """A layer with a recurrent or convolutional state and sliding attention."""

    def __init__(self, layer_idx: int, group: LayerGroup, sliding_window: int, number_of_states: int = 1) -> None:
        PagedSlidingLayer.__init__(self, layer_idx, group, sliding_window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    get_max_length = PagedSlidingLayer.get_max_length
