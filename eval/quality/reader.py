"""How a model reads text through a cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.common.variants import cache_argument
from eval.quality.caches import CacheKind


@contextmanager
def kept_attention(model: PreTrainedModel) -> Iterator[None]:
    """Lets readers choose the model's attention implementation, and restores it on leaving."""
    before = model.config._attn_implementation
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class Reader:
    """A model that reads text through a new cache, piece by piece.

    The tokens of a piece attend to what the cache gives back of the pieces before it. Readers of caches that need
    different attention implementations can take turns, inside `kept_attention`.
    """

    def __init__(self, model: PreTrainedModel, kind: CacheKind) -> None:
        self.cache = kind.make(model)
        self._model = model
        self._attn_implementation = kind.attn_implementation
        takes_option = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._without_logits = {"logits_to_keep": 1} if takes_option else {}

    def skim(self, ids: torch.Tensor, chunk: int) -> None:
        """Stores tokens `[1, tokens]`, `chunk` in a forward pass."""
        for start in range(0, ids.shape[1], chunk):
            self._forward(ids[:, start : start + chunk], **self._without_logits)

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Stores tokens `[1, tokens]` in one forward pass.

        Returns:
            Logarithms of the probabilities of what follows each token, float32 `[tokens, vocabulary]`.
        """
        return self._forward(ids).logits[0].float().log_softmax(dim=-1)

    @torch.no_grad()
    def _forward(self, ids: torch.Tensor, **options: int) -> Any:
        if self._model.config._attn_implementation != self._attn_implementation:
            self._model.set_attn_implementation(self._attn_implementation)
        return self._model(ids, **{cache_argument(self._model): self.cache}, **options)
