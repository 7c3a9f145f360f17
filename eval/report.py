"""Results of `speed.py` as text, Markdown and plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from variants import BASELINE

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]

RATIO_NOTE = (
    "Columns marked x are divided by DynamicCache's value in the same round (medians over the rounds): "
    "below 1 is faster or smaller."
)


def _number(key: str, digits: int = 0) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:,.{digits}f}"


def _mebibytes(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key] / 2**20:,.2f}"


def _if_there(cell: Callable[[Row], str], key: str) -> Callable[[Row], str]:
    return lambda row: cell(row) if key in row else ""


def _same_tokens(row: Row) -> str:
    return "same" if row["tokens_equal"] else "DIFFERENT"


_CACHE: Column = ("cache", lambda row: row["label"])
_CONTEXT: Column = ("context", _number("context"))
_STEP: tuple[Column, ...] = (("ms/step", _number("step_ms", 2)), ("min", _number("step_ms_min", 2)))
_STEP_RATIO: Column = ("step x", _number("step_ratio", 2))
_COST_OF_CONTEXT: tuple[Column, ...] = (
    ("context ms", _if_there(_number("context_ms", 2), "context_ms")),
    ("context x", _if_there(_number("context_ratio", 2), "context_ratio")),
)
_CONTEXT_NOTE = "context ms: the step, less that of the same cache and batch with the shortest context. "
_BYTES: tuple[Column, ...] = (("MiB", _mebibytes("bytes_used")), ("MiB x", _number("bytes_ratio", 2)))
_PEAK: Column = ("peak MiB", _mebibytes("bytes_peak"))
_TRANSIENT: Column = ("step MiB", _mebibytes("step_transient_bytes"))
_TOKENS: Column = ("tokens", _same_tokens)

SECTIONS: dict[str, tuple[str, str, tuple[Column, ...]]] = {
    "decode": (
        "Greedy decoding",
        _CONTEXT_NOTE
        + "MiB: keys and values after the last step. peak MiB: the most that the cache had allocated. step MiB: what "
        "one step needs beyond the cache while it runs, the model's own activations included. Under sdpa, PagedCache "
        "gathers its blocks for the attention.",
        (
            _CONTEXT,
            ("batch", _number("batch")),
            _CACHE,
            ("prefill tok/s", _number("prefill_tokens_per_second")),
            ("prefill x", _number("prefill_ratio", 2)),
            ("decode tok/s", _number("decode_tokens_per_second", 1)),
            *_STEP,
            _STEP_RATIO,
            *_COST_OF_CONTEXT,
            *_BYTES,
            _PEAK,
            _TRANSIENT,
            _TOKENS,
        ),
    ),
    "beam": (
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
            ("reorder ms", _number("reorder_ms", 3)),
            ("reorder x", _number("reorder_ratio", 2)),
            ("call s", _number("call_seconds", 2)),
            ("call x", _number("call_ratio", 2)),
            *_BYTES,
            _PEAK,
            _TOKENS,
        ),
    ),
    "padding": (
        "Left-padded batch",
        "x real: MiB divided by what DynamicCache holds for the same rows one at a time, without padding. less blocks: "
        "the same after taking off one block a row, the most that a row's last block can waste.",
        (
            ("longest", _number("context")),
            ("rows", _number("batch")),
            ("real tokens", _number("prompt_tokens")),
            _CACHE,
            *_STEP,
            _STEP_RATIO,
            *_BYTES,
            ("real MiB", _mebibytes("bytes_real")),
            ("x real", _number("bytes_real_ratio", 2)),
            ("less blocks", _number("bytes_real_ratio_less_blocks", 2)),
            _TOKENS,
        ),
    ),
    "bookkeeping": (
        "Bookkeeping: the cache's own code in a decode step, one layer, no model, no attention",
        "Microseconds: median step; median of the steps in which every row gets a new block; mean.",
        (
            _CONTEXT,
            ("batch", _number("batch")),
            _CACHE,
            ("us/step", _number("step_us", 1)),
            ("new block", _number("step_us_new_block", 1)),
            ("mean", _number("step_us_mean", 1)),
            _STEP_RATIO,
        ),
    ),
}


def with_cost_of_context(rows: Sequence[Row]) -> list[Row]:
    """Rows of a section with what the context alone costs a step, where a shorter context was measured too."""
    shortest: dict[tuple[str, int], Row] = {}
    for row in sorted(rows, key=lambda row: row.get("context", 0)):
        shortest.setdefault((row["cache"], row.get("batch", 1)), row)
    costs = {
        (row["cache"], row["batch"], row["context"]): row["step_ms"] - short["step_ms"]
        for row in rows
        if "step_ms" in row and (short := shortest[row["cache"], row["batch"]]) is not row
    }
    extended = []
    for row in rows:
        cost = costs.get((row["cache"], row.get("batch"), row.get("context")))
        baseline = costs.get((BASELINE, row.get("batch"), row.get("context")))
        more = {} if cost is None else {"context_ms": cost}
        if cost is not None and baseline:
            more["context_ratio"] = cost / baseline
        extended.append({**row, **more})
    return extended


def _cells(columns: Sequence[Column], rows: Sequence[Row]) -> list[list[str]]:
    return [[header for header, _ in columns], *([cell(row) for _, cell in columns] for row in rows)]


def text_section(section: str, rows: Sequence[Row]) -> str:
    """One section as an aligned table, for a terminal."""
    title, note, columns = SECTIONS[section]
    return "\n".join([title, note, "", text_table(columns, with_cost_of_context(rows), left="cache")])


def text_table(columns: Sequence[Column], rows: Sequence[Row], left: str) -> str:
    """An aligned table; the column `left` holds words, the others numbers."""
    cells = _cells(columns, rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    label = cells[0].index(left)
    lines = [
        "  ".join(
            cell.ljust(width) if index == label else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def markdown_table(columns: Sequence[Column], rows: Sequence[Row], left: str) -> str:
    """The same in Markdown."""
    header, *body = _cells(columns, rows)
    rule = [":--" if name == left else "--:" for name in header]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *body))


def _markdown_section(section: str, rows: Sequence[Row]) -> str:
    title, note, columns = SECTIONS[section]
    return "\n".join([f"## {title}", "", note, "", markdown_table(columns, with_cost_of_context(rows), left="cache")])


def conclusions(results: Mapping[str, Any]) -> list[str]:
    """What the tables do not say: other tokens, caches that could not be measured."""
    lines = [f"Other tokens: {sentence}" for sentence in results["differences"]]
    lines += [f"Not measured: {sentence}" for sentence in results["failures"]]
    compared = [row for row in results["rows"] if "tokens_equal" in row and row["cache"] != BASELINE]
    if compared and not results["differences"]:
        lines.insert(0, "All measured caches made the same tokens as DynamicCache.")
    return lines


def machine_line(machine: Mapping[str, Any]) -> str:
    """Model, machine and versions in one line."""
    return f"{machine['model']}, {machine['dtype']}, on {hardware_line(machine)}"


def hardware_line(machine: Mapping[str, Any]) -> str:
    """Machine and versions in one line."""
    return (
        f"{machine['device']}; {machine['processor']}, {machine['cores']} cores, {machine['threads']} threads; "
        f"torch {machine['torch']}, transformers {machine['transformers']}, "
        f"hf_paged_cache {machine['hf_paged_cache']}, Python {machine['python']}"
    )


def settings_line(settings: Mapping[str, Any]) -> str:
    """How often and how long was measured."""
    return f"{settings['new_tokens']} new tokens a call, {settings['repeats']} interleaved rounds"


def markdown(results: Mapping[str, Any]) -> str:
    """The whole report in Markdown."""
    sections = dict.fromkeys(row["section"] for row in results["rows"])
    parts = [
        "# Speed and memory of KV caches",
        machine_line(results["machine"]) + ".",
        settings_line(results["settings"]) + ". " + RATIO_NOTE,
        *(_markdown_section(name, [row for row in results["rows"] if row["section"] == name]) for name in sections),
        "\n".join(f"- {line}" for line in conclusions(results)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
