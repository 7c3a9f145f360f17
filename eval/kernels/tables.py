"""Results of `eval.kernels` as text and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.common.report import Column, Row, Section, figure, hardware_line, markdown_report
from eval.kernels.sections import SHARED

# Where decoding should be bound by memory alone.
MANY_TOKENS = 2**16

LEFT = "implementation"

_WHERE: tuple[Column, ...] = (
    ("heads", lambda row: row["heads"]),
    ("dtype", lambda row: row["dtype"]),
    ("kv", lambda row: row["kv"]),
    ("batch", lambda row: f"{row['batch']:,}"),
)
_IMPLEMENTATION: Column = (LEFT, lambda row: row["implementation"])
_TIME: tuple[Column, ...] = (("us", figure("microseconds", 1)), ("min", figure("microseconds_min", 1)))

SECTIONS: dict[str, Section] = {
    "attention": Section(
        "Attention of one new token a row, alone",
        "us: a call. GB/s: keys and values, each read once. of copy: that, divided by what copying a large tensor "
        "reads and writes in a second, in the same round. x sdpa: the time divided by that of the fastest sdpa in the "
        "same round, below 1 is faster. paged: on blocks in random order, in the format that kv names. All others read "
        "the same numbers in the model's dtype, sdpa in one piece.",
        (
            *_WHERE,
            ("context", lambda row: f"{row['context']:,}"),
            _IMPLEMENTATION,
            *_TIME,
            ("GB/s", figure("bytes_per_second", 1, 1e-9)),
            ("of copy", figure("copy_ratio", 2)),
            ("x sdpa", figure("sdpa_ratio", 2)),
        ),
        LEFT,
    ),
    "shared": Section(
        "Rows that share a prompt",
        "shared: the prompt is read once for all rows. unshared: by each row, out of the same blocks or blocks of its "
        "own. x unshared: divided by the fastest unshared one on the same blocks; below 1 is faster.",
        (
            *_WHERE,
            ("prompt", lambda row: f"{row['prompt']:,}"),
            _IMPLEMENTATION,
            *_TIME,
            ("x unshared", figure("unshared_ratio", 2)),
        ),
        LEFT,
    ),
    "launch": Section(
        "What a call takes of the host's time",
        "With one block of keys. On a GPU the call is not waited for: this is Python and the driver. On the CPU it is "
        "the whole call.",
        (*_WHERE, ("call", lambda row: row["call"]), _IMPLEMENTATION, *_TIME),
        LEFT,
    ),
}


def head_lines(results: Mapping[str, Any]) -> list[str]:
    """What was measured on, and how."""
    machine, settings = results["machine"], results["settings"]
    return [
        f"On {hardware_line(machine)}, Triton {machine['triton']}.",
        f"Medians of {settings['repeats']} interleaved rounds; each round goes through layers of "
        f"{settings['rotated_bytes'] / 2**20:,.0f} MiB together, so that nothing is read from a cache.",
    ]


def conclusions(results: Mapping[str, Any]) -> list[str]:
    """What the tables do not say or leave to be looked up."""
    lines = []
    if results["copy_bytes_per_second"] is not None:
        lines.append(f"Copying reads and writes {results['copy_bytes_per_second'] / 1e9:,.1f} GB/s.")
    attention = [row for row in results["rows"] if row["section"] == "attention" and "microseconds" in row]
    large = [row for row in attention if row["kind"] == "paged" and row["batch"] * row["context"] >= MANY_TOKENS]
    for kv, name in dict.fromkeys((row["kv"], row["implementation"]) for row in large):
        rows = [row for row in large if (row["kv"], row["implementation"]) == (kv, name)]
        line = f"{name}, {kv}, {MANY_TOKENS:,} tokens and more: {_range(rows, 'copy_ratio')} of copying"
        if all(row["sdpa_ratio"] is not None for row in rows):
            line += f", {_range(rows, 'sdpa_ratio')} times the fastest sdpa's time"
        lines.append(f"{line}.")
    for row in results["rows"]:
        if row["implementation"] == SHARED and row.get("unshared_ratio") is not None:
            lines.append(
                f"{row['batch']} rows that share {row['prompt']:,} tokens ({row['heads']}, {row['dtype']}): "
                f"{1 / row['unshared_ratio']:.1f} times as fast as each on its own."
            )
    return lines + [f"Not measured: {sentence}" for sentence in results["failures"]]


def _range(rows: Sequence[Row], key: str) -> str:
    values = sorted(row[key] for row in rows)
    return f"{values[0]:.2f} to {values[-1]:.2f}"


def markdown(results: Mapping[str, Any]) -> str:
    """The whole report in Markdown."""
    head, lines = head_lines(results), conclusions(results)
    return markdown_report("Attention kernels, alone", head, SECTIONS, results["rows"], lines)
