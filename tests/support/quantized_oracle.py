"""A cache that shows tokens as quantized blocks have to read, without any blocks: keys and values in plain tensors.

What has been quantized is replaced where it stands by what its codes say, computed by the definition in float64. Which
tokens that are follows from the length of the row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_paged_cache import KVQuant
from tests.kernels.definition import block_keys, block_values, rotated, single, token_wise, with_offset

Rounding = Callable[[np.ndarray], np.ndarray]
KeyRounding = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Quantization:
    """What one layer does to blocks of keys and values.

    Attributes:
        key: what the keys `[..., block_size, dim]` of some blocks read as, given the first key `[..., 1, dim]` of the
            block that is the unit of memory.
        value: what values `[..., block_size, dim]` read as.
        memory_block_size: tokens of that block.
        block_size: tokens that are quantized together.
        exact_recent: newest tokens that stay exact, at least.
        sink: first tokens that stay exact, rounded up to blocks.
    """

    key: KeyRounding
    value: Rounding
    memory_block_size: int
    block_size: int = 1
    exact_recent: int = 0
    sink: int = 0


def quantization(kv: KVQuant, block_size: int) -> Quantization:
    """What a codec does; `"int8"` and `"fp8"` quantize each token by itself, but for the offset of a block's keys."""
    quant = kv.filled()
    if quant.is_token_wise:
        value = partial(token_wise, name=quant.base)
        key = partial(with_offset, name=quant.base) if quant.key_offset else without_first_key(value)
    else:
        key, value = without_first_key(partial(block_keys, quant=quant)), partial(block_values, quant=quant)
    key = rotating(key) if quant.rotate_keys else key
    value = rotating(value) if quant.rotate_values else value
    if quant.is_token_wise:
        return Quantization(key, value, block_size)
    return Quantization(key, value, block_size, block_size, quant.exact_recent, quant.exact_sinks)


def without_first_key(rounding: Rounding) -> KeyRounding:
    return lambda keys, first_key: rounding(keys)


def rotating(rounding: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda *states: rotated(rounding(*(single(rotated(each)) for each in states)))


class OracleLayer(DynamicLayer):
    """Keys and values of all tokens, the quantized ones as they read.

    Args:
        how: what is done to them; `None` for nothing.
        padding: leading columns of each row that are not tokens; may be repeated for beams.
        window: tokens that the layer looks back, the current one included.
    """

    def __init__(self, how: Quantization | None, padding: Sequence[int], window: int | None) -> None:
        super().__init__()
        self.how = how
        self.padding = np.array(padding)
        self.is_sliding = window is not None
        self.sliding_window = window
        self.quantized: list[set[int]] = []  # blocks, for each row
        self.first_keys: list[dict[int, np.ndarray]] = []  # of blocks of memory, exact, for each row

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.quantized:
            self.quantized = [set() for _ in key_states]
            self.first_keys = [{} for _ in key_states]
            self.padding = self.padding.repeat(len(key_states) // len(self.padding))
        num_old = self.get_seq_length()
        first_column = self.get_mask_sizes(0)[1]
        self._quantize(0)  # what earlier passes have filled
        shown = super().update(key_states, value_states)
        self.keys, self.values = (states.clone() for states in shown)  # new tokens are seen exactly, this once
        self._quantize(num_old)
        return shown[0][:, :, first_column:], shown[1][:, :, first_column:]

    def _quantize(self, first_column: int) -> None:
        """Replaces the blocks that begin at or after a column and that the newest tokens have moved on from."""
        if self.how is None or not self.is_initialized:
            return
        size, length = self.how.block_size, self.get_seq_length()
        for row, done in enumerate(self.quantized):
            padding = int(self.padding[row])
            begin = max(-(-self.how.sink // size), -(-max(first_column - padding, 0) // size))
            end = (length - padding - self.how.exact_recent) // size
            for block in sorted(set(range(begin, end)) - done):
                columns = slice(padding + block * size, padding + (block + 1) * size)
                keys, values = (states[row, :, columns].float().double().numpy() for states in (self.keys, self.values))
                memory_block, place = divmod(block * size, self.how.memory_block_size)
                if place == 0:
                    self.first_keys[row][memory_block] = keys[:, :1]
                read = self.how.key(keys, self.first_keys[row][memory_block]), self.how.value(values)
                for states, rounded in zip((self.keys, self.values), read, strict=True):
                    states[row, :, columns] = torch.from_numpy(rounded).to(states.dtype)
                done.add(block)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = self.get_seq_length()
        kept = length if self.sliding_window is None else min(length, self.sliding_window - 1)
        return kept + query_length, length - kept

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(int(tokens_to_remove))
        if self.how is not None and self.quantized:
            whole = (self.get_seq_length() - self.padding) // self.how.block_size
            self.quantized = [{b for b in done if b < end} for done, end in zip(self.quantized, whole, strict=True)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._select(np.arange(len(self.quantized)).repeat(repeats).tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select(torch.arange(len(self.quantized))[indices].tolist())

    def activate_past_recording(self) -> None:
        """All of the past is there anyway."""

    def _select(self, rows: Sequence[int]) -> None:
        if self.quantized:
            self.quantized = [set(self.quantized[row]) for row in rows]
            self.first_keys = [dict(self.first_keys[row]) for row in rows]
            self.padding = self.padding[rows]


class QuantizedOracle(DynamicCache):
    """`DynamicCache` with oracle layers; recurrent ones stay transformers' own.

    Args:
        config: the model's config.
        how: what a layer does, by its index and whether it has a window; `None` for nothing.
        padding: leading columns of each row that are not tokens.
    """

    def __init__(
        self, config: PreTrainedConfig, how: Callable[[int, bool], Quantization | None], padding: Sequence[int]
    ) -> None:
        super().__init__(config=config)
        for layer_idx, layer in enumerate(self.layers):
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
                window = getattr(layer, "sliding_window", None)
                self.layers[layer_idx] = OracleLayer(how(layer_idx, window is not None), padding, window)
