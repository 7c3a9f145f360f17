"""Stores new tokens in their blocks, and copies whole blocks, in plain PyTorch."""

from collections.abc import Sequence

import torch

from hf_paged_kernels.layout import KVBlocks
from hf_paged_kernels.step import StepMetadata


def write_kv(blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
    """As `hf_paged_kernels.dispatch.write_kv`."""
    index = step.write_index(blocks)
    for plane, tokens in zip(blocks.token_planes, (key, value), strict=True):
        dim, rows, tokens = plane.shape[-1], index.rows, tokens.reshape(-1, tokens.shape[-1])
        if index.stored is not None:
            rows, tokens = rows.index_select(0, index.stored), tokens.index_select(0, index.stored)
        plane.view(-1, dim).index_copy_(0, rows, tokens)


def copy_blocks(layers: Sequence[KVBlocks], pairs: Sequence[tuple[int, int]]) -> None:
    """As `hf_paged_kernels.dispatch.copy_blocks`, for layers on one device."""
    sources, targets = torch.tensor(pairs, dtype=torch.long, device=layers[0].key.device).T
    for blocks in layers:
        for plane in blocks.planes:
            plane.index_copy_(1, targets, plane.index_select(1, sources))
