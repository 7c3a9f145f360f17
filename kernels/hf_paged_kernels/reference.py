"""Attention over blocks in plain PyTorch: runs on every device and in every dtype, float64 included.

It defines the result that every other backend has to reproduce. Softmax attention over a union of key sets needs no
single array of keys, so the keys are taken in segments (whole blocks read in place, the last partly filled block,
tokens that are not in blocks) and only their scores are joined.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from hf_paged_kernels.layout import KVBlocks, gather_tokens
from hf_paged_kernels.step import StepMetadata
from hf_paged_kernels.visibility import block_visibility, new_visibility, visible_range

# Up to this many new tokens (decode, short drafts) keys are multiplied block by block; more go through
# `scaled_dot_product_attention` on gathered tokens, which needs no memory for the scores.
MAX_BLOCKWISE_QUERIES = 8

# Bound of the score matrix of one query tile, in elements.
MAX_SCORES = 1 << 24


class _Segment(NamedTuple):
    """Keys that lie together: `num_blocks` pieces of `length` tokens a row.

    Attributes:
        key: `[batch, num_blocks, num_kv_heads, length, key_dim]`
        value: `[batch, num_blocks, num_kv_heads, length, value_dim]`, finite wherever `visible` is False.
        visible: bool `[batch, query_length, num_blocks * length]`; `None` if every query sees every key.
    """

    key: torch.Tensor
    value: torch.Tensor
    visible: torch.Tensor | None


def paged_attention(
    query: torch.Tensor,
    blocks: KVBlocks,
    step: StepMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    key_mask: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the new tokens of each row to that row's tokens.

    Query `i` of a row with `n` tokens is token `p = n - query_length + i` and sees the tokens `j <= p`, with a window
    `j > p - window`. A query that sees nothing (leading padding has `p < 0`) gives zeros.

    Args:
        query: `[batch, num_heads, query_length, key_dim]`; `num_heads` is a multiple of `num_kv_heads`.
        blocks: blocks of the layer, into which the new tokens have been written.
        step: the forward pass.
        scale: factor of the scores, before softcap.
        window: tokens that a query sees, itself included (as transformers counts `sliding_window`); `None` for all.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2).
        sinks: `[num_heads]`, a learned logit a head that takes part in the softmax and adds no value (gpt-oss).
        new_kv: keys and values of the new tokens, `[batch, num_kv_heads, query_length, dim]`, right-aligned: column
            `i` belongs to query `i`. They are then not read from the blocks. Required if
            `not step.new_tokens_stored`.
        key_mask: bool `[batch, max_seq_len]`, False for tokens that no query sees (holes in a 2-D mask).
        return_lse: also return the log-sum-exp of the scores, sinks included.

    Returns:
        `[batch, num_heads, query_length, value_dim]` in the dtype of `query`; with `return_lse` also the natural
        logarithm float32 (float64 for a float64 query) `[batch, num_heads, query_length]`, -inf for a query that sees
        nothing.
    """
    plain = softcap is None and sinks is None and not return_lse
    if plain and new_kv is not None:
        within_window = window is None or step.query_length <= window
        if not step.has_past and key_mask is None and within_window:
            return _causal_attention(query, *new_kv, step, scale)
        if step.query_length > MAX_BLOCKWISE_QUERIES:
            return _gathered_attention(query, blocks, step, scale, window, new_kv, key_mask)
    segments = _segments(blocks, step, window, new_kv, key_mask)
    return _attend(query, segments, step, scale, softcap, sinks, return_lse)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    visible: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to keys that are in no blocks, with every feature and with the weights.

    Args:
        query: `[batch, num_heads, query_length, key_dim]`
        key: `[batch, num_kv_heads, kv_length, key_dim]`
        value: `[batch, num_kv_heads, kv_length, value_dim]`
        visible: bool, broadcastable to `[batch, num_heads, query_length, kv_length]`.
        bias: added to the scores, broadcastable likewise.
        scale, softcap, sinks: as in `paged_attention`.
        dropout: probability with which a weight is dropped.

    Returns:
        Output `[batch, num_heads, query_length, value_dim]` and weights
        `[batch, num_heads, query_length, kv_length]`, both in the dtype of `query`.
    """
    batch, num_heads, query_length, _ = query.shape
    num_kv_heads, kv_length = key.shape[1:3]
    work = _work_dtype(query)
    grouped = query.to(work).reshape(batch, num_kv_heads, -1, query.shape[-1])
    scores = torch.matmul(grouped, key.to(work).transpose(-1, -2)) * scale
    scores = _softcap(scores.view(batch, num_heads, query_length, kv_length), softcap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    weights = F.dropout(_softmax(scores, sinks, may_be_empty=visible is not None), dropout, training=dropout > 0)
    out = torch.matmul(weights.view(batch, num_kv_heads, -1, kv_length), value.to(work))
    return out.view(batch, num_heads, query_length, -1).to(query.dtype), weights.to(query.dtype)


def _causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: StepMetadata, scale: float
) -> torch.Tensor:
    """Attention among the new tokens alone: nothing is cached, leading columns may be padding."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        is_causal, enable_gqa = query.shape[2] > 1, key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )

    if not step.has_empty_queries:
        return attend(query, key, value)
    # Row by row, without its padding: cheaper than a mask, and the row's result is that of the row alone.
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for row, tokens in enumerate(step.seq_lens.tolist()):
        if tokens > 0:
            inputs = (states[row : row + 1, :, -tokens:] for states in (query, key, value))
            out[row : row + 1, :, -tokens:] = attend(*inputs)
    return out


