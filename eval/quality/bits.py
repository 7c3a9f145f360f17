"""Bits that a cache takes for each number of keys and values, in a model with 16-bit numbers.

The quality may have been measured with wider ones, and exact tokens and some scales are then wider too. So here caches
are filled with random keys and values in bfloat16, in the model's shapes but without the model, and their bytes read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from eval.common.memory import cache_bytes
from eval.quality.caches import CACHES, REFERENCE, CacheKind
from eval.quality.reader import Reader, kept_attention

# Layers with a window are full after it, no block of ours is partly filled, and QuantizedCache keeps no token exact.
PASS, PASSES = 512, 2


class BitCounter:
    """Counts for the layers of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._added: dict[CacheKind, float | None] = {}
        with kept_attention(model):
            reader = Reader(model, CACHES[REFERENCE])
            reader.skim(torch.zeros(1, 1, dtype=torch.long, device=model.device), 1)
        self._shapes = {
            index: (layer.keys.shape, layer.values.shape) for index, layer in _layers_with_keys(reader.cache)
        }

    def stored(self, kind: CacheKind, lengths: Sequence[int]) -> float:
        """Bits for each number after passes of these lengths, exact tokens and partly filled blocks included."""
        ((num_bytes, num_numbers),) = self._sizes(kind, [lengths])
        return 8 * num_bytes / num_numbers

    def added(self, kind: CacheKind) -> float | None:
        """Bits for each further number once the cache is long, in layers that keep all tokens: codes, scales and
        zeros, since the first and the newest tokens, which may be exact, do not become more. None if nothing grows."""
        if kind not in self._added:
            self._added[kind] = self._count_added(kind)
        return self._added[kind]

    def _count_added(self, kind: CacheKind) -> float | None:
        (bytes_before, numbers_before), (num_bytes, num_numbers) = self._sizes(kind, [[PASS] * PASSES] * 2)
        if num_numbers == numbers_before:
            return None
        return 8 * (num_bytes - bytes_before) / (num_numbers - numbers_before)

    @torch.no_grad()
    def _sizes(self, kind: CacheKind, stages: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Bytes of a cache and numbers that the reference holds, after each stage of passes of these lengths."""
        sizes = []
        with kept_attention(self._model):
            self._model.set_attn_implementation(kind.attn_implementation)
            cache, reference = kind.make(self._model), CACHES[REFERENCE].make(self._model)
            for lengths in stages:
                for length in lengths:
                    self._update([cache, reference], length)
                numbers = sum(layer.keys.numel() + layer.values.numel() for _, layer in _layers_with_keys(reference))
                sizes.append((cache_bytes(cache).used, numbers))
        return sizes

    def _update(self, caches: Sequence[Cache], length: int) -> None:
        for index, shapes in self._shapes.items():
            key, value = (
                torch.randn(1, heads, length, dim, dtype=torch.bfloat16, device=self._model.device)
                for _, heads, _, dim in shapes
            )
            for cache in caches:
                cache.update(key, value, index)


def _layers_with_keys(cache: Cache) -> list[tuple[int, Any]]:
    return [(index, layer) for index, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None]
