"""A paged KV cache for Hugging Face transformers: `model.generate(..., past_key_values=PagedCache(model.config))`.

Importing the package makes the attention implementation `"hf_paged"` known to transformers.
"""

from importlib import import_module
from types import ModuleType

from hf_paged_cache.cache import PagedCache
from hf_paged_cache.codecs import CODECS, KVQuant
from hf_paged_cache.errors import (
    CacheStateError,
    CropError,
    InvalidArgumentError,
    OutOfBlocksError,
    PagedCacheError,
    StoreFileError,
    UnsupportedAccessError,
    UnsupportedError,
)
from hf_paged_cache.hf.attention import ATTENTION_NAME
from hf_paged_cache.prefill import prefill
from hf_paged_cache.prefix.store import BlockStore
from hf_paged_cache.prefix.store_stats import CachedNode, StoreStats
from hf_paged_cache.stats import CacheStats

__all__ = [
    "ATTENTION_NAME",
    "CODECS",
    "BlockStore",
    "CacheStateError",
    "CacheStats",
    "CachedNode",
    "CropError",
    "InvalidArgumentError",
    "KVQuant",
    "OutOfBlocksError",
    "PagedCache",
    "PagedCacheError",
    "StoreFileError",
    "StoreStats",
    "UnsupportedAccessError",
    "UnsupportedError",
    "prefill",
    "small_models",
]


def __getattr__(name: str) -> ModuleType:
    if name == "small_models":  # not imported before it is asked for: it needs what loading models needs
        return import_module("hf_paged_cache.demo.small_models")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=None)
