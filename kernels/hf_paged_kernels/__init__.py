"""Attention over a paged KV cache, as plain functions on tensors.

The package knows blocks, steps and tensors; it imports neither transformers nor `hf_paged_cache`.
"""

from hf_paged_kernels.dispatch import Backend, block_mass, copy_blocks, paged_attention, write_kv
from hf_paged_kernels.layout import KVBlocks, TokenIndex, gather_tokens
from hf_paged_kernels.reference import dense_attention
from hf_paged_kernels.step import DeviceStep, StepMetadata

__all__ = [
    "Backend",
    "DeviceStep",
    "KVBlocks",
    "StepMetadata",
    "TokenIndex",
    "block_mass",
    "copy_blocks",
    "dense_attention",
    "gather_tokens",
    "paged_attention",
    "write_kv",
]
