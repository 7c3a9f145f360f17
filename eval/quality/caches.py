"""The caches whose quality is compared."""

from __future__ import annotations

import argparse
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache, cache_utils
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from hf_paged_cache import CODECS, InvalidArgumentError, KVQuant, PagedCache

REFERENCE = "dynamic"


@dataclass(frozen=True)
class CacheKind:
    """A way to store keys and values.

    Attributes:
        name: on the command line.
        label: in tables.
        family: whose it is: what the others are compared with, ours, or transformers' own.
        attn_implementation: what reads it.
        make: a new cache for a model.
        is_exact: whether it gives back what was stored.
    """

    name: str
    label: str
    family: Literal["reference", "paged", "quantized"]
    attn_implementation: str
    make: Callable[[PreTrainedModel], Cache]
    is_exact: bool = False


def _dynamic(model: PreTrainedModel) -> Cache:
    return DynamicCache(config=model.config)


def _paged(kv: str | KVQuant, model: PreTrainedModel) -> Cache:
    return PagedCache(model.config, kv=kv)


def _quantized(backend: str, options: dict[str, int], model: PreTrainedModel) -> Cache:
    return QuantizedCache(backend, model.config, **options)


# By name: the backend, what a table calls it, and options. All group 64 channels of a token; HQQ does so along axis 1.
_QUANTIZED = {
    "quanto4": ("quanto", "quanto, 4 bit", {"nbits": 4}),
    "quanto2": ("quanto", "quanto, 2 bit", {"nbits": 2}),
    "hqq4": ("hqq", "HQQ, 4 bit", {"nbits": 4, "axis_key": 1, "axis_value": 1}),
    "hqq2": ("hqq", "HQQ, 2 bit", {"nbits": 2, "axis_key": 1, "axis_value": 1}),
    "transformers-fp8": ("fp8", "fp8", {}),
}

CACHES: dict[str, CacheKind] = {
    kind.name: kind
    for kind in (
        CacheKind(REFERENCE, "DynamicCache", "reference", "sdpa", _dynamic, is_exact=True),
        *(
            CacheKind(kv, f"PagedCache, {kv}", "paged", "hf_paged", partial(_paged, kv), is_exact=kv == "raw")
            for kv in CODECS
        ),
        *(
            CacheKind(name, f"QuantizedCache ({title})", "quantized", "sdpa", partial(_quantized, backend, options))
            for name, (backend, title, options) in _QUANTIZED.items()
        ),
    )
}


def missing_requirement(kind: CacheKind) -> str | None:
    """Why caches of this kind cannot be made in this environment, or None if they can."""
    backend = _QUANTIZED[kind.name][0] if kind.name in _QUANTIZED else None
    if backend == "quanto" and not is_optimum_quanto_available():
        return "optimum-quanto is not installed (pip install optimum-quanto)"
    if backend == "hqq" and not is_hqq_available():
        return "hqq is not installed (pip install hqq)"
    if backend == "fp8" and not hasattr(cache_utils, "Fp8QuantizedLayer"):
        return "this version of transformers does not have it"
    return None


def detailed_kind(text: str) -> CacheKind:
    """A codec of ours with other details, such as `int4:exact_sinks=0,exact_recent=128`: fields of `KVQuant`."""
    base, _, details = text.partition(":")
    try:
        fields = {name: literal_eval(value) for name, _, value in (item.partition("=") for item in details.split(","))}
        kv = KVQuant(base, **fields)
    except (InvalidArgumentError, SyntaxError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected such as int4:exact_sinks=0,exact_recent=128 ({error})"
        ) from error
    return CacheKind(text, f"PagedCache, {text.replace(',', ', ')}", "paged", "hf_paged", partial(_paged, kv))


def quantized_tokens(cache: Cache) -> int:
    """Tokens that the cache gives back from codes."""
    if isinstance(cache, PagedCache):
        return cache.stats().tokens_quantized
    if not isinstance(cache, QuantizedCache):
        return 0
    layer = cache.layers[0]
    exact = layer.keys.shape[-2] if layer.is_initialized and layer.keys.dim() == 4 else 0
    return layer.get_seq_length() - exact
