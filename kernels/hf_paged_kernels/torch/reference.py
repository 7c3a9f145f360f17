"""Attention over blocks in plain PyTorch: runs on every device and in every dtype, float64 included.

It defines the result that every other backend has to reproduce. The visible tokens are read in place where they lie
together in the pool, or else copied out of their blocks, and then attended to like any tensor.
"""

import torch
import torch.nn.functional as F

from hf_paged_kernels.formats.blocks import Blocks, KVBlocks, gather_tokens
from hf_paged_kernels.modes import matmul
from hf_paged_kernels.step import StepMetadata
from hf_paged_kernels.torch.quantized_attention import quantized_attention
from hf_paged_kernels.torch.scores import MAX_SCORES, attention_scores, softmax, weighted_values, work_dtype
from hf_paged_kernels.torch.visibility import block_visibility, new_visibility, visible_range


def paged_attention(
    query: torch.Tensor,
    blocks: Blocks,
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
    """As `hf_paged_kernels.api.paged_attention`, whose contract this defines."""
    needs_scores = _needs_scores(softcap, sinks, return_lse)
    if step.max_seq_len == 0:
        out = query.new_zeros(*query.shape[:3], blocks.dims[1])
        return (out, _lse_of_nothing(query, sinks)) if return_lse else out
    if not needs_scores and _sees_only_fresh_tokens(step, window, new_kv, key_mask):
        return _causal_attention(query, *new_kv, step, scale)
    if not isinstance(blocks, KVBlocks):
        out, lse = quantized_attention(
            query,
            blocks,
            step,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            new_kv=new_kv,
            key_mask=key_mask,
        )
        return (out, lse) if return_lse else out
    key, value, visible = _visible_tokens(blocks, step, window, new_kv, key_mask)
    if needs_scores:
        out, lse = _attention_by_scores(query, key, value, visible, scale, softcap, sinks)
        return (out, lse) if return_lse else out
    if visible is not None and query.device.type != "cpu":
        out = _guarded_sdpa(query, key, value, visible, scale)
    else:
        out = _sdpa(query, key, value, scale, visible=visible)
        if visible is not None and not bool(out.isfinite().all()):
            # A mask that is added to scores does not hide NaN.
            out, _ = _attention_by_scores(query, key, value, visible, scale, softcap, sinks)
    if step.has_empty_queries or key_mask is not None:
        out = out.masked_fill(~visible.any(-1)[:, None, :, None], 0)
    return out


def is_plain_prefill(
    step: StepMetadata,
    *,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    new_kv: tuple[torch.Tensor, torch.Tensor] | None,
    key_mask: torch.Tensor | None,
    return_lse: bool,
) -> bool:
    """Whether a call is causal attention among fresh tokens, for which PyTorch has kernels of its own."""
    return not _needs_scores(softcap, sinks, return_lse) and _sees_only_fresh_tokens(step, window, new_kv, key_mask)


def _needs_scores(softcap: float | None, sinks: torch.Tensor | None, return_lse: bool) -> bool:
    return softcap is not None or sinks is not None or return_lse


def _sees_only_fresh_tokens(
    step: StepMetadata,
    window: int | None,
    new_kv: tuple[torch.Tensor, torch.Tensor] | None,
    key_mask: torch.Tensor | None,
) -> bool:
    within_window = window is None or step.query_length <= window
    return new_kv is not None and not step.has_past and key_mask is None and within_window


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
    scores = attention_scores(query, key, scale, softcap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    weights, _ = softmax(scores, sinks)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    return weighted_values(weights, value, visible).to(query.dtype), weights.to(query.dtype)


def _causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: StepMetadata, scale: float
) -> torch.Tensor:
    """Attention among the new tokens alone: nothing is cached, leading columns may be padding."""
    if not step.has_empty_queries:
        return _sdpa(query, key, value, scale, is_causal=True)
    # Row by row, without its padding: cheaper than a mask, and the row's result is that of the row alone.
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for row, tokens in enumerate(step.seq_lens.tolist()):
        if tokens > 0:
            inputs = (states[row : row + 1, :, -tokens:] for states in (query, key, value))
            out[row : row + 1, :, -tokens:] = _sdpa(*inputs, scale, is_causal=True)
    return out


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    visible: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with grouped heads; `visible` is bool `[batch, query_length, kv_length]`."""
    mask = None if visible is None else visible[:, None]
    if query.shape[2] == 1 and _shares_reads(query, key):
        # The heads of a group take the place of queries, so that they share each read of a key.
        grouped = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
        return F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale).reshape(
            *query.shape[:3], value.shape[3]
        )
    enable_gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _guarded_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """`_sdpa` in which NaN and infinity reach the queries that see their token, as NaN, and no others.

    It decides nothing by numbers: to look at those of an accelerator is to wait for it.
    """
    has_others = ~(key.isfinite().all(-1) & value.isfinite().all(-1))  # [batch, num_kv_heads, kv_length]
    key, value = (states.nan_to_num(0.0, 0.0, 0.0) for states in (key, value))
    out = _sdpa(query, key, value, scale, visible=visible)
    seen = matmul(visible[:, None].float(), has_others.float().unsqueeze(-1)) > 0
    return out.masked_fill(seen.repeat_interleave(query.shape[1] // key.shape[1], dim=1), torch.nan)


def _shares_reads(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether one query a row is attended to faster as one unit of work for each KV head than for each query head.

    Not if the CPU's threads would then wait for each other: 9 heads on 3 KV heads, 2 threads, fp32, took 226 us at
    2,048 tokens by query heads and 257 us by KV heads; 32 on 8 took 2,034 us and 1,290 us.
    """
    if query.device.type != "cpu" or query.dtype != torch.float32:
        return True
    units, threads = key.shape[0] * key.shape[1], torch.get_num_threads()
    return -(-units // threads) * threads <= 1.2 * units


def _visible_tokens(
    blocks: KVBlocks,
    step: StepMetadata,
    window: int | None,
    new_kv: tuple[torch.Tensor, torch.Tensor] | None,
    key_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The tokens that a step may see.

    Returns:
        Keys and values `[batch, num_kv_heads, kv_length, dim]`, zero for tokens that a row does not have, and what of
        them each query sees, bool `[batch, query_length, kv_length]`; `None` for all.
    """
    past_only = new_kv is not None
    # The entry holds `key_mask`, so that its id stays its own.
    _, (first, last, visible) = step.memo(
        ("visible", window, past_only, id(key_mask), blocks.key.device),
        lambda: (key_mask, _visibility(step, window, past_only, key_mask, blocks.key.device)),
    )
    if last <= first:
        return *new_kv, visible
    run = step.run_of_slots(first, last)
    if run is not None:
        key, value = (tokens[None, :, run] for tokens in blocks.token_planes)  # views
    else:
        index = step.token_index(first, last, blocks)
        key, value = (gather_tokens(plane, index) for plane in blocks.planes)
    if new_kv is not None:
        key, value = (torch.cat(parts, dim=2) for parts in zip((key, value), new_kv, strict=True))
    return key, value, visible


def _visibility(
    step: StepMetadata, window: int | None, past_only: bool, key_mask: torch.Tensor | None, device: torch.device
) -> tuple[int, int, torch.Tensor | None]:
    """The tokens `first..last - 1` to be read from blocks, and the mask over them and the new ones."""
    first, last = visible_range(step, window, past_only=past_only)
    visible = None
    if last > first:
        visible = block_visibility(
            step, first, last, past_only=past_only, window=window, key_mask=key_mask, device=device
        )
    if past_only:
        new_visible = new_visibility(step, window=window, key_mask=key_mask, device=device)
        if visible is None and new_visible is None:
            return first, last, None
        shape = (step.batch, step.query_length)
        if visible is None:
            visible = torch.ones(*shape, last - first, dtype=torch.bool, device=device)
        if new_visible is None:
            new_visible = torch.ones(*shape, step.query_length, dtype=torch.bool, device=device)
        visible = torch.cat([visible, new_visible], dim=-1)
    return first, last, visible


def _attention_by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, a tile of queries at a time."""
    batch, num_heads, query_length, _ = query.shape
    tile = max(1, MAX_SCORES // (batch * num_heads * key.shape[2]))
    outs, lses = [], []
    for start in range(0, query_length, tile):
        rows = slice(start, start + tile)
        scores = attention_scores(query[:, :, rows], key, scale, softcap)
        if visible is not None:
            scores = scores.masked_fill(~visible[:, None, rows], -torch.inf)
        weights, lse = softmax(scores, sinks)
        seen = None if visible is None else visible[:, None, rows]
        outs.append(weighted_values(weights, value, seen).to(query.dtype))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _lse_of_nothing(query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The log-sum-exp `[batch, num_heads, query_length]` of queries that see no key."""
    lse = torch.full(query.shape[:3], -torch.inf, dtype=work_dtype(query), device=query.device)
    return lse if sinks is None else sinks.to(lse.dtype)[None, :, None].expand_as(lse)
