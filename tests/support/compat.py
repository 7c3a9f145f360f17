"""The one name that differs between the oldest and the newest supported transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import Cache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from hf_paged_cache.prefill import CACHE_ARGUMENT


def generate(model: PreTrainedModel, inputs: Mapping[str, Tensor], cache: Cache | None, **options: Any) -> Any:
    """`model.generate` with `cache` under the name that the installed transformers gives it."""
    given = {} if cache is None else {CACHE_ARGUMENT: cache}
    return model.generate(**inputs, **given, **options)


def new_cache(model: PreTrainedModel, build: Callable[[PreTrainedConfig], Cache]) -> Cache:
    """A cache for `model`: `build(config)`, or an `EncoderDecoderCache` of two for an encoder-decoder."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(build(model.config), build(model.config))
    return build(model.config)
