"""The attention function of `"hf_paged"`: reads a `PagedCache` in its blocks, and anything else as a tensor.

The result is the one of eager attention. Importing this module registers it with transformers, so that
`attn_implementation="hf_paged"` is known.
"""

from typing import Any, Literal

import torch
from hf_paged_kernels import dense_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_paged_cache.errors import UnsupportedError
from hf_paged_cache.hf.attention_arguments import refuse_unknown
from hf_paged_cache.hf.lazy import LazyKV
from hf_paged_cache.hf.masks import ATTENTION_NAME, LazyMask
from hf_paged_cache.hf.tracing import untraced


@untraced
def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function of `"hf_paged"`; arguments as transformers passes them to any attention function.

    Args:
        query: `[batch, num_heads, query_length, key_dim]`
        key, value: `[batch, num_kv_heads, kv_length, dim]`; read in their blocks if they are `LazyKV`.
        attention_mask: a `LazyMask`, or a tensor that broadcasts to `[batch, num_heads, query_length, kv_length]`:
            bool, True where a query sees a key, or a number that is added to the scores. `None`: every query sees
            every key, unless `is_causal` is true.
        is_causal: what to do without a mask; where there is one, it decides. An attribute of `module` by that name is
            not read, as in eager attention.
        s_aux: `[num_heads]`, a logit a head that takes part in the softmax and adds no value (gpt-oss).
        sinks: the same as `[num_heads]`, or one for each query, `[batch, num_heads, query_length, 1]` (Inkling 2).
        position_bias: added to the scores.
        indices: int `[batch, query_length, n]`, the keys that each query sees (DeepSeek V3.2).
        block_indices: the blocks of keys that each query sees, as `module.indexer` chose them (MiniMax M3).

    Returns:
        Output `[batch, query_length, num_heads, value_dim]`, and the weights `[batch, num_heads, query_length,
        kv_length]` if `output_attentions` asks for them.

    Raises:
        UnsupportedError: an argument is not known, or there are two for one thing.
    """
    needs_weights = False
    if kwargs:
        needs_weights = bool(kwargs.get("output_attentions"))
        refuse_unknown(module, kwargs)
    if sinks is None:
        sinks = s_aux
    elif s_aux is not None:
        raise UnsupportedError(f"{type(module).__name__} passes `s_aux` and `sinks` to its attention: expected one")
    is_plain_call = (
        not needs_weights
        and position_bias is None
        and indices is None
        and block_indices is None
        and dropout == 0
        and (sinks is None or sinks.ndim == 1)
    )
    if is_plain_call and isinstance(attention_mask, LazyMask):
        window = _window_in_blocks(query, key, value, attention_mask)
        if window != "not in blocks":
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return _attend_blocks(query, key, value, attention_mask, scale, window, softcap, sinks), None

    key, value = (states.materialize() if isinstance(states, LazyKV) else states for states in (key, value))
    if indices is not None:
        attention_mask = _only_at(indices, attention_mask, key.shape[2])
    if block_indices is not None:
        attention_mask = _only_in_blocks(module, block_indices, attention_mask, query, key, kwargs)
    if not needs_weights and softcap is None and sinks is None:
        if isinstance(attention_mask, LazyMask):
            attention_mask, is_causal = attention_mask.for_sdpa(), True
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=bool(is_causal),
            position_bias=position_bias,
        )
    visible, bias = _visible_and_bias(query, key, attention_mask, is_causal)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if sinks is not None and sinks.ndim > 1:
        key, value, visible, bias = _with_sink_key(sinks, query, key, value, visible, bias)
    out, weights = dense_attention(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        visible=visible,
        bias=bias,
        softcap=softcap,
        sinks=sinks if sinks is not None and sinks.ndim == 1 else None,
        dropout=dropout,
    )
    if sinks is not None and sinks.ndim > 1:
        weights = weights[..., :-1]
    return out.transpose(1, 2).contiguous(), weights


def _window_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: LazyMask
) -> int | Literal["not in blocks"] | None:
    """The window with which this forward pass's keys are read in their blocks; `None` for all of them.

    Not in blocks: they are not those that the pass has put there, or not every key that the mask shows is there.
    """
    if not (isinstance(key, LazyKV) and isinstance(value, LazyKV)) or mask.pattern is None:
        return "not in blocks"
    source = key.source
    step = source.step
    needs_graph = query.requires_grad and torch.is_grad_enabled()  # which would keep blocks that later steps write to
    if (
        needs_graph
        or value.source is not source
        or not source.is_current
        or step.query_length != query.shape[2]
        or step.first_column != mask.first_query
        or source.first_column != mask.first_key
        or key.shape[2] != mask.shape[3]
    ):
        return "not in blocks"
    window = mask.pattern.window
    if source.first_column and (window is None or window > source.window):
        # Moshi puts a plain causal mask on layers with a window: a query sees every key that the layer still shows.
        return key.shape[2] if query.shape[2] == 1 else "not in blocks"
    return window


def _attend_blocks(
    query: torch.Tensor,
    key: LazyKV,
    value: LazyKV,
    mask: LazyMask,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    source = key.source
    step, codec = source.step, source.pool.codec
    reads_new_from_blocks = step.has_past and step.query_length == 1 and step.new_tokens_stored and codec.is_exact
    out = codec.attend(
        query,
        source.pool.blocks,
        step,
        None if reads_new_from_blocks else (key.new, value.new),
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        key_mask=mask.key_mask(step),
    )
    return out.transpose(1, 2).contiguous()


def _visible_and_bias(
    query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None, is_causal: bool | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The mask as bool and as additive part."""
    if isinstance(attention_mask, LazyMask):
        return attention_mask.visible(), None
    if attention_mask is not None:
        return (attention_mask, None) if attention_mask.dtype == torch.bool else (None, attention_mask)
    if not is_causal or query.shape[2] == 1:
        return None, None
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(), None


