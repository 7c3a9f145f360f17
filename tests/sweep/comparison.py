"""One model class under eager attention and under `"hf_paged"`: without a cache, with one, padded, and later tokens.

The reference is transformers' own: the same weights under eager attention, with `DynamicCache` where a cache is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.models.auto import modeling_auto

from hf_paged_cache import ATTENTION_NAME, PagedCacheError
from hf_paged_cache.hf import attention, lazy
from tests.sweep.runner import LENGTH, PIECES, STEPS, Runner, dynamic, paged, words
from tests.sweep.tiny_configs import FIRST_WORD, PAD, VOCABULARY, tiny_config

SHORT = 23  # tokens of the padded row
TOLERANCE = 1e-3  # of the largest logit
GAINS = (2.5, 1.0, 0.3)
MAX_PARAMETERS = 45_000_000

KINDS = {
    "CausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "Seq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "ImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "SpeechSeq2Seq": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}


@dataclass(frozen=True)
class ModelClass:
    """A class that an auto class of transformers knows."""

    name: str
    model_type: str
    kind: str

    def __str__(self) -> str:
        return self.name

    def build(self, attention_name: str, gain: float) -> hf.PreTrainedModel:
        """A tiny model in fp32 with the same sharp weights for every attention."""
        model_class = getattr(hf, self.name)
        config = tiny_config(model_class.config_class or hf.CONFIG_MAPPING[self.model_type])
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(config).parameters())
        if size > MAX_PARAMETERS:
            raise ValueError(f"{size / 1e6:.0f}M parameters whose sizes no field of the config sets")
        torch.manual_seed(0)
        model = model_class._from_config(config, attn_implementation=attention_name)
        _sharpen(model, gain)
        return model.eval()


def model_classes() -> list[ModelClass]:
    """Every class of the installed transformers, once."""
    classes: dict[str, ModelClass] = {}
    installed = set(dir(hf))  # `hasattr` would import every model
    for kind, names in KINDS.items():
        for model_type, name in names.items():
            if name in installed:
                classes.setdefault(name, ModelClass(name, model_type, kind))
    return list(classes.values())


@dataclass
class Outcome:
    """What became of one class.

    Attributes:
        not_built: why there is no tiny model of it that runs under eager attention; empty if there is.
        refused: the message with which `"hf_paged"` is refused when the model is made; empty if it is not.
        how: how its attention reads a `PagedCache`.
        notes: what differs between transformers' own ways to run it, and what else is refused.
        wrong: where `"hf_paged"` or a `PagedCache` gives something else than the reference.
    """

    not_built: str = ""
    refused: str = ""
    how: str = ""
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def compare(model_class: ModelClass) -> Outcome:
    """Runs a class and its reference."""
    try:
        eager, gain, ids, base = _reference(model_class)
    except Exception as error:  # whatever an incomplete config makes of a model
        return Outcome(not_built=_first_line(error))
    outcome = Outcome()
    padded, mask = _padded(ids)
    real = mask.bool()
    sees_later = distance(base[:, :-1], eager.logits(_changed(ids, -1), use_cache=False)[:, :-1]) > TOLERANCE
    if sees_later:
        outcome.notes.append("earlier logits depend on later tokens")
    pieces, in_pieces, failure = _cached(eager, ids)
    if in_pieces is None:
        outcome.notes.append(f"no cache: {failure}")
    elif not sees_later and distance(base, in_pieces) > TOLERANCE:
        outcome.notes.append("another result with a cache than without")
    padded_base = _attempt(lambda: eager.logits(padded, mask, use_cache=False))
    padded_in_pieces = None if in_pieces is None else _attempt(lambda: eager.in_pieces(padded, mask, dynamic, pieces))
    if padded_base is None or (in_pieces is not None and padded_in_pieces is None):
        outcome.notes.append("no left padding")
    elif (
        distance(padded_base[real], eager.logits(_other_padding(padded, mask), mask, use_cache=False)[real]) > TOLERANCE
    ):
        outcome.notes.append("left padding: the result depends on the ids that stand there")
        padded_base = padded_in_pieces = None
    elif (
        in_pieces is not None and not outcome.notes and distance(padded_base[real], padded_in_pieces[real]) > TOLERANCE
    ):
        outcome.notes.append("left padding: another result with a cache than without")
        theirs = _attempt(lambda: eager.in_pieces(padded, mask, paged, pieces))
        if theirs is not None and distance(padded_in_pieces[real], theirs[real]) > TOLERANCE:
            # Steps see padding, which a `DynamicCache` holds and a `PagedCache` does not.
            outcome.notes.append("left padding: another one with a PagedCache")
            padded_in_pieces = None

    if in_pieces is not None:
        _check(
            outcome,
            "eager attention over a PagedCache",
            [
                (in_pieces, lambda: eager.in_pieces(ids, None, paged, pieces)),
                (padded_in_pieces, lambda: eager.in_pieces(padded, mask, paged, pieces)),
            ],
            real,
        )
    try:
        model = model_class.build(ATTENTION_NAME, gain)
    except KeyError as error:  # of a model that picks among attention classes of its own
        outcome.refused = f"KeyError: {error}"
        model = model_class.build("eager", gain)
        model.set_attn_implementation(ATTENTION_NAME)
    ours = Runner(model, eager.companions)
    try:
        result = ours.logits(ids, use_cache=False)
    except PagedCacheError as error:
        outcome.refused = f"{type(error).__name__}: {error}"
        return outcome
    if distance(base, result) > TOLERANCE:
        outcome.wrong.append(f"hf_paged without a cache: off by {distance(base, result):.1e}")
    moved = distance(result[:, :-1], ours.logits(_changed(ids, -1), use_cache=False)[:, :-1])
    if moved > TOLERANCE and not sees_later:
        outcome.wrong.append(f"hf_paged sees later tokens: moved by {moved:.1e}")
    _check(
        outcome,
        "hf_paged without a cache, padded",
        [(padded_base, lambda: ours.logits(padded, mask, use_cache=False))],
        real,
    )
    if in_pieces is not None:
        with CountedReads() as reads:
            _check(
                outcome,
                "hf_paged over a PagedCache",
                [
                    (in_pieces, lambda: ours.in_pieces(ids, None, paged, pieces)),
                    (padded_in_pieces, lambda: ours.in_pieces(padded, mask, paged, pieces)),
                ],
                real,
            )
        outcome.how = reads.described()
    return outcome


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, of the largest logit; infinite if one is not finite where the other is."""
    result = (one.float() - other.float()).abs().max().item() / max(one.abs().max().item(), 1e-6)
    return float("inf") if result != result else result


