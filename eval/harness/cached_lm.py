"""A model of lm-evaluation-harness that reads every context through a cache.

The harness itself computes log-likelihoods in one forward pass, in which no cache is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from eval.common.variants import cache_argument
from eval.quality.caches import CacheKind, quantized_tokens
from hf_paged_cache.prefill import CACHE_ARGUMENT


class NothingQuantizedError(RuntimeError):
    """No forward pass read a quantized token: results would say nothing about the cache."""


class CachedLM(HFLM):
    """Every batch gets a new cache.

    Args:
        model: a decoder-only model; its attention implementation is changed to the cache's.
        tokenizer: its tokenizer.
        kind: the cache.
        chunk: tokens in a forward pass while log-likelihoods are computed; each pass reads what is stored of those
            before it. Generation stores its prompts as `generate` does.
        **options: of the harness's `HFLM`, such as `batch_size` and `max_length`.

    Attributes:
        passes: forward passes so far.
        quantized_passes: those that found quantized tokens in their cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        kind: CacheKind,
        *,
        chunk: int = 64,
        **options: Any,
    ) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, **options)
        model.set_attn_implementation(kind.attn_implementation)
        self.passes = self.quantized_passes = 0
        self._kind = kind
        self._chunk = chunk

    def check(self) -> None:
        """Raises:
        NothingQuantizedError: the cache is to quantize, but nothing quantized was read.
        """
        if not self._kind.is_exact and not self.quantized_passes:
            raise NothingQuantizedError(
                f"{self._kind.label}: none of {self.passes} forward passes read a quantized token, so the results say "
                "nothing about it. The contexts are too short, or the chunk is too long"
            )

    def _model_call(
        self, inps: torch.Tensor, attn_mask: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits `[batch, tokens, vocabulary]`. Rows are padded on the right, which no earlier token sees."""
        with self._new_cache() as cache, torch.no_grad():
            options = {cache_argument(self.model): cache}
            return torch.cat([self.model(piece, **options).logits for piece in inps.split(self._chunk, dim=1)], dim=1)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        with self._new_cache() as cache:
            return super()._model_generate(context, max_length, stop, **generation_kwargs, **{CACHE_ARGUMENT: cache})

    @contextmanager
    def _new_cache(self) -> Iterator[Cache]:
        """A cache, and a count of the forward passes inside the `with` block."""
        cache = self._kind.make(self.model)

        def count(*_: Any) -> None:
            self.passes += 1
            self.quantized_passes += quantized_tokens(cache) > 0

        hook = self.model.register_forward_pre_hook(count)
        try:
            yield cache
        finally:
            hook.remove()
