"""The attention implementation `"hf_paged"`: reads a `PagedCache` in its blocks, and anything else like `sdpa`.

Importing this module registers it with transformers, so that `attn_implementation="hf_paged"` is known.
"""

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from hf_paged_kernels import StepMetadata, dense_attention
from transformers import MODEL_MAPPING, AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from hf_paged_cache.lazy import LazyKV, LazyTensor
from hf_paged_cache.tracing import untraced

ATTENTION_NAME = "hf_paged"


class LazyMask(LazyTensor):
    """A causal mask, bool `[batch, 1, query_length, kv_length]`, that is known by its parts and built only if read.

    Attributes:
        padding_mask: the 2-D attention mask, bool `[batch, columns]`; `None` for no padding.
        window: window or chunk size of the pattern; `None` for plain causal.
        first_query: column of the first query.
        first_key: column of the first key.
    """

    padding_mask: torch.Tensor | None
    window: int | None
    first_query: int
    first_key: int

    @classmethod
    def of(
        cls,
        build: Callable[..., torch.Tensor | None],
        shape: tuple[int, int, int, int],
        *,
        device: torch.device,
        padding_mask: torch.Tensor | None,
        window: int | None,
        first_query: int,
        first_key: int,
    ) -> "LazyMask":
        """
        Args:
            build: makes the mask; called with `allow_is_causal_skip`, whether it may return `None` where SDPA's
                `is_causal` does the same.
        """
        mask = cls.make(shape, torch.bool, device)
        mask.padding_mask = padding_mask
        mask.window = window
        mask.first_query = first_query
        mask.first_key = first_key
        mask._build = build
        mask._built = {}
        return mask

    def materialize(self) -> torch.Tensor:
        return self.for_sdpa(allow_is_causal_skip=False)

    def for_sdpa(self, *, allow_is_causal_skip: bool = True) -> torch.Tensor | None:
        """The mask as `scaled_dot_product_attention` takes it; `None` where `is_causal` does the same."""
        if allow_is_causal_skip not in self._built:
            self._built[allow_is_causal_skip] = self._build(allow_is_causal_skip=allow_is_causal_skip)
        return self._built[allow_is_causal_skip]

    def key_mask(self, step: StepMetadata) -> torch.Tensor | None:
        """The tokens of each row that may be seen, bool `[batch, max_seq_len]`; `None` if all may."""
        if self.padding_mask is None:
            return None
        if ("key_mask", step) not in self._built:
            self._built["key_mask", step] = _key_mask(self.padding_mask[:, : step.num_columns], step)
        return self._built["key_mask", step]


def _key_mask(padding_mask: torch.Tensor, step: StepMetadata) -> torch.Tensor | None:
    # Worth a wait for the device, once a step: without holes there are no masked tiles, and rows may share reads.
    attended = padding_mask.cpu().numpy()
    if np.array_equal(attended, np.arange(step.num_columns)[None] >= step.padding[:, None]):
        return None
    columns = np.arange(step.max_seq_len)[None] + step.padding[:, None]
    columns = torch.from_numpy(np.minimum(columns, step.num_columns - 1).astype(np.int64))
    return padding_mask.gather(1, columns.to(padding_mask.device, non_blocking=True))


@untraced
def paged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: PreTrainedConfig | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask function of `"hf_paged"`; arguments as transformers passes them to any mask function.

    Returns:
        A `LazyMask` for causal, sliding and chunked patterns with or without padding; for everything else (image
        blocks, packed sequences, bidirectional attention) what `sdpa` gets. Models that know no attention
        implementations (Bloom, MPT) run their own code whatever is asked for, and get the mask it expects.
    """
    build = partial(
        sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        use_vmap=use_vmap,
        device=device,
    )
    if config is not None and not _calls_attention_interface(type(config)):
        return eager_mask(**build.keywords, dtype=dtype)
    # transformers allows the skip exactly when nothing was added to the causal pattern.
    is_standard = allow_is_causal_skip and not allow_is_bidirectional_skip and not use_vmap
    if not is_standard or not isinstance(q_offset, int):
        return build(allow_is_causal_skip=allow_is_causal_skip)
    return LazyMask.of(
        build,
        (batch_size, 1, q_length, kv_length),
        device=torch.device(device),
        padding_mask=attention_mask,
        window=local_size,
        first_query=q_offset,
        first_key=kv_offset,
    )


@lru_cache
def _calls_attention_interface(config_class: type[PreTrainedConfig]) -> bool:
    """Whether the models of a config let an attention implementation be chosen, as far as their source tells."""
    model_class = MODEL_MAPPING.get(config_class, None)
    model_class = model_class[0] if isinstance(model_class, tuple | list) else model_class
    if model_class is None:
        return True
    return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[model_class.__module__])


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
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function of `"hf_paged"`; arguments as transformers passes them to any attention function.

    Args:
        query: `[batch, num_heads, query_length, key_dim]`
        key, value: `[batch, num_kv_heads, kv_length, dim]`; read in their blocks if they are `LazyKV`.

    Returns:
        Output `[batch, query_length, num_heads, value_dim]`, and the weights `[batch, num_heads, query_length,
        kv_length]` if `output_attentions` asks for them.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    needs_weights = bool(kwargs.get("output_attentions"))
    is_plain_call = not needs_weights and position_bias is None and dropout == 0 and is_causal is not False
    if is_plain_call and _reads_blocks(query, key, value, attention_mask):
        return _attend_blocks(query, key, value, attention_mask, scale, softcap, s_aux), None

    key, value = (states.materialize() if isinstance(states, LazyKV) else states for states in (key, value))
    if not needs_weights and softcap is None and s_aux is None:
        if isinstance(attention_mask, LazyMask):
            attention_mask = attention_mask.for_sdpa()
        if position_bias is not None:
            kwargs["position_bias"] = position_bias
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    visible, bias = _visible_and_bias(module, query, key, attention_mask, is_causal)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    out, weights = dense_attention(
        query, key, value, scale=scale, visible=visible, bias=bias, softcap=softcap, sinks=s_aux, dropout=dropout
    )
    return out.transpose(1, 2).contiguous(), weights


def _reads_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None
) -> bool:
    """Whether keys and values are those that this forward pass has put in blocks, under a pattern blocks know."""
    if not (isinstance(key, LazyKV) and isinstance(value, LazyKV) and isinstance(attention_mask, LazyMask)):
        return False
    source = key.source
    step = source.step
    needs_graph = query.requires_grad and torch.is_grad_enabled()  # which would keep blocks that later steps write to
    return (
        not needs_graph
        and value.source is source
        and source.is_current
        and not source.is_chunked
        and step.query_length == query.shape[2]
        and step.first_column == attention_mask.first_query
        and source.first_column == attention_mask.first_key
        and key.shape[2] == attention_mask.shape[3]
    )


def _attend_blocks(
    query: torch.Tensor,
    key: LazyKV,
    value: LazyKV,
    mask: LazyMask,
    scale: float,
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
        window=mask.window,
        softcap=softcap,
        sinks=sinks,
        key_mask=mask.key_mask(step),
    )
    return out.transpose(1, 2).contiguous()


def _visible_and_bias(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The mask as bool and as additive part, with the meaning that `sdpa` gives to a missing one."""
    if isinstance(attention_mask, LazyMask):
        return attention_mask.materialize(), None
    if attention_mask is not None:
        return (attention_mask, None) if attention_mask.dtype == torch.bool else (None, attention_mask)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal or query.shape[2] == 1:
        return None, None
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(), None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, paged_mask)
