"""Reads tokens of any format out of their blocks, as dense tensors."""

import numpy as np
import torch

from hf_paged_kernels.formats.blocks import Blocks, KVBlocks, Part, gather_tokens
from hf_paged_kernels.formats.grouped import MixedBlocks
from hf_paged_kernels.step import StepMetadata


def read_columns(blocks: Blocks, part: Part, step: StepMetadata, first_column: int, last_column: int) -> torch.Tensor:
    """Keys or values of the columns `first_column..last_column - 1`, in the model's dtype.

    Returns:
        `[batch, num_kv_heads, columns, dim]`, zero where a token is not stored.
    """
    if isinstance(blocks, KVBlocks):
        return gather_tokens(getattr(blocks, part), step.column_index(first_column, last_column, blocks))
    tokens = np.arange(first_column, last_column)[None] - step.padding[:, None]
    size = step.block_size
    first_block, last_block = max(int(tokens.min()), 0) // size, max(-(-(int(tokens.max()) + 1) // size), 0)
    dense = read_block_range(blocks, part, step, first_block, last_block)
    index = torch.from_numpy(tokens - first_block * size).to(dense.device)[:, None, :, None]
    columns = dense.gather(2, index.clamp(min=0).expand(-1, dense.shape[1], -1, dense.shape[3]))
    return columns.masked_fill_(index < 0, 0)


def read_block_range(
    blocks: Blocks, part: Part, step: StepMetadata, first_block: int, last_block: int, *, past_only: bool = False
) -> torch.Tensor:
    """Keys or values of the logical blocks `first_block..last_block - 1` of every row, in the model's dtype.

    Args:
        past_only: leave out the tokens of this step.

    Returns:
        `[batch, num_kv_heads, tokens, dim]`, zero where a row has no block, and from its length on.
    """
    lengths = step.past_lens if past_only else step.seq_lens
    sources, absent = step.memo(
        ("blocks", first_block, last_block, isinstance(blocks, MixedBlocks), past_only, blocks.device),
        lambda: _sources(blocks, step, first_block, last_block, lengths),
    )
    num_entries = step.batch * (last_block - first_block)
    stores = (blocks.quantized, blocks.exact) if isinstance(blocks, MixedBlocks) else (blocks,)
    dense = None
    for store, (entries, block_ids) in zip(stores, sources, strict=True):
        if not len(block_ids):
            continue
        states = store.read_blocks(part, block_ids)
        if len(block_ids) == num_entries:
            dense = states
            break
        if dense is None:
            dense = states.new_zeros(states.shape[0], num_entries, *states.shape[2:])
        dense.index_copy_(1, entries, states)
    if dense is None:
        some = stores[-1].read_blocks(part, torch.zeros(0, dtype=torch.int64, device=blocks.device))
        dense = some.new_zeros(some.shape[0], num_entries, *some.shape[2:])
    dense = dense.view(dense.shape[0], step.batch, -1, dense.shape[-1]).transpose(0, 1)
    return dense if absent is None else dense.masked_fill(absent, 0)


def _sources(
    blocks: Blocks, step: StepMetadata, first_block: int, last_block: int, lengths: np.ndarray
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]:
    """Which blocks of which store go where, and the tokens `[batch, 1, tokens, 1]` that no row has."""
    table = step.block_table[:, first_block:last_block]
    reads = [(table, table > 0)]
    if isinstance(blocks, MixedBlocks):
        exact = step.exact.block_table[:, first_block:last_block]
        reads = [(table, (table > 0) & (exact < 0)), (exact, exact >= 0)]
    sources = []
    for ids, are_read in reads:
        entries = np.flatnonzero(are_read)
        pair = (entries, ids.reshape(-1)[entries])
        sources.append(tuple(torch.from_numpy(array.astype(np.int64)).to(blocks.device) for array in pair))
    tokens = np.arange(first_block * step.block_size, last_block * step.block_size)
    absent = tokens[None] >= lengths[:, None]
    if not absent.any():
        return sources, None
    return sources, torch.from_numpy(absent).to(blocks.device)[:, None, :, None]
