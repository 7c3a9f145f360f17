"""A paged KV cache for Hugging Face transformers: `model.generate(..., past_key_values=PagedCache(model.config))`.

Importing the package makes the attention implementation `"hf_paged"` known to transformers.
"""

from hf_paged_cache.attention import ATTENTION_NAME
from hf_paged_cache.cache import PagedCache
from hf_paged_cache.codecs import CODECS, KVQuant
from hf_paged_cache.errors import (
    CacheStateError,
    CropError,
    InvalidArgumentError,
    OutOfBlocks,
    PagedCacheError,
    StoreFileError,
    UnsupportedError,
)
from hf_paged_cache.prefill import prefill
from hf_paged_cache.stats import CacheStats
from hf_paged_cache.store import BlockStore
from hf_paged_cache.store_stats import KnownRun, StoreStats

__all__ = [
    "ATTENTION_NAME",
    "CODECS",
    "BlockStore",
    "CacheStateError",
    "CacheStats",
    "CropError",
    "InvalidArgumentError",
    "KVQuant",
    "KnownRun",
    "OutOfBlocks",
    "PagedCache",
    "PagedCacheError",
    "StoreFileError",
    "StoreStats",
    "UnsupportedError",
    "prefill",
]
