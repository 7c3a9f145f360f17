"""What `eval.speed` measures with a model: greedy decoding, beam search and left padding."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from eval.common.memory import CacheBytes, LiveBytes, cache_bytes
from eval.common.prompts import text_prompts
from eval.common.timing import Call, interleave, median_ratio, timed_generate
from eval.common.variants import BASELINE, FORKED, VARIANTS, Inputs, Variant, cache_argument, plain_generation

BEAMS = 4
SHORTEST_PADDED = 64
WARMUP_PROMPT, WARMUP_TOKENS = 128, 4

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A batch to generate from: row i has a prompt of `lengths[i]` tokens."""

    section: str
    variants: tuple[Variant, ...]
    lengths: tuple[int, ...]
    beams: int = 1

    @property
    def context(self) -> int:
        return max(self.lengths)

    def __str__(self) -> str:
        return f"{self.section}, context {self.context}, batch {len(self.lengths)}"


def decode_cases(variants: Sequence[Variant], contexts: Sequence[int], batches: Sequence[int]) -> list[Case]:
    """Greedy decoding with every context length at every batch size."""
    return [Case("decode", tuple(variants), (context,) * batch) for batch in batches for context in contexts]


def beam_cases(variants: Sequence[Variant], contexts: Sequence[int]) -> list[Case]:
    """Beam search with every prompt length. `paged` also runs with the prompt computed once and forked."""
    if VARIANTS["paged"] in variants:
        variants = [*variants, FORKED]
    return [Case("beam", tuple(variants), (context,), BEAMS) for context in contexts]


def padding_cases(variants: Sequence[Variant], longest: int) -> list[Case]:
    """One left-padded batch, whose lengths double from 64, or a little more, up to `longest`."""
    lengths = [longest]
    while lengths[0] // 2 >= SHORTEST_PADDED:
        lengths.insert(0, lengths[0] // 2)
    return [Case("padding", tuple(variants), tuple(lengths))]


@dataclass(frozen=True)
class Sample:
    """One run: its times, the bytes of the cache after it, and what a further step needs beyond these."""

    call: Call
    bytes: CacheBytes
    transient_bytes: int

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.call.step_seconds)

    @property
    def reorder_seconds(self) -> float:
        return statistics.median(self.call.reorder_seconds)


