"""Runs a tiny model of any class: whole, in pieces with a cache, with padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from hf_paged_cache import PagedCache
from tests.support.compat import CACHE_ARGUMENT
from tests.sweep.tiny_configs import FIRST_WORD, VOCABULARY

LENGTH = 41
# A prompt beyond the windows, steps, a chunk, a step; and, for models that take nothing else, steps alone.
PIECES = (slice(0, 29), slice(29, 30), slice(30, 31), slice(31, 40), slice(40, 41))
STEPS = tuple(slice(at, at + 1) for at in range(LENGTH))

CHANNELS = {"kyutai_speech_to_text"}  # models whose tokens are a word and a code of each codebook

Companions = dict[str, Callable[[int], Any]]


def words(rows: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, VOCABULARY, (rows, length), generator=generator)


@dataclass
class Runner:
    """A model, and what it takes beside ids: for each such input a function of the number of rows."""

    model: hf.PreTrainedModel
    companions: Companions

    @classmethod
    def of(cls, model: hf.PreTrainedModel) -> Runner:
        """A runner with the first companions that the model runs with, by preference also with a cache."""
        kinds = list(_companions(model))
        for use_cache in (True, False):
            for companions in kinds:
                runner = cls(model, companions)
                try:
                    runner.logits(words(2, 3, seed=0), use_cache=use_cache)
                except Exception:  # whatever this model makes of inputs that are not for it
                    continue
                return runner
        return cls(model, kinds[0])

    @property
    def is_encoder_decoder(self) -> bool:
        return "decoder_input_ids" in inspect.signature(self.model.forward).parameters

    @torch.no_grad()
    def logits(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Logits `[batch, length, vocabulary]` of `ids`, `[batch, length]`."""
        length = ids.shape[1]
        channels = getattr(self.model.config, "num_codebooks", 0) if self.model.config.model_type in CHANNELS else 0
        if channels:
            ids = ids[..., None].expand(-1, -1, channels + 1)
        prefix = "decoder_" if self.is_encoder_decoder else ""
        inputs: dict[str, Any] = {name: make(len(ids)) for name, make in self.companions.items()}
        inputs[f"{prefix}input_ids"] = ids
        if mask is not None:
            inputs[f"{prefix}attention_mask"] = mask
        logits = self.model(**inputs, **options).logits[:, -length:]
        if logits.shape[1] != length:
            raise ValueError(f"logits of {logits.shape[1]} of {length} tokens")
        return logits

    def in_pieces(
        self,
        ids: Tensor,
        mask: Tensor | None,
        make_cache: Callable[[hf.PreTrainedConfig], Any],
        pieces: Sequence[slice] = PIECES,
    ) -> Tensor:
        """Logits of `ids`, fed piece by piece to a new cache."""
        config = self.model.config
        cache = make_cache(config)
        if self.is_encoder_decoder:
            cache = EncoderDecoderCache(cache, make_cache(config))
        outputs = []
        for piece in pieces:
            seen = None if mask is None else mask[:, : piece.stop]
            outputs.append(self.logits(ids[:, piece], seen, **{CACHE_ARGUMENT: cache}, use_cache=True))
        return torch.cat(outputs, dim=1)


def dynamic(config: hf.PreTrainedConfig) -> DynamicCache:
    return DynamicCache(config=config)


def paged(config: hf.PreTrainedConfig) -> PagedCache:
    return PagedCache(config, block_size=16)


class EncoderOutput(BaseModelOutput):
    """States of an encoder, with what some decoders ask for beside them."""

    attention_mask = None
    router_logits = None
    router_probs = None


def _companions(model: hf.PreTrainedModel) -> Iterator[Companions]:
    """What a model may take: nothing or an image; for an encoder a text, or its own output in its place."""
    parameters = inspect.signature(model.forward).parameters
    if "decoder_input_ids" not in parameters:
        yield {}
        for shape in ((3, 32, 32), (1, 3, 32, 32)):
            if "pixel_values" in parameters:
                pixels = torch.randn(1, *shape, generator=torch.Generator().manual_seed(3))
                yield {"pixel_values": lambda rows, pixels=pixels: pixels.repeat(rows, *[1] * (pixels.ndim - 1))}
        return
    text = words(1, 9, seed=3)
    yield {"input_ids": lambda rows: text.repeat(rows, 1)}
    for width in _widths(model.config):
        states = torch.randn(1, 9, width, generator=torch.Generator().manual_seed(3))
        yield {"encoder_outputs": lambda rows, states=states: EncoderOutput(states.repeat(rows, 1, 1))}


def _widths(config: hf.PreTrainedConfig) -> Iterator[int]:
    for part in (config, *(getattr(config, name, None) for name in ("encoder", "encoder_config", "text_config"))):
        for name in ("d_model", "hidden_size", "embed_dim"):
            width = getattr(part, name, None)
            if isinstance(width, int):
                yield width
