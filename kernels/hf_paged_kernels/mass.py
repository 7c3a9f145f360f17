"""How much attention each block gets, in plain PyTorch: what eviction by attention needs."""

import numpy as np
import torch

from hf_paged_kernels.layout import KVBlocks, gather_tokens
from hf_paged_kernels.reference import MAX_SCORES, attention_scores
from hf_paged_kernels.step import StepMetadata
from hf_paged_kernels.visibility import block_visibility, visible_range


def block_mass(
    query: torch.Tensor,
    blocks: KVBlocks,
    step: StepMetadata,
    lse: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `hf_paged_kernels.dispatch.block_mass`, whose contract this defines."""
    batch, num_heads, query_length, _ = query.shape
    size, num_kv_heads = step.block_size, blocks.num_kv_heads
    mass = lse.new_zeros(batch, num_kv_heads, step.block_table.shape[1])
    first, last = visible_range(step, window, past_only=False)
    blocks_each = max(1, MAX_SCORES // (batch * num_heads * query_length * size))
    for block in range(first // size, -(-last // size), blocks_each):
        tokens = np.arange(block * size, min((block + blocks_each) * size, last))
        start, stop = int(tokens[0]), int(tokens[-1]) + 1
        seen = torch.from_numpy(step.slots_of(tokens[None]) >= 0).to(query.device)[:, None]
        visible = block_visibility(
            step, start, stop, past_only=False, window=window, key_mask=key_mask, device=query.device
        )
        if visible is not None:
            seen = seen & visible
        key = gather_tokens(blocks.key, step.token_index(start, stop, blocks))
        weights = torch.exp(attention_scores(query, key, scale, softcap) - lse[..., None])
        weights = weights.masked_fill(~seen[:, None], 0).view(batch, num_kv_heads, -1, stop - start).sum(2)
        weights = torch.nn.functional.pad(weights, (0, -len(tokens) % size))
        mass[..., block : block + weights.shape[-1] // size] = weights.unflatten(-1, (-1, size)).sum(-1)
    return mass
