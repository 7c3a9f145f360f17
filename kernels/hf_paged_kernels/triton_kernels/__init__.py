"""The kernels for GPUs, in Triton. Each function has the contract of the one in `hf_paged_kernels.dispatch`."""

from hf_paged_kernels.triton_kernels.attention import paged_attention, unsupported_reason
from hf_paged_kernels.triton_kernels.mass import block_mass, block_mass_unsupported_reason
from hf_paged_kernels.triton_kernels.write import copy_blocks, write_kv

__all__ = [
    "block_mass",
    "block_mass_unsupported_reason",
    "copy_blocks",
    "paged_attention",
    "unsupported_reason",
    "write_kv",
]
