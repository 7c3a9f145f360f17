"""Attention over a paged KV cache, as plain functions on tensors.

The package knows blocks, steps and tensors; it imports neither transformers nor `hf_paged_cache`.
"""

from hf_paged_kernels.api import Backend, block_attention_scores, copy_blocks, paged_attention, write_kv
from hf_paged_kernels.formats.blocks import Blocks, KVBlocks, TokenIndex, gather_tokens
from hf_paged_kernels.formats.grouped import GroupedBlocks, MixedBlocks
from hf_paged_kernels.formats.scaled import ScaledBlocks
from hf_paged_kernels.step import DeviceStep, StepMetadata
from hf_paged_kernels.torch.reading import read_columns
from hf_paged_kernels.torch.reference import dense_attention
from hf_paged_kernels.torch.write import dequantize_blocks, quantize_blocks

__all__ = [
    "Backend",
    "Blocks",
    "DeviceStep",
    "GroupedBlocks",
    "KVBlocks",
    "MixedBlocks",
    "ScaledBlocks",
    "StepMetadata",
    "TokenIndex",
    "block_attention_scores",
    "copy_blocks",
    "dense_attention",
    "dequantize_blocks",
    "gather_tokens",
    "paged_attention",
    "quantize_blocks",
    "read_columns",
    "write_kv",
]