def step_transient_bytes(model: PreTrainedModel, cache: Cache, inputs: Inputs, beams: int) -> int:
    """Bytes that a further decode step needs beyond what the cache holds after it: old and new keys side by side,
    gathered or dequantized copies, and the model's own activations, which are alike for every cache."""
    ids, mask = (inputs[name].repeat_interleave(beams, dim=0) for name in ("input_ids", "attention_mask"))
    step = {"input_ids": ids[:, -1:], cache_argument(model): cache}
    # Like `generate`, which drops a mask of ones.
    if not mask.all():
        new_columns = cache.get_seq_length() + 1 - mask.shape[1]
        step["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), new_columns)], dim=1)
    with torch.no_grad(), LiveBytes(cache) as live:
        model(**step)
    return live.peak - live.current


def first_difference(tokens: torch.Tensor, expected: torch.Tensor) -> tuple[int, int] | None:
    """Row and position of the first token that differs, or None. Both `[rows, tokens]`."""
    unequal = (tokens != expected).nonzero()
    return tuple(unequal[0].tolist()) if len(unequal) else None


def summary(case: Case, variant: Variant, samples: Sequence[Sample], baseline: Sequence[Sample]) -> Row:
    """Medians over the rounds. Every `..._ratio` divides by the baseline's of the same round: below 1 is better."""

    def median(value: Callable[[Sample], float]) -> float:
        return statistics.median(map(value, samples))

    def ratio(value: Callable[[Sample], float]) -> float:
        return median_ratio([*map(value, samples)], [*map(value, baseline)])

    prefill_seconds = median(lambda sample: sample.call.prefill_seconds)
    step_seconds = median(lambda sample: sample.step_seconds)
    held = samples[-1].bytes
    row = {
        "section": case.section,
        "cache": variant.name,
        "label": variant.label,
        "context": case.context,
        "batch": len(case.lengths),
        "beams": case.beams,
        "prompt_tokens": sum(case.lengths),
        "prefill_seconds": prefill_seconds,
        "prefill_ratio": ratio(lambda sample: sample.call.prefill_seconds),
        "prefill_tokens_per_second": sum(case.lengths) / prefill_seconds,
        "step_ms": 1e3 * step_seconds,
        "step_ms_min": 1e3 * min(min(sample.call.step_seconds) for sample in samples),
        "step_ratio": ratio(lambda sample: sample.step_seconds),
        "decode_tokens_per_second": len(case.lengths) / step_seconds,
        "call_seconds": median(lambda sample: sample.call.total_seconds),
        "call_ratio": ratio(lambda sample: sample.call.total_seconds),
        "bytes_used": held.used,
        "bytes_allocated": held.allocated,
        "bytes_peak": held.peak,
        "bytes_ratio": held.used / baseline[-1].bytes.used,
        "block_size": held.block_size,
        "step_transient_bytes": samples[-1].transient_bytes,
        "tokens_equal": first_difference(samples[-1].call.tokens, baseline[-1].call.tokens) is None,
    }
    if case.beams > 1:
        row["reorder_ms"] = 1e3 * median(lambda sample: sample.reorder_seconds)
        row["reorder_ratio"] = ratio(lambda sample: sample.reorder_seconds)
    return row


@dataclass
class Bench:
    """Measures cases with one model and collects what comes out.

    rows: one for each case and cache. differences: tokens that are not the baseline's, in plain words. failures: what
    could not be measured and why.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    new_tokens: int
    repeats: int
    rows: list[Row] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def measure(self, case: Case, after_run: Callable[[], object]) -> None:
        """Runs all caches of the case in turn, after a short warm-up of each. `after_run` is called after every run.

        Raises:
            RuntimeError: if the baseline itself fails.
        """
        inputs = {name: t.to(self.model.device) for name, t in text_prompts(self.tokenizer, case.lengths).items()}
        # The end of the prompts: with left padding at least one real token stays in every row.
        short = {name: tensor[:, -WARMUP_PROMPT:] for name, tensor in inputs.items()}
        variants = {variant.name: variant for variant in case.variants}
        warmups = {
            name: partial(self._sample, variant, short, WARMUP_TOKENS, case.beams) for name, variant in variants.items()
        }
        warm, failures = interleave(warmups, 1, after_run)
        runs = {name: partial(self._sample, variants[name], inputs, self.new_tokens, case.beams) for name in warm}
        results, later_failures = interleave(runs, self.repeats, after_run)
        failures |= later_failures
        if BASELINE in failures:
            raise RuntimeError(f"the baseline failed ({case}): {failures[BASELINE]}")
        self.failures += [f"{variants[name].label} ({case}): {reason}" for name, reason in failures.items()]

        baseline = results[BASELINE]
        real_bytes = self._real_bytes(inputs) if case.section == "padding" else None
        for name, samples in results.items():
            row = summary(case, variants[name], samples, baseline)
            if real_bytes is not None:
                row |= self._against_real_bytes(case, row, real_bytes)
            self.rows.append(row)
            self._compare(case, variants[name], samples[-1].call.tokens, baseline[-1].call.tokens)

    def _sample(self, variant: Variant, inputs: Inputs, new_tokens: int, beams: int) -> Sample:
        with plain_generation(self.model, variant.attn_implementation):
            call, cache = timed_generate(self.model, variant, inputs, new_tokens, beams)
            held = cache_bytes(cache)
            return Sample(call, held, step_transient_bytes(self.model, cache, inputs, beams))

    def _real_bytes(self, inputs: Inputs) -> int:
        """Bytes that the baseline holds for the rows of a padded batch when each runs alone, without padding, with as
        many tokens as the batch has after the call: the last new token is never put into a cache."""
        baseline = VARIANTS[BASELINE]
        total = 0
        with plain_generation(self.model, baseline.attn_implementation):
            for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
                real = ids[mask.bool()]
                alone = torch.cat([real, real[-1:].expand(self.new_tokens - 1)])[None]
                alone_inputs = {"input_ids": alone, "attention_mask": torch.ones_like(alone)}
                _, cache = timed_generate(self.model, baseline, alone_inputs, new_tokens=1)
                total += cache_bytes(cache).used
        return total

    def _against_real_bytes(self, case: Case, row: Row, real_bytes: int) -> Row:
        """How much more than the real tokens' bytes are used, also without the block that a row may leave unfilled."""
        real_tokens = sum(case.lengths) + len(case.lengths) * (self.new_tokens - 1)
        last_blocks = len(case.lengths) * row["block_size"] * real_bytes / real_tokens
        return {
            "bytes_real": real_bytes,
            "bytes_real_ratio": row["bytes_used"] / real_bytes,
            "bytes_real_ratio_less_blocks": (row["bytes_used"] - last_blocks) / real_bytes,
        }

    def _compare(self, case: Case, variant: Variant, tokens: torch.Tensor, expected: torch.Tensor) -> None:
        difference = first_difference(tokens, expected)
        if difference is None:
            return
        row, position = difference
        sentence = (
            f"{variant.label} did not make DynamicCache's tokens ({case}): row {row} differs from new token "
            f"{position + 1} of {expected.shape[1]} on."
        )
        if variant.lossy:
            sentence += " It stores rounded keys and values, so this is expected."
        elif self.model.dtype != torch.float32:
            sentence += " With 16-bit numbers a near-tie can fall either way."
        else:
            sentence += " In float32 this is a fault, or a tie to the last bits."
        self.differences.append(sentence)
