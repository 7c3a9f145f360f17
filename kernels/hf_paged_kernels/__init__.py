"""Attention over a paged KV cache, as plain functions on tensors.

The package knows blocks, steps and tensors; it imports neither transformers nor `hf_paged_cache`.
"""

from hf_paged_kernels.api import Backend, block_mass, copy_blocks, paged_attention, write_kv
from hf_paged_kernels.formats.blocks import Blocks, KVBlocks, TokenIndex, gather_tokens
from hf_paged_kernels.formats.grouped import GroupedBlocks, HotColdBlocks
from hf_paged_kernels.formats.scaled import ScaledBlocks
from hf_paged_kernels.step import DeviceStep, StepMetadata
from hf_paged_kernels.torch.reading import read_columns
from hf_paged_kernels.torch.reference import dense_attention
from hf_paged_kernels.torch.write import seal_blocks, thaw_blocks

__all__ = [
    "Backend",
    "Blocks",
    "DeviceStep",
    "GroupedBlocks",
    "HotColdBlocks",
    "KVBlocks",
    "ScaledBlocks",
    "StepMetadata",
    "TokenIndex",
    "block_mass",
    "copy_blocks",
    "dense_attention",
    "gather_tokens",
    "paged_attention",
    "read_columns",
    "seal_blocks",
    "thaw_blocks",
    "write_kv",
]
