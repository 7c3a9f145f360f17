"""How much attention each block gets, as a pass of its own over the keys: free when it is not asked for."""

import torch
import triton
import triton.language as tl

from hf_paged_kernels.formats.blocks import Blocks, KVBlocks
from hf_paged_kernels.step import StepMetadata
from hf_paged_kernels.triton.attention import unsupported_reason
from hf_paged_kernels.triton.device import device_guard, with_dense_dims
from hf_paged_kernels.triton.formats import format_of
from hf_paged_kernels.triton.rows import load_query
from hf_paged_kernels.triton.softmax import LOG2_E, scaled, score_factor
from hf_paged_kernels.triton.tiles import load_states, visible_keys

MAX_ROWS = 64
# Bytes of keys that a program holds at a time. There are no stages: the loop over tiles of a block is short.
TILE_BYTES = 16 * 1024


@triton.jit(do_not_specialize=["table_width", "mask_width", "query_length"])
def block_scores_kernel(
    query_ptr,  # [batch, num_heads, query_length, KEY_DIM]
    key_ptr,  # [num_kv_heads, num_slots, KEY_DIM]
    block_table_ptr,  # int32 [batch, table_width]
    seq_lens_ptr,  # int32 [batch]
    key_mask_ptr,  # uint8 [batch, mask_width]; None
    lse_ptr,  # float32 [batch, num_heads, query_length], natural
    scores_ptr,  # float32 [batch, num_kv_heads, table_width]
    scale_log2,
    num_slots,
    table_width,
    mask_width,
    query_length,
    query_strides,  # (batch, head, token)
    KEY: tl.constexpr,  # shape of keys, as in `Format`
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Sums the weights of a block's tokens over queries and heads of a group. Grid: blocks | KV heads | batch."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    wide_batch = batch.to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + batch)
    block_id = tl.load(block_table_ptr + batch * table_width + block).to(tl.int64)
    # What has left the window has the null block in its place.
    last = tl.where(block_id > 0, tl.minimum(seq_len, (block + 1) * BLOCK_SIZE), 0)
    mask = key_mask_ptr
    if key_mask_ptr is not None:
        mask = key_mask_ptr + wide_batch * mask_width
    keys_ptr = key_ptr + (kv_head.to(tl.int64) * num_slots + block_id * BLOCK_SIZE) * KEY[0]
    total = 0.0
    for first_row in range(0, query_length * GROUP, ROWS):
        row = first_row + tl.arange(0, ROWS)
        query, head = row // GROUP, kv_head * GROUP + row % GROUP
        present = query < query_length
        q, q_rest = load_query(query_ptr, query_strides, wide_batch, head, query, present, KEY)
        lse_offsets = (wide_batch * tl.num_programs(1) * GROUP + head) * query_length + query
        lse = tl.load(lse_ptr + lse_offsets, mask=present, other=0.0) * LOG2_E
        for start in range(0, BLOCK_SIZE, TILE):
            offsets = start + tl.arange(0, TILE)
            keys = block * BLOCK_SIZE + offsets
            queries = tl.where(present, query + seq_len - query_length, -1)
            visible, readable = visible_keys(keys, queries, 0, last, mask, WINDOW, key_mask_ptr is not None)
            key = load_states(keys_ptr, offsets, KEY[0], readable, True, True, 0, KEY[1], KEY[0], 1)
            products = tl.dot(q, key, input_precision="ieee")
            if KEY[2] > 0:
                key = load_states(keys_ptr, offsets, KEY[0], readable, True, True, KEY[1], KEY[2], KEY[0], 1)
                products = tl.dot(q_rest, key, products, input_precision="ieee")
            weights = tl.exp2(scaled(products, scale_log2, SOFTCAP) - lse[:, None])
            total += tl.sum(tl.where(visible, weights, 0.0))
    tl.store(scores_ptr + (wide_batch * tl.num_programs(1) + kv_head) * table_width + block, total)


def block_attention_scores_unsupported_reason(query: torch.Tensor, blocks: Blocks) -> str | None:
    """Why `block_attention_scores` cannot do a call; `None` if it can."""
    if not isinstance(blocks, KVBlocks):
        return "block_attention_scores over codes"
    return unsupported_reason(query, blocks)


def block_attention_scores(
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
    """As `hf_paged_kernels.api.block_attention_scores`."""
    query = with_dense_dims(query)
    batch, num_heads, query_length, key_dim = query.shape
    group, width = num_heads // blocks.num_kv_heads, step.block_table.shape[1]
    on_device = step.on(query.device)
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    block_scores = torch.empty(batch, blocks.num_kv_heads, width, dtype=torch.float32, device=query.device)
    # Queries and keys of a tile, up to a power of two.
    max_rows = max(16, min(MAX_ROWS, TILE_BYTES // (triton.next_power_of_2(key_dim) * query.element_size())))
    with device_guard(query.device):
        block_scores_kernel[(width, blocks.num_kv_heads, batch)](
            query,
            blocks.key,
            on_device.block_table,
            on_device.seq_lens,
            mask,
            lse.contiguous(),
            block_scores,
            score_factor(scale, softcap),
            blocks.num_blocks * blocks.block_size,
            width,
            0 if mask is None else mask.shape[1],
            query_length,
            query.stride()[:3],
            KEY=format_of(blocks).key,
            GROUP=group,
            BLOCK_SIZE=blocks.block_size,
            ROWS=min(max_rows, max(16, triton.next_power_of_2(group * query_length))),
            TILE=max(16, min(max_rows, triton.next_power_of_2(blocks.block_size))),
            WINDOW=window or 0,
            SOFTCAP=softcap or 0.0,
            num_warps=4,
            num_stages=1,
        )
    return block_scores
