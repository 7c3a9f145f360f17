"""The kernels for GPUs, in Triton. Each function has the contract of the one in `hf_paged_kernels.api`."""

from hf_paged_kernels.triton.attention import paged_attention, unsupported_reason
from hf_paged_kernels.triton.block_scores import block_attention_scores, block_attention_scores_unsupported_reason
from hf_paged_kernels.triton.write import copy_blocks, write_kv

__all__ = [
    "block_attention_scores",
    "block_attention_scores_unsupported_reason",
    "copy_blocks",
    "paged_attention",
    "unsupported_reason",
    "write_kv",
]