def _gathered_attention(
    query: torch.Tensor,
    blocks: KVBlocks,
    step: StepMetadata,
    scale: float,
    window: int | None,
    new_kv: tuple[torch.Tensor, torch.Tensor],
    key_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Many new tokens after cached ones: the visible past is copied out of the blocks, the new tokens are at hand."""
    device = query.device
    first, last = visible_range(step, window, past_only=True)
    index = step.token_index(first, last, blocks.num_kv_heads, device)
    key, value = (
        torch.cat([gather_tokens(plane, index), new], dim=2) for plane, new in zip(blocks.planes, new_kv, strict=True)
    )
    past = block_visibility(step, first, last, past_only=True, window=window, key_mask=key_mask, device=device)
    if past is None:
        past = torch.ones(step.batch, step.query_length, last - first, dtype=torch.bool, device=device)
    new = new_visibility(step, window=window, key_mask=key_mask, device=device)
    visible = torch.cat([past, new], dim=-1)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible[:, None],
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    if step.has_empty_queries or key_mask is not None:
        out = out.masked_fill(~visible.any(-1)[:, None, :, None], 0)
    return out


def _segments(
    blocks: KVBlocks,
    step: StepMetadata,
    window: int | None,
    new_kv: tuple[torch.Tensor, torch.Tensor] | None,
    key_mask: torch.Tensor | None,
) -> list[_Segment]:
    """The keys that the queries of a step may see."""
    device, size = blocks.key.device, step.block_size
    past_only = new_kv is not None
    tokens = step.past_lens if past_only else step.seq_lens
    first, last = visible_range(step, window, past_only=past_only)
    first_block, last_block = first // size, -(-last // size)

    def segment(first_block: int, last_block: int, last_token: int) -> _Segment:
        ids = step.block_ids(first_block, last_block, device)
        length = min(size, last_token - first_block * size)
        key, value = (_take(plane, ids, step.batch)[:, :, :, :length] for plane in blocks.planes)
        visible = block_visibility(
            step,
            first_block * size,
            last_token,
            past_only=past_only,
            window=window,
            key_mask=key_mask,
            device=device,
        )
        return _Segment(key, value, visible)

    segments = []
    if last > first and bool((tokens == tokens[0]).all()):
        # Slots past the end of a row hold anything, NaN included: of the last block only the written part is read.
        full_blocks = last // size
        if full_blocks > first_block:
            segments.append(segment(first_block, full_blocks, full_blocks * size))
        if last_block > full_blocks:
            segments.append(segment(full_blocks, last_block, last))
    elif last > first:
        ragged = segment(first_block, last_block, last_block * size)
        unwritten = step.memo(
            ("unwritten", first_block, last_block, past_only, device),
            lambda: torch.from_numpy(np.arange(first_block * size, last_block * size)[None] >= tokens[:, None]).to(
                device
            ),
        )
        unwritten = unwritten.view(step.batch, -1, 1, size, 1)
        segments.append(ragged._replace(value=ragged.value.masked_fill(unwritten, 0)))
    if new_kv is not None:
        visible = new_visibility(step, window=window, key_mask=key_mask, device=device)
        segments.append(_Segment(new_kv[0].unsqueeze(1), new_kv[1].unsqueeze(1), visible))
    return segments


def _take(plane: torch.Tensor, ids: torch.Tensor | slice, batch: int) -> torch.Tensor:
    """`[batch, num_blocks, num_kv_heads, block_size, dim]`: a view of the pool if the ids follow each other."""
    taken = plane[ids] if isinstance(ids, slice) else plane.index_select(0, ids)
    return taken.view(batch, -1, *plane.shape[1:])


def _attend(
    query: torch.Tensor,
    segments: list[_Segment],
    step: StepMetadata,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    batch, num_heads, query_length, _ = query.shape
    kv_length = sum(segment.key.shape[1] * segment.key.shape[3] for segment in segments)
    tile = max(1, MAX_SCORES // max(1, batch * num_heads * kv_length))
    may_be_empty = any(segment.visible is not None for segment in segments)
    outs, lses = [], []
    for start in range(0, query_length, tile):
        rows = slice(start, min(start + tile, query_length))
        scores = [_scores(query[:, :, rows], segment, rows, scale, softcap) for segment in segments]
        joined = torch.cat(scores, dim=-1) if len(scores) > 1 else scores[0]
        weights = _softmax(joined, sinks, may_be_empty=may_be_empty)
        outs.append(_weighted_values(weights, segments).to(query.dtype))
        if return_lse:
            lses.append(_with_sinks(joined, sinks).logsumexp(-1))
    out = torch.cat(outs, dim=2) if len(outs) > 1 else outs[0]
    return (out, torch.cat(lses, dim=2)) if return_lse else out


def _scores(query: torch.Tensor, segment: _Segment, rows: slice, scale: float, softcap: float | None) -> torch.Tensor:
    """`[batch, num_heads, queries, keys]` of the segment; -inf for keys that a query does not see."""
    batch, num_heads, num_queries, dim = query.shape
    num_kv_heads, work = segment.key.shape[2], _work_dtype(query)
    grouped = (query.to(work) * scale).reshape(batch, 1, num_kv_heads, -1, dim)
    scores = torch.matmul(grouped, segment.key.to(work).transpose(-1, -2))
    scores = scores.permute(0, 2, 3, 1, 4).reshape(batch, num_heads, num_queries, -1)
    scores = _softcap(scores, softcap)
    if segment.visible is not None:
        scores = scores.masked_fill(~segment.visible[:, None, rows], -torch.inf)
    return scores


def _weighted_values(weights: torch.Tensor, segments: list[_Segment]) -> torch.Tensor:
    """Weights `[batch, num_heads, queries, keys]` times the values of the segments, in their order."""
    batch, num_heads, num_queries, _ = weights.shape
    out: torch.Tensor | float = 0.0
    lengths = [segment.key.shape[1] * segment.key.shape[3] for segment in segments]
    for segment, part in zip(segments, weights.split(lengths, dim=-1), strict=True):
        _, num_blocks, num_kv_heads, length, dim = segment.value.shape
        part = part.reshape(batch, num_kv_heads, -1, num_blocks, length).permute(0, 3, 1, 2, 4)
        out = out + torch.matmul(part, segment.value.to(weights.dtype)).sum(1)
    return out.view(batch, num_heads, num_queries, dim)


def _softcap(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return scores
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, *, may_be_empty: bool) -> torch.Tensor:
    """Softmax over the keys, sinks taking their share; zeros where all scores are -inf."""
    weights = _with_sinks(scores, sinks).softmax(-1)[..., : scores.shape[-1]]
    if may_be_empty:
        weights = weights.masked_fill(scores.amax(-1, keepdim=True) == -torch.inf, 0)
    return weights


def _work_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32
