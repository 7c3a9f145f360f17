"""Results of `eval.quality` as text and Markdown.

python -m eval.quality.report smollm2.json gemma.json --notes notes.md > docs/quality.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.common.report import Column, Row, Section, bullets, figure, machine_line, rows_of
from eval.quality.caches import REFERENCE

LEFT = "cache"
# What is above the rounding of float32, over a vocabulary.
ROUNDING = 1e-6


def _quarter(index: int) -> Callable[[Row], str]:
    return lambda row: "-" if row["kl_quarters"][index] is None else f"{row['kl_quarters'][index]:.5f}"


def _depth(index: int) -> Callable[[Row], str]:
    return lambda row: f"{row['found'][index]:.0%}"


def _found(row: Row) -> str:
    return f"{row['found_count']} of {row['asked']}"


_WHERE: tuple[Column, ...] = (("context", figure("context", 0)), (LEFT, lambda row: row["label"]))


def _likelihood_columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    return (
        *_WHERE,
        ("bits", figure("bits_added", 2)),
        ("bits, all", figure("bits_stored", 2)),
        ("MiB", figure("bytes", 2, 2**-20)),
        ("KL", figure("kl_mean", 5)),
        ("+-", figure("kl_error", 5)),
        ("p99", figure("kl_p99", 4)),
        ("perplexity", figure("perplexity", 3)),
        ("change %", figure("perplexity_change", 2, 100, "+")),
        ("+-", figure("perplexity_change_error", 2, 100)),
        ("top-1 %", figure("top1", 2, 100)),
        ("+-", figure("top1_error", 2, 100)),
    )


def _position_columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    return (*_WHERE, *((f"KL, {name} quarter", _quarter(i)) for i, name in enumerate(("1st", "2nd", "3rd", "4th"))))


def _passkey_columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    depths = ((f"at {depth:.0%}", _depth(index)) for index, depth in enumerate(rows[0]["depths"]))
    return (*_WHERE, *depths, ("found", _found), ("nats a token", figure("answer_nll", 4)))


def _recall_columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    return (*_WHERE, ("pairs", figure("pairs", 0)), ("found", _found), ("nats a token", figure("answer_nll", 4)))


# The section whose rows a table shows, title, note, and columns.
TABLES: tuple[tuple[str, str, str, Callable[[Sequence[Row]], tuple[Column, ...]]], ...] = (
    (
        "likelihood",
        "Predictions",
        "bits: for each further key and value number of a long text, scales and zeros included, in a model with 16-bit "
        "numbers. bits, all: of everything stored at the end of a window, exact tokens included. MiB: the same in this "
        "run, in its dtype. KL: Kullback-Leibler divergence from the predictions with DynamicCache, in nats, "
        "mean and 99th percentile over the scored tokens. change: of the perplexity. top-1: how often the likeliest "
        "token is the same. +-: standard errors, from the spread of the windows.",
        _likelihood_columns,
    ),
    (
        "likelihood",
        "Divergence by position",
        "KL of the scored tokens in the first to the last quarter of their part of the window.",
        _position_columns,
    ),
    (
        "passkey",
        "Pass key",
        "How often a number of five digits is found, by the depth at which it is hidden: 0% is the start of the text. "
        "nats a token: how surprising the right answer was.",
        _passkey_columns,
    ),
    (
        "recall",
        "Key-value recall",
        "A list of words, each with a number of four digits, then text; how many of the numbers are recalled.",
        _recall_columns,
    ),
)


def _tables(section: str, rows: Sequence[Row]) -> list[Section]:
    """The tables of one section, for those rows that belong to it."""
    if not rows:
        return []
    return [Section(title, note, columns(rows), LEFT) for of, title, note, columns in TABLES if of == section]


def text_section(section: str, rows: Sequence[Row]) -> str:
    """The tables of one section, for a terminal."""
    return "\n\n".join(table.text(rows) for table in _tables(section, rows))


def head_lines(results: Mapping[str, Any]) -> list[str]:
    """What was measured with what, and how."""
    settings = results["settings"]
    return [
        f"{machine_line(results['machine'])}.",
        f"Text: {settings['text']}, SHA-256 {settings['sha256']}.",
        f"Predictions: the first {settings['stored']:.0%} of each window are stored, {settings['prefill_chunk']} "
        f"tokens in a forward pass, and the rest is read {settings['chunk']} at a time: at least "
        f"{settings['limit']:,} scored tokens for each context. Pass keys and lists are stored in the same way, hidden "
        f"in {settings['haystack']}.",
    ]


def conclusions(results: Mapping[str, Any]) -> list[str]:
    """What the tables leave to be looked up, and what they do not say."""
    return [
        *_comparisons(rows_of(results["rows"], "likelihood")),
        *_passkeys(rows_of(results["rows"], "passkey")),
        *(f"Not measured: {sentence}" for sentence in results["failures"]),
    ]


def _comparisons(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        where = f"{row['context']:,} tokens: {row['label']}"
        if row["is_exact"] and row["cache"] != REFERENCE:
            verdict = (
                "predicts what DynamicCache does" if row["kl_mean"] < ROUNDING else "is exact and should not differ"
            )
            lines.append(f"{where} {verdict} (KL {row['kl_mean']:.1e}).")
        peers = [
            other
            for other in rows
            if other["family"] == "quantized" and other["context"] == row["context"] and other["bits_added"] is not None
        ]
        if row["family"] != "paged" or row["is_exact"] or row["bits_added"] is None or not peers:
            continue
        peer = min(peers, key=lambda other: (abs(other["bits_added"] - row["bits_added"]), other["kl_mean"]))
        times = peer["kl_mean"] / row["kl_mean"]
        verdict = f"{times:.1f} times lower" if times >= 1 else f"{1 / times:.1f} times higher"
        lines.append(
            f"{where} at {row['bits_added']:.2f} bits has a KL divergence {verdict} than {peer['label']} at "
            f"{peer['bits_added']:.2f} bits, the nearest in size."
        )
    return lines


def _passkeys(rows: Sequence[Row]) -> list[str]:
    lines = []
    for context in dict.fromkeys(row["context"] for row in rows):
        of_context = [row for row in rows if row["context"] == context]
        expected = next((row["found_count"] for row in of_context if row["cache"] == REFERENCE), None)
        if expected is None:
            continue
        fewer = [f"{row['label']} {row['found_count']}" for row in of_context if row["found_count"] < expected]
        asked = of_context[0]["asked"]
        rest = f"fewer with {'; '.join(fewer)}" if fewer else "no fewer with any other cache"
        lines.append(f"{context:,} tokens: DynamicCache finds {expected} of {asked} pass keys, {rest}.")
    return lines


def markdown(results: Sequence[Mapping[str, Any]], notes: str = "") -> str:
    """The whole report in Markdown, with one part for each run, after notes of the writer's."""
    parts = ["# Quality of KV caches", notes.strip()]
    for run in results:
        parts += [f"## {run['machine']['model']}", *head_lines(run)]
        parts.append(bullets(conclusions(run)))
        if run["plot"] is not None:
            parts.append(f"![KL divergence by size, and pass keys]({run['plot']})")
        for section in dict.fromkeys(section for section, *_ in TABLES):
            rows = rows_of(run["rows"], section)
            parts += [table.markdown(rows, "###") for table in _tables(section, rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="what eval.quality --json wrote, for one model each")
    parser.add_argument("--notes", type=Path, metavar="FILE", help="Markdown to put before the tables")
    arguments = parser.parse_args()
    notes = "" if arguments.notes is None else arguments.notes.read_text(encoding="utf-8")
    print(markdown([json.loads(file.read_text()) for file in arguments.results], notes), end="")


if __name__ == "__main__":
    main()
