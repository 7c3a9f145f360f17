"""Positions under multimodal rotary embeddings, which a model keeps a part of beside the cache.

An image takes fewer positions than tokens, so all tokens behind it are moved by a shift. Such models keep the shift of
the prompt that was computed last, `rope_deltas`, and take it for that of any cache that they go on from. Here the
positions of a prompt are found when its cache begins, stay with the cache, and are what `generate` is given: through
`_prepare_position_ids_for_generation` of the model, by which it asks for them.
"""

import threading
from collections.abc import Mapping, Sequence
from inspect import unwrap
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from hf_paged_cache.prefill import CACHE_ARGUMENT
from hf_paged_cache.prefix.extra_keys import Span, Spans
from hf_paged_cache.prefix.prompts import Prompts
from hf_paged_cache.prefix.provenance import Positions

STATE = "rope_deltas"
"""The attribute in which a model keeps the shift of its last prompt, int64 `[batch, 1]`."""

_ASKED = "_prepare_position_ids_for_generation"
# The attribute is one for all threads.
_lock = threading.RLock()


def keeps_positions(model: nn.Module) -> bool:
    """Whether a model keeps a part of its positions beside the cache."""
    return bool(_keepers(model))


def why_unknown_positions(model: nn.Module) -> str:
    """Why the positions of a prompt cannot be kept with its cache, though the model keeps a part of them itself; empty
    if they can, or if it does not."""
    asking, keepers = _asking_module(model), _keepers(model)
    if all(asking is not None and keeper is asking.model for keeper in keepers):
        return ""
    return f"the model keeps {STATE} beside the cache, and has no {_ASKED} that could be given them"


def _keepers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, STATE) and _uses_state(type(module))]


def _uses_state(module_class: type) -> bool:
    """Whether a class does more with the attribute than to make it."""
    methods = {name: value for base in reversed(module_class.__mro__) for name, value in vars(base).items()}
    codes = (getattr(unwrap(method), "__code__", None) for name, method in methods.items() if name != "__init__")
    return any(code is not None and STATE in code.co_names for code in codes)


def _asking_module(model: nn.Module) -> Any:
    """The part of a model that generates and has positions of its own kind, which it keeps in `module.model`."""
    for module in model.modules():
        is_own = isinstance(module, GenerationMixin) and hasattr(getattr(module, "model", None), STATE)
        if is_own and getattr(type(module), _ASKED) is not getattr(GenerationMixin, _ASKED):
            return module
    return None


class RopePositions:
    """The positions of prompts of one model.

    Args:
        model: the model; from now on it takes positions from caches that have them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._module = _asking_module(model)
        vars(self._module)[_ASKED] = MethodType(_prepare_position_ids_for_generation, self._module)

    def with_images(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, inputs: Mapping[str, Any], prompts: Prompts
    ) -> tuple[Positions, list[Spans]]:
        """The positions of prompts that come with their images, as the model counts them.

        Returns:
            The positions, and the spans of each row with their shifts. Those whose shift is not certain have no name.
        """
        asked = {"input_ids": input_ids, **inputs, CACHE_ARGUMENT: None}
        if attention_mask is not None:
            asked["attention_mask"] = attention_mask
        with _state_of(self._module):
            positions = _own(self._module, input_ids, asked)
            shifts = getattr(self._module.model, STATE)
        if shifts is None:  # no images
            shifts = torch.zeros((len(input_ids), 1), dtype=torch.long, device=input_ids.device)
        axes = positions.cpu() if positions.ndim == 3 else positions.cpu()[None]
        totals = shifts.cpu().flatten().tolist()
        spans = [
            _shifted(spans, axes[:, row, pad:], int(total))
            for row, (spans, pad, total) in enumerate(zip(prompts.spans, prompts.padding.tolist(), totals, strict=True))
        ]
        return Positions(positions, shifts), spans

    def after_images(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: Any, spans: Sequence[Spans]
    ) -> Positions:
        """The positions of prompts of which all images are cached: right for what is to be computed behind them.

        Args:
            input_ids: `[batch, tokens]`.
            attention_mask: of the same shape.
            cache: holds the beginning of the prompts.
            spans: of each row, those of cached images.
        """
        sums = [[sum(span.name.shift for span in row if span.name is not None)] for row in spans]
        shifts = torch.tensor(sums, device=input_ids.device)
        asked = {"input_ids": input_ids, CACHE_ARGUMENT: cache}
        asked["attention_mask"] = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        with _state_of(self._module, shifts):
            return Positions(_own(self._module, input_ids, asked), shifts)


def _shifted(spans: Spans, positions: torch.Tensor, total: int) -> Spans:
    """Spans with their shifts, by the positions `[axes, tokens]` of their row."""
    found: list[Span] = []
    before: int | None = 0
    for place, span in enumerate(spans):
        after: int | None = total if place == len(spans) - 1 else None
        if span.stop < positions.shape[1]:
            here = positions[-3:, span.stop].unique()
            seen = int(here) - span.stop if len(here) == 1 else None
            after = seen if after in (None, seen) else None
        is_certain = span.name is not None and before is not None and after is not None
        found.append(span._replace(name=span.name._replace(shift=after - before) if is_certain else None))
        before = after
    return tuple(found)


class _state_of:
    """Lets a model have another state meanwhile, and nobody else touch it."""

    def __init__(self, module: Any, state: torch.Tensor | None = None) -> None:
        self._model = module.model
        self._state = state

    def __enter__(self) -> None:
        _lock.acquire()
        self._before = getattr(self._model, STATE)
        setattr(self._model, STATE, self._state)

    def __exit__(self, *_: object) -> None:
        setattr(self._model, STATE, self._before)
        _lock.release()


def _own(module: Any, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """What the model's class answers."""
    return getattr(type(module), _ASKED)(module, inputs_tensor, model_kwargs)


def _prepare_position_ids_for_generation(
    self: Any, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any]
) -> torch.Tensor:
    """In the place of the method of a model: with the cache's positions, if it has some."""
    provenance = getattr(model_kwargs.get(CACHE_ARGUMENT), "provenance", None)
    ids = model_kwargs.get("input_ids", inputs_tensor)
    ids = ids if ids.shape[1] else inputs_tensor
    with _lock:
        if provenance is None or provenance.positions is None or ids.ndim != 2 or ids.is_floating_point():
            return _own(self, inputs_tensor, model_kwargs)
        positions, shifts = provenance.positions.for_rows(len(ids))
        setattr(self.model, STATE, shifts.to(ids.device))
        if ids.shape[1] > positions.shape[-1]:  # the next turn with the same cache
            return _own(self, inputs_tensor, model_kwargs)
        return positions[..., : ids.shape[1]].to(ids.device)
