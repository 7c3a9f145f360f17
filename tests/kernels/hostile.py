"""Memory in which whatever was not written is poison."""

import math

import torch
from hf_paged_kernels import Blocks, KVBlocks

# NaN shows wherever it is read; a huge number shows where NaN would be filtered out.
POISONS = (math.nan, 1e30)
POISONED_CODE = 0xA5


def poisoned_blocks(
    num_blocks: int, kv_heads: int, block_size: int, dims: tuple[int, int], dtype: torch.dtype, poison: float
) -> KVBlocks:
    poison = poison if math.isnan(poison) else min(poison, torch.finfo(dtype).max)
    return KVBlocks(*(torch.full((kv_heads, num_blocks, block_size, dim), poison, dtype=dtype) for dim in dims))


def poison_planes(blocks: Blocks) -> None:
    """Fills blocks of any format: scales and the like with NaN, codes with a pattern of bits."""
    for plane in blocks.planes:
        poison(plane)


def poison(plane: torch.Tensor) -> None:
    """Fills one of the tensors that blocks consist of."""
    if plane.is_floating_point():
        plane.fill_(math.nan)
    else:
        plane.view(torch.uint8).fill_(POISONED_CODE)
