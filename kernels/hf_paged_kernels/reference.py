"""Attention over blocks in plain PyTorch: runs on every device and in every dtype, float64 included.

It defines the result that every other backend has to reproduce. Softmax attention over a union of key sets needs no
single array of keys, so the keys are taken in segments (blocks, read in place where they follow each other; tokens
that are not in blocks) and only their scores are joined.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from hf_paged_kernels.layout import KVBlocks, gather_tokens
from hf_paged_kernels.step import StepMetadata
from hf_paged_kernels.visibility import block_visibility, new_visibility, visible_range

T = TypeVar("T")

# Up to this many new tokens (decode, short drafts) keys are multiplied block by block; more go through
# `scaled_dot_product_attention` on gathered tokens, which needs no memory for the scores.
MAX_BLOCKWISE_QUERIES = 8

# Bound of the score matrix of one query tile, in elements.
MAX_SCORES = 1 << 24


class _Segment(NamedTuple):
    """Keys and values that lie together: the first `num_keys` tokens of `num_blocks` pieces of `length` tokens a row.

    Attributes:
        key: `[batch, num_blocks, num_kv_heads, length, key_dim]`; slots without a token may hold anything.
        value: `[batch, num_blocks, num_kv_heads, length, value_dim]`
        num_keys: tokens that count.
        visible: bool `[batch, query_length, num_keys]`; `None` if every query sees every key.
        is_clean: whether slots of `value` without a token are zero; if not, they may hold anything.
    """

    key: torch.Tensor
    value: torch.Tensor
    num_keys: int
    visible: torch.Tensor | None
    is_clean: bool


class _Plan(NamedTuple):
    """What a step reads, the same for all layers of a group.

    Attributes:
        block_ids: as `StepMetadata.block_ids` gives them; `None` if nothing is read from blocks.
        num_keys: tokens to be read from the blocks of each row.
        visible: bool `[batch, query_length, num_keys]`; `None` if every query sees all of them.
        missing: int64, of the values of these blocks, seen as rows of `value_dim`, those without a token; `None` if
            there are none or the blocks are read in place.
        new_visible: bool `[batch, query_length, query_length]`, the same for the new tokens where they are not read
            from blocks.
    """

    block_ids: torch.Tensor | slice | None
    num_keys: int
    visible: torch.Tensor | None
    missing: torch.Tensor | None
    new_visible: torch.Tensor | None


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

    def visible_keys() -> torch.Tensor:
        past = block_visibility(step, first, last, past_only=True, window=window, key_mask=key_mask, device=device)
        if past is None:
            past = torch.ones(step.batch, step.query_length, last - first, dtype=torch.bool, device=device)
        return torch.cat([past, new_visibility(step, window=window, key_mask=key_mask, device=device)], dim=-1)

    visible = _memo_with_mask(step, ("gathered", window), key_mask, visible_keys)
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
    device = blocks.key.device
    past_only = new_kv is not None
    num_kv_heads = blocks.num_kv_heads
    plan = _memo_with_mask(
        step,
        ("plan", window, past_only, num_kv_heads, device),
        key_mask,
        lambda: _plan(step, window, past_only, key_mask, num_kv_heads, device),
    )
    segments = []
    if plan.block_ids is not None:
        key, value = (_take(plane, plan.block_ids, step.batch) for plane in blocks.planes)
        if plan.missing is not None:
            value.view(-1, value.shape[-1]).index_fill_(0, plan.missing, 0)
        is_copy = isinstance(plan.block_ids, torch.Tensor)
        segments.append(_Segment(key, value, plan.num_keys, plan.visible, is_clean=is_copy))
    if new_kv is not None:
        key, value = (new.unsqueeze(1) for new in new_kv)
        segments.append(_Segment(key, value, step.query_length, plan.new_visible, is_clean=True))
    return segments


def _plan(
    step: StepMetadata,
    window: int | None,
    past_only: bool,
    key_mask: torch.Tensor | None,
    num_kv_heads: int,
    device: torch.device,
) -> _Plan:
    size = step.block_size
    lengths = step.past_lens if past_only else step.seq_lens
    new_visible = new_visibility(step, window=window, key_mask=key_mask, device=device) if past_only else None
    first, last = visible_range(step, window, past_only=past_only)
    if last <= first:
        return _Plan(None, 0, None, None, new_visible)
    first_block, last_block = first // size, -(-last // size)
    first, end = first_block * size, last_block * size
    if bool((lengths != lengths[0]).any()):
        last = end
    block_ids = step.block_ids(first_block, last_block, device)
    missing = None
    if isinstance(block_ids, torch.Tensor):
        # Rows end in different blocks, and blocks that left the window of one row are not there any more.
        slots = step.slots_of(np.arange(first, end)[None]).reshape(step.batch, -1, 1, size)
        without_token = np.broadcast_to(slots < 0, (*slots.shape[:2], num_kv_heads, size))
        missing = torch.from_numpy(np.flatnonzero(without_token)).to(device) if without_token.any() else None
    visible = block_visibility(step, first, last, past_only=past_only, window=window, key_mask=key_mask, device=device)
    return _Plan(block_ids, last - first, visible, missing, new_visible)


def _memo_with_mask(step: StepMetadata, key: tuple, key_mask: torch.Tensor | None, compute: Callable[[], T]) -> T:
    """`step.memo` of what depends on `key_mask`. The entry holds the mask, so that its id stays its own."""
    return step.memo((*key, id(key_mask)), lambda: (key_mask, compute()))[1]


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
    kv_length = sum(segment.num_keys for segment in segments)
    tile = max(1, MAX_SCORES // max(1, batch * num_heads * kv_length))
    may_be_empty = any(segment.visible is not None for segment in segments)
    work = _work_dtype(query)
    if query.dtype != work:
        segments = [segment._replace(key=segment.key.to(work), value=segment.value.to(work)) for segment in segments]
    outs, lses = [], []
    for start in range(0, query_length, tile):
        rows = slice(start, min(start + tile, query_length))
        tile_query = (query if tile >= query_length else query[:, :, rows]).to(work)
        scores = [_scores(tile_query, segment, rows, scale, softcap) for segment in segments]
        joined = torch.cat(scores, dim=-1) if len(scores) > 1 else scores[0]
        weights = _softmax(joined, sinks, may_be_empty=may_be_empty)
        weights = weights.reshape(batch, segments[0].key.shape[2], -1, kv_length)
        if len(segments) == 1:
            out = _weighted_values(weights, segments[0])
        else:
            parts = weights.split([segment.num_keys for segment in segments], dim=-1)
            out = sum(_weighted_values(part, segment) for part, segment in zip(parts, segments, strict=True))
        outs.append(out.view(batch, num_heads, -1, out.shape[-1]).to(query.dtype))
        if return_lse:
            lses.append(_with_sinks(joined, sinks).logsumexp(-1))
    out = torch.cat(outs, dim=2) if len(outs) > 1 else outs[0]
    return (out, torch.cat(lses, dim=2)) if return_lse else out


def _scores(query: torch.Tensor, segment: _Segment, rows: slice, scale: float, softcap: float | None) -> torch.Tensor:
    """`[batch, num_heads, queries, num_keys]` of the segment; -inf for keys that a query does not see."""
    batch, num_heads, num_queries, dim = query.shape
    # One product for each (row, block, KV head); the query heads of a group are its rows.
    grouped = (query * scale).reshape(batch, 1, segment.key.shape[2], -1, dim)
    scores = torch.matmul(grouped, segment.key.transpose(3, 4))
    scores = scores.permute(0, 2, 3, 1, 4).reshape(batch, num_heads, num_queries, -1)
    if scores.shape[-1] > segment.num_keys:
        scores = scores[..., : segment.num_keys]
    scores = _softcap(scores, softcap)
    if segment.visible is not None:
        scores = scores.masked_fill(~segment.visible[:, None, rows], -torch.inf)
    return scores


def _weighted_values(weights: torch.Tensor, segment: _Segment) -> torch.Tensor:
    """Weights `[batch, num_kv_heads, queries of the group, num_keys]` times the values of a segment.

    Returns:
        `[batch, num_kv_heads, queries of the group, value_dim]`
    """
    batch, num_kv_heads, num_queries, num_keys = weights.shape
    value, length = segment.value, segment.value.shape[3]
    num_full, tail = divmod(num_keys, length)
    if tail and segment.is_clean:
        weights = F.pad(weights, (0, length - tail))
        num_full, tail = num_full + 1, 0
    out = None
    if num_full:
        full = weights[..., : num_full * length] if tail else weights
        full = full.view(batch, num_kv_heads, num_queries, num_full, length).permute(0, 3, 1, 2, 4)
        out = torch.matmul(full, value[:, :num_full] if tail else value).sum(1)
    if tail:
        # A weight of zero does not help against a NaN: the slots behind the last token are not touched.
        last = torch.matmul(weights[..., num_full * length :], value[:, num_full, :, :tail])
        out = last if out is None else out + last
    return out


def _softcap(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return scores
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, *, may_be_empty: bool) -> torch.Tensor:
    """Softmax over the keys, sinks taking their share; zeros where all scores are -inf."""
    weights = _with_sinks(scores, sinks).softmax(-1)
    if sinks is not None:
        weights = weights[..., :-1]
    if may_be_empty:
        weights = weights.masked_fill(scores.amax(-1, keepdim=True) == -torch.inf, 0)
    return weights


def _work_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32
