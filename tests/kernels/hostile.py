"""Memory in which whatever was not written is poison."""

import math

import torch
from hf_paged_kernels import KVBlocks

# NaN shows wherever it is read; a huge number shows where NaN would be filtered out.
POISONS = (math.nan, 1e30)


def poisoned_blocks(
    num_blocks: int, kv_heads: int, block_size: int, dims: tuple[int, int], dtype: torch.dtype, poison: float
) -> KVBlocks:
    poison = poison if math.isnan(poison) else min(poison, torch.finfo(dtype).max)
    return KVBlocks(*(torch.full((kv_heads, num_blocks, block_size, dim), poison, dtype=dtype) for dim in dims))
