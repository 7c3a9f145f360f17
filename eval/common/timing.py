"""Times of calls of `generate`, step by step, and of several such calls that take turns.

The steps are timed inside `generate` itself, by a logits processor: it is called once a step in greedy and in beam
search alike (streamers do not serve beam search), right after the forward pass. So the time between two of its calls
is one whole step as a user has it: token selection, reordering of the cache, preparing the inputs, forward pass. That
is the same code for every cache.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import Cache, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from eval.common.failures import reason
from eval.common.variants import Inputs, Variant, cache_argument

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


def now(device: torch.device) -> float:
    """Seconds on a steady clock, once the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class StepClock(LogitsProcessor):
    """Notes the time of each step; leaves the scores as they are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.times.append(now(self.device))
        return scores


@contextmanager
def timed_reorder(cache: Cache, device: torch.device) -> Iterator[list[float]]:
    """Yields a list that gets the seconds of every `cache.reorder_cache` inside the `with` block. Caches may put work
    off to the next `update`: that then counts in the step only."""
    seconds: list[float] = []
    reorder = cache.reorder_cache

    def timed(beam_idx: torch.LongTensor) -> None:
        start = now(device)
        reorder(beam_idx)
        seconds.append(now(device) - start)

    cache.reorder_cache = timed
    try:
        yield seconds
    finally:
        del cache.reorder_cache


@dataclass(frozen=True)
class Call:
    """What one call of `generate` made and took.

    tokens: the new tokens, `[rows, new_tokens]`, int64. prefill_seconds: from the start of the call to the logits of
    the first new token. step_seconds: each step after it. reorder_seconds: each `reorder_cache`. total_seconds: the
    whole call with the making of the cache.
    """

    tokens: torch.Tensor
    prefill_seconds: float
    step_seconds: tuple[float, ...]
    reorder_seconds: tuple[float, ...]
    total_seconds: float


def timed_generate(
    model: PreTrainedModel, variant: Variant, inputs: Inputs, new_tokens: int, beams: int = 1
) -> tuple[Call, Cache]:
    """Generates exactly `new_tokens` tokens with a new cache of this variant. The model must already run under the
    variant's attention implementation, see `variants.plain_generation`."""
    clock = StepClock(model.device)
    gc.collect()
    start = now(model.device)
    cache = variant.make(model, inputs, beams)
    with timed_reorder(cache, model.device) as reorder_seconds:
        ids = model.generate(
            **inputs,
            **{cache_argument(model): cache},
            max_new_tokens=new_tokens,
            num_beams=beams,
            logits_processor=LogitsProcessorList([clock]),
        )
    end = now(model.device)
    steps = tuple(after - before for before, after in zip(clock.times, clock.times[1:], strict=False))
    call = Call(
        tokens=ids[:, inputs["input_ids"].shape[1] :].cpu(),
        prefill_seconds=clock.times[0] - start,
        step_seconds=steps,
        reorder_seconds=tuple(reorder_seconds),
        total_seconds=end - start,
    )
    return call, cache


def interleave(
    runs: Mapping[Name, Callable[[], Result]], rounds: int, after_run: Callable[[], object] = lambda: None
) -> tuple[dict[Name, list[Result]], dict[Name, str]]:
    """Runs all once in order, then all again, `rounds` times: what disturbs the machine for a while disturbs all.

    Returns:
        The results of each run by round, and for those that raised, which are left out from then on, the reason.
    """
    results: dict[Name, list[Result]] = {name: [] for name in runs}
    failures: dict[Name, str] = {}
    # What is there already, all of torch and transformers, is no concern of the garbage collections in between.
    gc.freeze()
    try:
        for _ in range(rounds):
            for name, run in runs.items():
                if name not in failures:
                    try:
                        results[name].append(run())
                    except Exception as error:
                        failures[name] = reason(error)
                        del results[name]
                after_run()
    finally:
        gc.unfreeze()
    return results, failures


def median_ratio(values: Sequence[float], baseline: Sequence[float]) -> float:
    """The median over the rounds of a value divided by the baseline's of the same round."""
    return statistics.median(value / base for value, base in zip(values, baseline, strict=True))
