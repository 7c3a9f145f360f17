"""How a cache learns of the forward pass that is about to run.

`Cache.update` is not told the attention mask. But before the layers run, transformers sizes its masks by asking the
cache, in `masking_utils._preprocess_mask_arguments`, and there the 2-D mask and the positions are at hand. The question
changes nothing: the cache keeps what it saw, and the first `update` takes it if the same call of `forward` makes it.
"""

import sys
from types import FrameType
from typing import Any, NamedTuple

import torch

from hf_paged_cache.hf.library_names import MASK_ARGUMENTS, MASK_POSITIONS, MASK_VARIABLE, PREFILL

# The cache's own methods, those of an `EncoderDecoderCache` around it, and wrappers of PyTorch's compiler.
_MAX_FRAMES = 8


class MaskRequest(NamedTuple):
    """What a model's `forward` builds its masks from.

    Attributes:
        num_new: columns that the pass adds.
        attention_mask: the 2-D mask, bool `[batch, columns]`; `None` if there is no padding.
        position_ids: int64 `[batch or 1, num_new]`; `None` for models that know none, or know more than one a token.
        forward: the frame of the call.
    """

    num_new: int
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    forward: FrameType

    @property
    def has_positions_of_the_caller(self) -> bool:
        """Whether the positions were passed to the model, as `generate` does. Some models that are given none begin at
        0 in every pass, whatever cache they have."""
        frame, outermost = self.forward, self.position_ids
        while frame is not None and not _runs(frame, "generate"):  # around which other modules may run
            if _runs(frame, "forward") and "position_ids" in frame.f_locals:
                outermost = frame.f_locals["position_ids"]
            frame = frame.f_back
        return outermost is not None

    @property
    def is_running(self) -> bool:
        """Whether the caller runs inside that call of `forward`; not if it has failed, and another one was begun."""
        frame = sys._getframe(1)
        while frame is not None and frame is not self.forward:
            frame = frame.f_back
        return frame is not None


def current_mask_request(num_new: int, earlier: MaskRequest | None) -> MaskRequest | None:
    """The mask for whose sizes the cache is being asked; `None` if the question comes from elsewhere.

    Without it padding is stored like any other token: more memory, the same result.

    Args:
        num_new: columns of the question.
        earlier: the last request, which is returned if another mask of the same pass is being built.
    """
    building = _find(sys._getframe(1), MASK_ARGUMENTS, _MAX_FRAMES)
    forward = building and _find(building, "forward")
    if forward is None:
        return None
    if earlier is not None and earlier.forward is forward and earlier.num_new == num_new:
        return earlier
    attention_mask, position_ids = map(building.f_locals.get, (MASK_VARIABLE, MASK_POSITIONS))
    if attention_mask is not None and not _is_tensor(attention_mask, 2):
        return None
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        attention_mask = attention_mask.bool()  # a compiled frame may not have converted it yet
    return MaskRequest(num_new, attention_mask, position_ids if _is_tensor(position_ids, 2) else None, forward)


def prompt_without_new_tokens(request: MaskRequest, cache: Any) -> int | None:
    """The length of the prompt that `generate` computes in the pass, if all of it is taken for tokens of `cache`.

    It is `None` otherwise. `generate` cuts a prompt by the number of cached tokens, and one that is not longer is cut
    the wrong way round.
    """
    frame = _find(request.forward, PREFILL)
    if frame is None:
        return None
    given = frame.f_locals.get("cache")
    if getattr(given, "self_attention_cache", given) is not cache:
        return None
    num_new, input_ids, attention_mask, config = map(
        frame.f_locals.get, ("next_sequence_length", "input_ids", "attention_mask", "generation_config")
    )
    if num_new is None or num_new > 0:
        return None
    if num_new == 0 and getattr(config, "prefill_chunk_size", None) is not None:  # where 0 may stand for `None`
        mask_length = attention_mask.shape[1] if _is_tensor(attention_mask, 2) else frame.f_locals.get("mask_length")
        return input_ids.shape[1] if mask_length == input_ids.shape[1] else None
    return input_ids.shape[1]


def _find(frame: FrameType | None, name: str, max_frames: int = sys.maxsize) -> FrameType | None:
    """The nearest frame of a function of that name, from `frame` outwards."""
    while frame is not None and max_frames > 0:
        if _runs(frame, name):
            return frame
        frame, max_frames = frame.f_back, max_frames - 1
    return None


def _runs(frame: FrameType, name: str) -> bool:
    """Whether a frame is of a function of that name, or of a part of it that was compiled."""
    called = frame.f_code.co_name
    return name in called and (called == name or called.startswith(f"torch_dynamo_resume_in_{name}_at_"))


def _is_tensor(value: Any, ndim: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == ndim
