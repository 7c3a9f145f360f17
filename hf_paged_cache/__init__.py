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
    UnsupportedError,
)
from hf_paged_cache.prefill import prefill
from hf_paged_cache.stats import CacheStats

__all__ = [
    "ATTENTION_NAME",
    "CODECS",
    "CacheStateError",
    "CacheStats",
    "CropError",
    "InvalidArgumentError",
    "KVQuant",
    "OutOfBlocks",
    "PagedCache",
    "PagedCacheError",
    "UnsupportedError",
    "prefill",
]
