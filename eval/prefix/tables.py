"""Results of `eval.prefix` as text and Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.common.report import RATIO_NOTE, Column, Row, Section, figure, machine_line, markdown_report

LEFT = "way"

# What the store is meant to reach with the default sizes: the section, the way it is served, the figure, and what it
# has to stay below.
GOALS: tuple[tuple[str, str, str, float, str], ...] = (
    ("known", "raw", "first_ratio", 0.08, "the first token, {:.3f} of the time without reuse (goal: 0.08)"),
    ("chat", "raw", "first_ratio", 0.15, "the second turn's first token, {:.3f} of that (goal: 0.15)"),
    ("index", "chains", "lookup_ms", 3.0, "a lookup, {:.3f} ms (goal: 3)"),
    ("index", "chains", "bytes_a_block", 200.0, "the index, {:.0f} bytes a block in sequences (goal: 200)"),
    (
        "index",
        "children",
        "bytes_a_block",
        200.0,
        "the index, {:.0f} bytes a block as one of many children (goal: 200)",
    ),
)


def _same(row: Row) -> str:
    return {True: "same", False: "DIFFERENT", None: "-"}[row["tokens_equal"]]


_WAY: Column = (LEFT, lambda row: row["label"])
_PROMPT = ("prompt", figure("prompt_tokens"))
_REUSED = ("reused", figure("reused_tokens"))
_FIRST_TOKEN: tuple[Column, ...] = (
    _PROMPT,
    _WAY,
    _REUSED,
    ("first token ms", figure("first_ms", 1)),
    ("min", figure("first_ms_min", 1)),
    ("first token x", figure("first_ratio", 3)),
    ("lookup ms", figure("lookup_ms", 1)),
    ("commit ms", figure("commit_ms", 1)),
    ("token", _same),
)
_FIRST_TOKEN_NOTE = (
    "first token ms: `cache_for` and `generate` with one new token. lookup ms: the part of `cache_for`. commit ms: "
    "comes after it."
)

SECTIONS: dict[str, Section] = {
    "known": Section(
        "Prompts that begin alike",
        "Another end in every round. " + _FIRST_TOKEN_NOTE,
        _FIRST_TOKEN,
        LEFT,
    ),
    "chat": Section(
        "The second turn of a chat",
        "A prompt and an answer, which are known, and a question of 32 tokens. token: compared where the first answer "
        "was the same. " + _FIRST_TOKEN_NOTE,
        _FIRST_TOKEN,
        LEFT,
    ),
    "document": Section(
        "Questions on one document",
        "s: all of them, with the document. prompts: tokens of all prompts. MiB: keys and values of all caches "
        "together, all of which are alive at the end.",
        (
            ("document", figure("document_tokens")),
            ("questions", figure("questions")),
            _WAY,
            ("prompts", figure("prompt_tokens")),
            _REUSED,
            ("s", figure("seconds", 2)),
            ("min", figure("seconds_min", 2)),
            ("s x", figure("ratio", 2)),
            ("MiB", figure("num_bytes", 1, 2**-20)),
            ("MiB x", figure("bytes_ratio", 2)),
            ("tokens", _same),
        ),
        LEFT,
    ),
    "batching": Section(
        "Tokens reused by continuous batching and by the store",
        "The same questions. `generate_batch` of transformers shares whole blocks of 256 tokens between requests, with "
        "full attention only, and not those that are computed in the same pass; it is given 256 tokens a pass.",
        (
            ("document", figure("document_tokens")),
            ("questions", figure("questions")),
            _WAY,
            ("prompts", figure("prompt_tokens")),
            _REUSED,
            ("of the prompts", lambda row: f"{row['reused_ratio']:.1%}"),
        ),
        LEFT,
    ),
    "index": Section(
        "The index alone",
        "Blocks of 64 tokens. known: how much of the prompt a lookup finds. evict: as many blocks as the prompt has, "
        "one by one, last ones first. bytes a block: of the index, without the 256 bytes of the tokens themselves.",
        (
            (LEFT, lambda row: row["label"]),
            ("blocks", figure("blocks")),
            _PROMPT,
            ("known", figure("cached_tokens")),
            ("lookup ms", figure("lookup_ms", 3)),
            ("lookup min", figure("lookup_ms_min", 3)),
            ("insert ms", figure("insert_ms", 3)),
            ("insert min", figure("insert_ms_min", 3)),
            ("evict ms", figure("evict_ms", 3)),
            ("evict min", figure("evict_ms_min", 3)),
            ("bytes a block", figure("bytes_a_block")),
        ),
        LEFT,
    ),
}


def head_lines(results: Mapping[str, Any]) -> list[str]:
    """What was measured on, and how."""
    return [
        f"{machine_line(results['machine'])}.",
        f"Medians of {results['settings']['repeats']} interleaved rounds. {RATIO_NOTE}",
    ]


def conclusions(results: Mapping[str, Any]) -> list[str]:
    """What the tables leave to be looked up: goals, other tokens, what could not be measured."""
    lines = []
    for section, way, key, limit, sentence in GOALS if results["settings"]["has_goals"] else ():
        for row in results["rows"]:
            if row["section"] == section and way in (row.get("cache"), row.get("shape")):
                verdict = "reached" if row[key] <= limit else "missed"
                lines.append(f"{verdict}: {sentence.format(row[key])}")
    lines += [f"Other tokens: {sentence}" for sentence in results["differences"]]
    return lines + [f"Not measured: {sentence}" for sentence in results["failures"]]


def markdown(results: Mapping[str, Any]) -> str:
    """The whole report in Markdown."""
    head, lines = head_lines(results), conclusions(results)
    return markdown_report("Reuse of prefixes", head, SECTIONS, results["rows"], lines)
