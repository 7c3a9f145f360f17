"""Results of `eval.speed` as text and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval.common.report import RATIO_NOTE, Column, Row, Section, figure, machine_line, markdown_report, rows_of
from eval.common.variants import BASELINE

LEFT = "cache"


def _mebibytes(key: str) -> Callable[[Row], str]:
    return figure(key, 2, 2**-20)


def _same_tokens(row: Row) -> str:
    return "same" if row["tokens_equal"] else "DIFFERENT"


_CACHE: Column = (LEFT, lambda row: row["label"])
_CONTEXT: Column = ("context", figure("context"))
_STEP: tuple[Column, ...] = (("ms/step", figure("step_ms", 2)), ("min", figure("step_ms_min", 2)))
_STEP_RATIO: Column = ("step x", figure("step_ratio", 2))
_COST_OF_CONTEXT: tuple[Column, ...] = (
    ("context ms", figure("context_ms", 2)),
    ("context x", figure("context_ratio", 2)),
    ("by min", figure("context_ratio_min", 2)),
)
_CONTEXT_NOTE = (
    "context ms: the step, less that of the same cache and batch with the shortest context; by min: context x of the "
    "fastest steps. "
)
_BYTES: tuple[Column, ...] = (("MiB", _mebibytes("bytes_used")), ("MiB x", figure("bytes_ratio", 2)))
_PEAK: Column = ("peak MiB", _mebibytes("bytes_peak"))
_TRANSIENT: Column = ("step MiB", _mebibytes("step_transient_bytes"))
_TOKENS: Column = ("tokens", _same_tokens)

SECTIONS: dict[str, Section] = {
    "decode": Section(
        "Greedy decoding",
        _CONTEXT_NOTE
        + "MiB: keys and values after the last step. peak MiB: the most that the cache had allocated. step MiB: what "
        "one step needs beyond the cache while it runs, the model's own activations included. Under sdpa, PagedCache "
        "gathers its blocks for the attention.",
        (
            _CONTEXT,
            ("batch", figure("batch")),
            _CACHE,
            ("prefill tok/s", figure("prefill_tokens_per_second")),
            ("prefill x", figure("prefill_ratio", 2)),
            ("decode tok/s", figure("decode_tokens_per_second", 1)),
            *_STEP,
            _STEP_RATIO,
            *_COST_OF_CONTEXT,
            *_BYTES,
            _PEAK,
            _TRANSIENT,
            _TOKENS,
        ),
        LEFT,
    ),
    "beam": Section(
        "Beam search, 4 beams",
        _CONTEXT_NOTE
        + "reorder ms: the part of a step spent in reorder_cache; QuantizedCache puts that work off to its next "
        "update. call s: making the cache, prefill and all steps. MiB: after the last step.",
        (
            _CONTEXT,
            _CACHE,
            *_STEP,
            _STEP_RATIO,
            *_COST_OF_CONTEXT,
            ("reorder ms", figure("reorder_ms", 3)),
            ("reorder x", figure("reorder_ratio", 2)),
            ("call s", figure("call_seconds", 2)),
            ("call x", figure("call_ratio", 2)),
            *_BYTES,
            _PEAK,
            _TOKENS,
        ),
        LEFT,
    ),
    "padding": Section(
        "Left-padded batch",
        "x real: MiB divided by what DynamicCache holds for the same rows one at a time, without padding. less blocks: "
        "the same after taking off one block a row, the most that a row's last block can waste.",
        (
            ("longest", figure("context")),
            ("rows", figure("batch")),
            ("real tokens", figure("prompt_tokens")),
            _CACHE,
            *_STEP,
            _STEP_RATIO,
            *_BYTES,
            ("real MiB", _mebibytes("bytes_real")),
            ("x real", figure("bytes_real_ratio", 2)),
            ("less blocks", figure("bytes_real_ratio_less_blocks", 2)),
            _TOKENS,
        ),
        LEFT,
    ),
    "bookkeeping": Section(
        "Bookkeeping: the cache's own code in a decode step, one layer, no model, no attention",
        "Microseconds: median step; median of the steps in which every row gets a new block; mean.",
        (
            _CONTEXT,
            ("batch", figure("batch")),
            _CACHE,
            ("us/step", figure("step_us", 1)),
            ("new block", figure("step_us_new_block", 1)),
            ("mean", figure("step_us_mean", 1)),
            _STEP_RATIO,
        ),
        LEFT,
    ),
}


def with_cost_of_context(rows: Sequence[Row]) -> list[Row]:
    """Rows of a section with what the context alone costs a step, where a shorter context was measured too.

    By the medians of the steps, and by their minima, in which there is least of what else the machine does.
    """
    shortest: dict[tuple[str, int], Row] = {}
    for row in sorted(rows, key=lambda row: row.get("context", 0)):
        shortest.setdefault((row["cache"], row.get("batch", 1)), row)
    baselines = {(row.get("batch"), row.get("context")): row for row in rows if row["cache"] == BASELINE}

    def cost(row: Row, statistic: str) -> float | None:
        short = shortest[row["cache"], row.get("batch", 1)]
        step = f"step_ms{statistic}"
        return row[step] - short[step] if step in row and short is not row else None

    extended = []
    for row in rows:
        more, baseline = {}, baselines.get((row.get("batch"), row.get("context")))
        for statistic in ("", "_min"):
            own = cost(row, statistic)
            if own is not None and not statistic:
                more["context_ms"] = own
            if own is not None and baseline is not None and (other := cost(baseline, statistic)):
                more[f"context_ratio{statistic}"] = own / other
        extended.append({**row, **more})
    return extended


def text_section(section: str, rows: Sequence[Row]) -> str:
    """One section, for a terminal."""
    return SECTIONS[section].text(with_cost_of_context(rows))


def head_lines(results: Mapping[str, Any]) -> list[str]:
    """What was measured on, and how."""
    settings = results["settings"]
    return [
        f"{machine_line(results['machine'])}.",
        f"{settings['new_tokens']} new tokens a call, {settings['repeats']} interleaved rounds. {RATIO_NOTE}",
    ]


def conclusions(results: Mapping[str, Any]) -> list[str]:
    """What the tables do not say: other tokens, caches that could not be measured."""
    lines = [f"Other tokens: {sentence}" for sentence in results["differences"]]
    lines += [f"Not measured: {sentence}" for sentence in results["failures"]]
    compared = [row for row in results["rows"] if "tokens_equal" in row and row["cache"] != BASELINE]
    if compared and not results["differences"]:
        lines.insert(0, "All measured caches made the same tokens as DynamicCache.")
    return lines


def markdown(results: Mapping[str, Any]) -> str:
    """The whole report in Markdown."""
    rows = [row for name in SECTIONS for row in with_cost_of_context(rows_of(results["rows"], name))]
    return markdown_report("Speed and memory of KV caches", head_lines(results), SECTIONS, rows, conclusions(results))