class CountedReads:
    """Counts, while it is entered, how attention reads keys: in their blocks, or copied out of them."""

    def __enter__(self) -> CountedReads:
        self.in_blocks = self.copies = 0
        self._attend, self._gather = attention._attend_blocks, lazy.LazyKV._gather

        def attend(*arguments: Any) -> Tensor:
            self.in_blocks += 1
            return self._attend(*arguments)

        def gather(states: lazy.LazyKV) -> Tensor:
            self.copies += 1
            return self._gather(states)

        attention._attend_blocks, lazy.LazyKV._gather = attend, gather
        return self

    def __exit__(self, *_: Any) -> None:
        attention._attend_blocks, lazy.LazyKV._gather = self._attend, self._gather

    def described(self) -> str:
        if self.in_blocks and self.copies:
            return "some in blocks, some copied"
        if self.in_blocks:
            return "in blocks"
        return "copied" if self.copies else "nothing is paged"


@lru_cache(maxsize=1)
def _reference(model_class: ModelClass) -> tuple[Runner, float, Tensor, Tensor]:
    """The eager model, the gain with which its logits are finite, the prompt, and its logits."""
    ids = words(1, LENGTH, seed=1)
    for gain in GAINS:
        runner = Runner.of(model_class.build("eager", gain))
        logits = runner.logits(ids, use_cache=False)
        if logits.isfinite().all():
            return runner, gain, ids, logits
    raise ValueError("eager attention gives numbers that are not finite")


def _sharpen(model: torch.nn.Module, gain: float) -> None:
    """Weights so large that attention matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * (gain / parameter.shape[-1] ** 0.5))
            else:
                parameter.add_(0.1 * noise)


def _changed(ids: Tensor, at: int) -> Tensor:
    ids = ids.clone()
    ids[:, at] = (ids[:, at] - FIRST_WORD + 5) % (VOCABULARY - FIRST_WORD) + FIRST_WORD
    return ids


def _padded(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The prompt beside a shorter one, padded on the left, and their attention mask."""
    ids = torch.cat([ids, words(1, LENGTH, seed=2)])
    mask = torch.ones_like(ids)
    mask[1, : LENGTH - SHORT] = 0
    ids[1, : LENGTH - SHORT] = PAD
    return ids, mask


def _other_padding(ids: Tensor, mask: Tensor) -> Tensor:
    return ids.where(mask.bool(), words(*ids.shape, seed=4))


def _cached(runner: Runner, ids: Tensor) -> tuple[Sequence[slice], Tensor | None, str]:
    """How the model takes a cache, in pieces or only in steps, the logits with it, and else why it takes none."""
    failure = ""
    for pieces in (PIECES, STEPS):
        try:
            return pieces, runner.in_pieces(ids, None, dynamic, pieces), ""
        except Exception as error:  # of transformers, with its own cache
            failure = failure or _first_line(error)
    return PIECES, None, failure


def _attempt(run: Callable[[], Tensor]) -> Tensor | None:
    try:
        return run()
    except Exception:  # of transformers, with its own cache or none
        return None


def _check(outcome: Outcome, what: str, pairs: list[tuple[Tensor | None, Callable[[], Tensor]]], real: Tensor) -> None:
    """Compares what is expected, if anything is, with what a run gives."""
    for expected, run in pairs:
        if expected is None:
            continue
        try:
            actual = run()
        except PagedCacheError as error:
            outcome.notes.append(f"refused, {what}: {_first_line(error)}")
            continue
        except Exception as error:  # the reference ran: whatever this is, it is a fault
            outcome.wrong.append(f"{what}: {_first_line(error)}")
            continue
        if len(expected) > 1:
            expected, actual = expected[real], actual[real]
        off = distance(expected, actual)
        if not off < TOLERANCE:
            outcome.wrong.append(f"{what}: off by {off:.1e}")


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}".replace("|", "/")[:160].strip()