def _only_at(indices: torch.Tensor, mask: torch.Tensor | None, kv_length: int) -> torch.Tensor:
    """The mask, narrowed to some keys of each query; negative indices stand for none."""
    indices = indices.long()
    selected = torch.zeros(*indices.shape[:2], kv_length + 1, dtype=torch.bool, device=indices.device)
    selected.scatter_(-1, indices.masked_fill(indices < 0, kv_length), True)
    selected = selected[:, None, :, :kv_length]
    if mask is None:
        return selected
    if isinstance(mask, LazyMask):
        mask = mask.visible()
    if mask.dtype == torch.bool:
        return mask & selected
    return mask.masked_fill(~selected, torch.finfo(mask.dtype).min)


def _only_in_blocks(
    module: torch.nn.Module,
    block_indices: torch.Tensor,
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    arguments: dict[str, Any],
) -> torch.Tensor:
    """The mask, narrowed to the blocks that `module.indexer` chose, by its own method, which eager attention uses."""
    build = getattr(getattr(module, "indexer", None), "build_block_mask", None)
    if build is None:
        raise UnsupportedError(
            f"{type(module).__name__} passes `block_indices` to its attention, but its indexer has no "
            '`build_block_mask` that says what they mean. Use attn_implementation="eager"'
        )
    mask = mask.visible() if isinstance(mask, LazyMask) else mask
    return build(block_indices, mask, key.shape[2], query.dtype, query.device, arguments.get("position_ids"))


def _with_sink_key(
    sinks: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Sinks that differ by query as one more key, of score 0 before the bias and with the value 0."""
    shape = (*query.shape[:3], key.shape[2])
    bias = sinks.new_zeros(shape) if bias is None else bias.expand(shape)
    bias = torch.cat([bias, sinks.to(bias.dtype).expand(*shape[:3], 1)], dim=-1)
    key, value = (torch.nn.functional.pad(states, (0, 0, 0, 1)) for states in (key, value))
    if visible is not None:
        visible = torch.nn.functional.pad(visible, (0, 1), value=True)
    return key, value, visible, bias


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
