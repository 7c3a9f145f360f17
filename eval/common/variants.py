"""The caches that are compared, and the state a model is put in while one of them is measured."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, QuantizedCache
from transformers.utils import is_optimum_quanto_available

from hf_paged_cache import PagedCache, prefill

BASELINE = "dynamic"

Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """A cache together with the attention implementation it runs under.

    `make(model, inputs, beams)` returns the cache to hand to `generate` with these inputs; its time belongs to the
    call. `lossy` says that other tokens than those of `DynamicCache` are expected.
    """

    name: str
    cache: str
    attn_implementation: str
    make: Callable[[PreTrainedModel, Inputs, int], Cache]
    lossy: bool = False

    @property
    def label(self) -> str:
        return f"{self.cache}, {self.attn_implementation}"


def _dynamic(model: PreTrainedModel, inputs: Inputs, beams: int) -> Cache:
    return DynamicCache(config=model.config)


def _quantized(model: PreTrainedModel, inputs: Inputs, beams: int) -> Cache:
    return QuantizedCache(backend="quanto", config=model.config, nbits=4)


def _paged(model: PreTrainedModel, inputs: Inputs, beams: int) -> Cache:
    return PagedCache(model.config)


def quantized_variant(kv: str) -> Variant:
    """PagedCache with a codec that loses something, a name from `hf_paged_cache.CODECS`."""

    def make(model: PreTrainedModel, inputs: Inputs, beams: int) -> Cache:
        return PagedCache(model.config, kv=kv)

    return Variant(kv, f"PagedCache ({kv})", "hf_paged", make, lossy=True)


def _forked(model: PreTrainedModel, inputs: Inputs, beams: int) -> Cache:
    cache = PagedCache(model.config)
    prefill(model, cache, **inputs)
    return cache.fork(beams)


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(BASELINE, "DynamicCache", "sdpa", _dynamic),
        Variant("quantized", "QuantizedCache (quanto, 4 bit)", "sdpa", _quantized, lossy=True),
        Variant("paged", "PagedCache", "hf_paged", _paged),
        quantized_variant("int8"),
        quantized_variant("int4"),
        # Attention that knows nothing of blocks: every layer's keys and values are gathered for it.
        Variant("paged+gather", "PagedCache", "sdpa", _paged),
    )
}
FORKED = Variant("paged+fork", "PagedCache (prefill, fork)", "hf_paged", _forked)


def missing_requirement(name: str) -> str | None:
    """Why the variant `name` cannot run in this environment, or None if it can."""
    if name == "quantized" and not is_optimum_quanto_available():
        return "optimum-quanto is not installed (pip install optimum-quanto)"
    return None


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model's forward takes its cache: it differs between transformers versions."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@contextmanager
def plain_generation(model: PreTrainedModel, attn_implementation: str) -> Iterator[None]:
    """Switches the attention implementation, and drops what the model's generation config asks for (sampling,
    penalties, end-of-sequence tokens, a cache kind), so that every call makes the same number of steps. Both are
    restored on leaving."""
    attention_before, config_before = model.config._attn_implementation, model.generation_config
    try:
        model.set_attn_implementation(attn_implementation)
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=config_before.pad_token_id or 0)
        yield
    finally:
        model.generation_config = config_before
        model.set_attn_implementation(attention_before)
