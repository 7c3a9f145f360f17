"""Stores new tokens in their blocks, and copies whole blocks."""

from collections.abc import Iterable

import torch

from hf_paged_kernels.layout import KVBlocks
from hf_paged_kernels.step import StepMetadata


def write_kv(blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
    """Writes the new tokens of one layer into the slots that `step` gives them.

    Args:
        blocks: blocks of the layer; changed in place.
        key: `[batch, num_kv_heads, query_length, key_dim]`, in the dtype of the blocks.
        value: `[batch, num_kv_heads, query_length, value_dim]`
        step: the forward pass. Tokens whose slot is -1 are passed over.
    """
    index = step.write_index(blocks)
    for plane, tokens in zip(blocks.token_planes, (key, value), strict=True):
        dim, rows, tokens = plane.shape[-1], index.rows, tokens.reshape(-1, tokens.shape[-1])
        if index.stored is not None:
            rows, tokens = rows.index_select(0, index.stored), tokens.index_select(0, index.stored)
        plane.view(-1, dim).index_copy_(0, rows, tokens)


def copy_blocks(blocks: KVBlocks, source_ids: Iterable[int], target_ids: Iterable[int]) -> None:
    """Copies whole blocks, all planes of them. No target may be a source.

    Args:
        blocks: blocks of the layer; changed in place.
        source_ids, target_ids: block ids, pair by pair.
    """
    device = blocks.key.device
    sources = torch.tensor(list(source_ids), dtype=torch.long, device=device)
    targets = torch.tensor(list(target_ids), dtype=torch.long, device=device)
    for plane in blocks.planes:
        plane.index_copy_(1, targets, plane.index_select(1, sources))
