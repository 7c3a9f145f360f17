"""How much attention each block gets, in plain PyTorch: what eviction by attention needs."""

import numpy as np
import torch

from hf_paged_kernels.formats.blocks import Blocks
from hf_paged_kernels.step import StepMetadata
from hf_paged_kernels.torch.reading import read_block_range
from hf_paged_kernels.torch.scores import MAX_SCORES, attention_scores
from hf_paged_kernels.torch.visibility import block_visibility, visible_range


def block_attention_scores(
    query: torch.Tensor,
    blocks: Blocks,
    step: StepMetadata,
    lse: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `hf_paged_kernels.api.block_attention_scores`, whose contract this defines."""
    batch, num_heads, query_length, _ = query.shape
    size, num_kv_heads = step.block_size, blocks.num_kv_heads
    block_scores = lse.new_zeros(batch, num_kv_heads, step.block_table.shape[1])
    first, last = visible_range(step, window, past_only=False)
    last_block = -(-last // size)
    blocks_each = max(1, MAX_SCORES // (batch * num_heads * query_length * size))
    for block in range(first // size, last_block, blocks_each):
        end = min(block + blocks_each, last_block)
        stored = torch.from_numpy(step.slots_of(np.arange(block * size, end * size)[None]) >= 0)
        seen = stored.to(query.device)[:, None]
        visible = block_visibility(
            step, block * size, end * size, past_only=False, window=window, key_mask=key_mask, device=query.device
        )
        if visible is not None:
            seen = seen & visible
        key = read_block_range(blocks, "key", step, block, end)
        weights = torch.exp(attention_scores(query, key, scale, softcap) - lse[..., None])
        weights = weights.masked_fill(~seen[:, None], 0).view(batch, num_kv_heads, -1, end - block, size)
        block_scores[..., block:end] = weights.sum((2, 4))
    return block_scores
