"""The mask function of `"hf_paged"`: what of a pass each query may see, as facts that attention can ask for.

Model code sees the mask that it sees under eager attention, the one convention that every model of transformers knows:
a missing mask hides nothing, and a mask is added to the scores. So nothing has to be inferred from a mask that is not
there.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from hf_paged_kernels import StepMetadata
from transformers import AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from hf_paged_cache.errors import InvalidArgumentError
from hf_paged_cache.hf.lazy import LazyTensor
from hf_paged_cache.hf.tracing import untraced

logger = logging.getLogger(__name__)

ATTENTION_NAME = "hf_paged"


class Pattern(NamedTuple):
    """A pattern that attention over blocks knows: causal, with or without a sliding window.

    Attributes:
        window: tokens that a query sees, itself included; `None` for all before it.
    """

    window: int | None


class LazyMask(LazyTensor):
    """The mask of a pass, `[batch, 1, query_length, kv_length]`, that is known by its parts.

    A pattern that blocks can be read by is built only if it is read.

    Read, it is the mask of eager attention in the model's dtype: 0 where a query sees a key, elsewhere the lowest
    number.

    Attributes:
        padding_mask: the 2-D attention mask, bool `[batch, columns]`; `None` for no padding.
        pattern: what blocks can be read by; `None` for any other pattern (chunks, image blocks, packed sequences).
        first_query: column of the first query.
        first_key: column of the first key.
    """

    padding_mask: torch.Tensor | None
    pattern: Pattern | None
    first_query: int
    first_key: int

    @classmethod
    def of(
        cls,
        build: Callable[..., torch.Tensor | None],
        shape: tuple[int, int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        padding_mask: torch.Tensor | None,
        pattern: Pattern | None,
        first_query: int,
        first_key: int,
    ) -> "LazyMask":
        """
        Args:
            build: makes the bool mask, True where a query sees a key; called with `allow_is_causal_skip`, whether it
                may return `None` where SDPA's `is_causal` does the same.
        """
        mask = cls.make(shape, dtype, device)
        mask.padding_mask = padding_mask
        mask.pattern = pattern
        mask.first_query = first_query
        mask.first_key = first_key
        mask._build = build
        mask._built = {}
        return mask

    def materialize(self) -> torch.Tensor:
        if "bias" not in self._built:
            visible = self.visible()
            hidden = torch.finfo(self.dtype).min
            bias = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
            self._built["bias"] = bias.masked_fill_(~visible, hidden)
        return self._built["bias"]

    def visible(self) -> torch.Tensor:
        """The mask as bool, True where a query sees a key."""
        if "visible" not in self._built:
            self._built["visible"] = self._build(allow_is_causal_skip=False)
        return self._built["visible"]

    def for_sdpa(self) -> torch.Tensor | None:
        """The mask as `scaled_dot_product_attention` takes it; `None` where its `is_causal` does the same."""
        if self.pattern is None:
            return self.visible()
        if "sdpa" not in self._built:
            self._built["sdpa"] = self._build(allow_is_causal_skip=True)
        return self._built["sdpa"]

    def key_mask(self, step: StepMetadata) -> torch.Tensor | None:
        """The tokens of each row that may be seen, bool `[batch, max_seq_len]`; `None` if all may.

        Raises:
            InvalidArgumentError: the mask shows padding that was not stored.
        """
        if self.padding_mask is None:
            return None
        if ("key_mask", step) not in self._built:
            self._built["key_mask", step] = _key_mask(self.padding_mask[:, : step.num_columns], step)
        return self._built["key_mask", step]


def _key_mask(padding_mask: torch.Tensor, step: StepMetadata) -> torch.Tensor | None:
    # Worth a wait for the device, once a step: without holes there are no masked tiles, and rows may share reads.
    attended = padding_mask.cpu().numpy()
    stored = np.arange(step.num_columns)[None] >= step.padding[:, None]
    if np.array_equal(attended, stored):
        return None
    if (attended & ~stored).any():
        raise InvalidArgumentError(
            f"attention_mask shows {int((attended & ~stored).sum())} columns that were padding when the cache was "
            "filled, and so were not stored. Keep the zeros of the prompt's mask, or start with a new cache; "
            "`cache.rollback()` takes this pass back"
        )
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
) -> LazyMask | None:
    """The mask function of `"hf_paged"`; arguments as transformers passes them to any mask function.

    Returns:
        A `LazyMask`, also where `sdpa` would get none and infer causality; `None`, as in eager attention, where every
        query sees every key and transformers allows to say so.
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
        use_vmap=use_vmap,
        device=device,
    )
    pattern = pattern_of(mask_function) if isinstance(q_offset, int) else None
    if pattern is None:
        # At once: functions given by model code are mapped over indices, which inside of an operation does not work.
        visible = build(allow_is_causal_skip=False, allow_is_bidirectional_skip=allow_is_bidirectional_skip)
        if visible is None:
            return None
        build = _Built(visible)
    return LazyMask.of(
        build,
        (batch_size, 1, q_length, kv_length),
        dtype=dtype,
        device=torch.device(device),
        padding_mask=attention_mask,
        pattern=pattern,
        first_query=q_offset,
        first_key=kv_offset,
    )


class _Built(NamedTuple):
    """A mask that is there already, in the place of a function that builds it."""

    visible: torch.Tensor

    def __call__(self, **options: Any) -> torch.Tensor:
        return self.visible


_AND_CODE = and_masks(causal_mask_function).__code__
_SLIDING_CODE = sliding_window_overlay(1).__code__


def pattern_of(mask_function: Callable) -> Pattern | None:
    """What a mask function of transformers hides, by its code; `None` unless that is a pattern that blocks know.

    A function that is not recognized is evaluated, which is always right.
    """
    if mask_function is causal_mask_function:
        return Pattern(None)
    if getattr(mask_function, "__code__", None) is not _AND_CODE:
        return None
    parts = mask_function.__closure__[0].cell_contents  # the only variable that `and_masks` binds
    if not isinstance(parts, tuple) or len(parts) != 2 or causal_mask_function not in parts:
        return None
    overlay = parts[0] if parts[1] is causal_mask_function else parts[1]
    if getattr(overlay, "__code__", None) is not _SLIDING_CODE:
        return None
    window = overlay.__closure__[0].cell_contents
    return Pattern(window) if isinstance(window, int) and window > 0 else None


if pattern_of(sliding_window_causal_mask_function(2)) != Pattern(2):
    logger.warning(
        'This release of transformers builds the masks of sliding windows in a way that attn_implementation="hf_paged" '
        "does not recognize: layers with a window are attended to through copies of their keys, which is slower."
    )

AttentionMaskInterface.register(ATTENTION_NAME, paged_mask)
