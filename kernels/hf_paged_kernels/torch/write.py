"""Stores new tokens in their blocks, and moves whole blocks, in plain PyTorch."""

from collections.abc import Sequence

import torch

from hf_paged_kernels.formats.blocks import Blocks, KVBlocks, TokenIndex
from hf_paged_kernels.formats.grouped import MixedBlocks
from hf_paged_kernels.formats.scaled import ScaledBlocks
from hf_paged_kernels.step import StepMetadata

# Blocks that are quantized at a time: bounds what that takes besides.
CHUNK = 64


def write_kv(blocks: Blocks, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
    """As `hf_paged_kernels.api.write_kv`."""
    if isinstance(blocks, MixedBlocks):
        write_kv(blocks.exact, key, value, step.exact)
        quantize_new_blocks(blocks, key, value, step)
    elif isinstance(blocks, ScaledBlocks):
        index = step.write_index(blocks)
        blocks.write("key", key, index)
        blocks.write("value", value, index)
    else:
        _write_unchanged(blocks, key, value, step.write_index(blocks))


def quantize_new_blocks(blocks: MixedBlocks, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
    """Quantizes the blocks that the new tokens fill and that do not stay exact, `CHUNK` of them at a time."""
    for start in range(0, len(step.quantized), CHUNK):
        columns, rows, block_ids = step.memo(
            ("quantized", start, key.device), lambda start=start: _new_blocks(step, start, key.device)
        )
        new = (states[rows[:, None], :, columns].permute(2, 0, 1, 3) for states in (key, value))
        blocks.quantized.quantize(*new, block_ids)


def _new_blocks(step: StepMetadata, start: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """New columns `[n, block_size]`, rows `[n]` and ids `[n]` of the blocks to be quantized from `start` on."""
    new = torch.from_numpy(step.quantized[start : start + CHUNK]).to(device, torch.int64)
    columns = new[:, 1:2] + torch.arange(step.block_size, device=device)
    return columns, new[:, 0], new[:, 2]


def _write_unchanged(blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor, index: TokenIndex) -> None:
    for plane, tokens in zip(blocks.token_planes, (key, value), strict=True):
        dim, rows, tokens = plane.shape[-1], index.rows, tokens.reshape(-1, tokens.shape[-1])
        if index.stored is not None:
            rows, tokens = rows.index_select(0, index.stored), tokens.index_select(0, index.stored)
        plane.view(-1, dim).index_copy_(0, rows, tokens)


def copy_blocks(layers: Sequence[Blocks], pairs: Sequence[tuple[int, int]]) -> None:
    """As `hf_paged_kernels.api.copy_blocks`, for layers on one device."""
    sources, targets = _split(pairs, layers[0].device)
    for blocks in layers:
        for plane in blocks.planes:
            plane.index_copy_(1, targets, plane.index_select(1, sources))


def quantize_blocks(layers: Sequence[MixedBlocks], pairs: Sequence[tuple[int, int]]) -> None:
    """Quantizes exact blocks.

    Args:
        layers: blocks of layers with the same block ids.
        pairs: `(exact block, block id)`.
    """
    for blocks in layers:
        sources, targets = _split(pairs, blocks.device)
        blocks.quantized.quantize(*(blocks.exact.read_blocks(part, sources) for part in ("key", "value")), targets)


def dequantize_blocks(layers: Sequence[MixedBlocks], pairs: Sequence[tuple[int, int]]) -> None:
    """Puts what the codes of blocks say into exact blocks.

    Args:
        layers: blocks of layers with the same block ids.
        pairs: `(block id, exact block)`.
    """
    for blocks in layers:
        sources, targets = _split(pairs, blocks.device)
        for part, plane in zip(("key", "value"), blocks.exact.planes, strict=True):
            plane.index_copy_(1, targets, blocks.quantized.read_blocks(part, sources))


def _split(pairs: Sequence[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    sources, targets = torch.tensor(pairs, dtype=torch.int64, device=device).T
    return sources, targets
