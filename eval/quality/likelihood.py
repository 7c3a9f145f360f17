"""How well a model predicts text when it reads the history out of a cache.

The first part of a window is stored, the rest is read in chunks: what a chunk predicts rests on what the cache gives
back of everything before it. All caches read the same chunk in turn, so that the probabilities they are compared with,
one for each word of the vocabulary, are kept for one chunk only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from eval.common.memory import cache_bytes
from eval.quality.bench import Bench, Row
from eval.quality.caches import REFERENCE, CacheKind
from eval.quality.journal import Measurement
from eval.quality.reader import Reader
from eval.quality.text import Text, windows

QUARTERS = 4


class _Scores:
    """What a cache made of a window, token by token."""

    def __init__(self) -> None:
        self._kl: list[float] = []
        self._nll: list[float] = []
        self._agrees: list[bool] = []

    def add(self, log_probs: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> None:
        """Takes what a chunk predicts, both `[tokens, vocabulary]`, and what came, `[tokens]`."""
        self._kl += (reference.exp() * (reference - log_probs)).sum(dim=-1).tolist()
        self._nll += torch.nn.functional.nll_loss(log_probs, targets, reduction="none").tolist()
        self._agrees += (log_probs.argmax(dim=-1) == reference.argmax(dim=-1)).tolist()

    def measurement(self, num_bytes: int) -> Measurement:
        """For the journal; its figures have more digits than any table shows."""
        kl, nll = ([float(f"{value:.5g}") for value in values] for values in (self._kl, self._nll))
        return {"kl": kl, "nll": nll, "agrees": [*map(int, self._agrees)], "bytes": num_bytes}


@dataclass(frozen=True)
class Window:
    """A piece of text, `ids` int64 `[1, context + 1]`. The first `stored` tokens are only stored."""

    section: ClassVar = "likelihood"

    name: str
    ids: torch.Tensor
    stored: int

    @property
    def context(self) -> int:
        return self.ids.shape[1] - 1

    @property
    def num_tokens(self) -> int:
        return self.context

    @property
    def scored(self) -> int:
        return self.context - self.stored

    def passes(self, bench: Bench) -> list[int]:
        """Tokens of each forward pass."""
        parts = ((self.stored, bench.prefill_chunk), (self.scored, bench.chunk))
        return [min(chunk, total - start) for total, chunk in parts for start in range(0, total, chunk)]

    def measure(self, bench: Bench, kinds: Sequence[CacheKind]) -> None:
        """Reads the window through these caches, and through the reference in any case."""
        readers = self._store(bench, kinds)
        scores = {kind: _Scores() for kind in readers}
        ids = self.ids.to(bench.model.device)
        for start in range(self.stored, self.context, bench.chunk):
            end = min(start + bench.chunk, self.context)
            expected = None
            for kind, reader in [*readers.items()]:
                with bench.attempt(kind, str(self)):
                    log_probs = reader.read(ids[:, start:end])
                    expected = log_probs if expected is None else expected
                    scores[kind].add(log_probs, expected, ids[0, start + 1 : end + 1])
                if kind.name in bench.failures:
                    del readers[kind]
            bench.advance((end - start) * len(kinds))
        for kind in kinds:
            if kind in readers:
                bench.record(self, kind, scores[kind].measurement(cache_bytes(readers[kind].cache).used))

    def _store(self, bench: Bench, kinds: Sequence[CacheKind]) -> dict[CacheKind, Reader]:
        """Readers that have stored the first part: the reference's, then those of caches that do not fail."""
        readers = {}
        for kind in dict.fromkeys([bench.kinds[REFERENCE], *kinds]):
            with bench.attempt(kind, str(self)):
                reader = Reader(bench.model, kind)
                reader.skim(self.ids[:, : self.stored].to(bench.model.device), bench.prefill_chunk)
                readers[kind] = reader
            if kind in kinds:
                bench.advance(self.stored)
        return readers

    def __str__(self) -> str:
        return f"{self.section}, context {self.context}, {self.name}"


def make_windows(
    tokenizer: PreTrainedTokenizerBase, text: Text, context: int, stored: float, limit: int
) -> list[Window]:
    """Windows that have at least `limit` scored tokens together. The part `stored` of each is not scored, and more of
    it if one window has enough: scored are always its last tokens.

    Raises:
        TextError: the text is too short.
    """
    scored = min(context - int(context * stored), limit)
    pieces = windows(tokenizer, text, context + 1, math.ceil(limit / scored))
    return [Window(f"window {number}", ids, context - scored) for number, ids in enumerate(pieces)]


def likelihood_row(bench: Bench, tasks: Sequence[Window], kind: CacheKind) -> Row | None:
    """What a cache came to over the windows of one context; None if it was not measured in all of them."""
    found, expected = bench.recorded(tasks, kind), bench.recorded(tasks, bench.kinds[REFERENCE])
    if found is None or expected is None:
        return None
    kl = [measurement["kl"] for measurement in found]
    nll = [measurement["nll"] for measurement in found]
    nll_change = [
        [one - other for one, other in zip(window["nll"], reference["nll"], strict=True)]
        for window, reference in zip(found, expected, strict=True)
    ]
    kl_mean, kl_error = _mean_and_error(kl)
    change, change_error = _mean_and_error(nll_change)
    top1, top1_error = _mean_and_error([measurement["agrees"] for measurement in found])
    return {
        **bench.row(tasks, kind),
        "windows": len(tasks),
        "scored_tokens": sum(map(len, kl)),
        "kl_mean": kl_mean,
        "kl_error": kl_error,
        "kl_p99": float(np.percentile(np.concatenate(kl), 99)),
        "kl_quarters": _quarters(kl),
        "perplexity": math.exp(statistics.fmean(value for window in nll for value in window)),
        "perplexity_change": math.expm1(change),
        "perplexity_change_error": None if change_error is None else math.exp(change) * change_error,
        "top1": top1,
        "top1_error": top1_error,
        "bytes": found[-1]["bytes"],
        **_bits(bench, tasks[0], kind),
    }


def _bits(bench: Bench, window: Window, kind: CacheKind) -> dict[str, float | None]:
    bits = {"bits_added": None, "bits_stored": None}
    with bench.attempt(kind, "bits"):
        bits["bits_added"] = bench.bits.added(kind)
        bits["bits_stored"] = bench.bits.stored(kind, window.passes(bench))
    return bits


def _mean_and_error(windows: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Mean over all tokens, and its standard error from the spread of the windows, which have one length: within a
    window, tokens share their history and are not independent. One window has no spread."""
    means = [statistics.fmean(window) for window in windows]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return statistics.fmean(means), error


def _quarters(windows: Sequence[Sequence[float]]) -> list[float | None]:
    """Means over the first to the last quarter of the windows; None for a quarter without tokens."""
    scored = len(windows[0])
    bounds = [scored * quarter // QUARTERS for quarter in range(QUARTERS + 1)]
    quarters = [[value for window in windows for value in window[start:end]] for start, end in pairwise(bounds)]
    return [statistics.fmean(values) if values else None for values in quarters]
