"""Results of `speed.py --prefix` as text and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from report import RATIO_NOTE, Column, Row, hardware_line, markdown_table, text_table

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


def _column(name: str, key: str, digits: int = 0, factor: float = 1.0) -> Column:
    return name, lambda row: f"{row[key] * factor:,.{digits}f}"


def _same(row: Row) -> str:
    return {True: "same", False: "DIFFERENT", None: "-"}[row["tokens_equal"]]


_WAY: Column = (LEFT, lambda row: row["label"])
_PROMPT = _column("prompt", "prompt_tokens")
_REUSED = _column("reused", "reused_tokens")
_FIRST_TOKEN: tuple[Column, ...] = (
    _PROMPT,
    _WAY,
    _REUSED,
    _column("first token ms", "first_ms", 1),
    _column("min", "first_ms_min", 1),
    _column("first token x", "first_ratio", 3),
    _column("lookup ms", "lookup_ms", 1),
    _column("commit ms", "commit_ms", 1),
    ("token", _same),
)
_FIRST_TOKEN_NOTE = (
    "first token ms: `cache_for` and `generate` with one new token. lookup ms: the part of `cache_for`. commit ms: "
    "comes after it."
)

SECTIONS: dict[str, tuple[str, str, tuple[Column, ...]]] = {
    "known": (
        "Prompts that begin alike",
        "Another end in every round. " + _FIRST_TOKEN_NOTE,
        _FIRST_TOKEN,
    ),
    "chat": (
        "The second turn of a chat",
        "A prompt and an answer, which are known, and a question of 32 tokens. token: compared where the first answer "
        "was the same. " + _FIRST_TOKEN_NOTE,
        _FIRST_TOKEN,
    ),
    "document": (
        "Questions on one document",
        "s: all of them, with the document. prompts: tokens of all prompts. MiB: keys and values of all caches "
        "together, all of which are alive at the end.",
        (
            _column("document", "document_tokens"),
            _column("questions", "questions"),
            _WAY,
            _column("prompts", "prompt_tokens"),
            _REUSED,
            _column("s", "seconds", 2),
            _column("min", "seconds_min", 2),
            _column("s x", "ratio", 2),
            _column("MiB", "num_bytes", 1, 2**-20),
            _column("MiB x", "bytes_ratio", 2),
            ("tokens", _same),
        ),
    ),
    "batching": (
        "Tokens reused by continuous batching and by the store",
        "The same questions. `generate_batch` of transformers shares whole blocks of 256 tokens between requests, with "
        "full attention only, and not those that are computed in the same pass; it is given 256 tokens a pass.",
        (
            _column("document", "document_tokens"),
            _column("questions", "questions"),
            _WAY,
            _column("prompts", "prompt_tokens"),
            _REUSED,
            ("of the prompts", lambda row: f"{row['reused_ratio']:.1%}"),
        ),
    ),
    "index": (
        "The index alone",
        "Blocks of 64 tokens. known: how much of the prompt a lookup finds. evict: as many blocks as the prompt has, "
        "one by one, last ones first. bytes a block: of the index, without the 256 bytes of the tokens themselves.",
        (
            (LEFT, lambda row: row["label"]),
            _column("blocks", "blocks"),
            _PROMPT,
            _column("known", "known_tokens"),
            _column("lookup ms", "lookup_ms", 3),
            _column("lookup min", "lookup_ms_min", 3),
            _column("insert ms", "insert_ms", 3),
            _column("insert min", "insert_ms_min", 3),
            _column("evict ms", "evict_ms", 3),
            _column("evict min", "evict_ms_min", 3),
            _column("bytes a block", "bytes_a_block"),
        ),
    ),
}


def text_section(section: str, rows: Sequence[Row]) -> str:
    """One section, for a terminal."""
    title, note, columns = SECTIONS[section]
    return "\n".join([title, note, "", text_table(columns, rows, LEFT)])


def head_lines(results: Mapping[str, Any]) -> list[str]:
    """What was measured on, and how."""
    machine, settings = results["machine"], results["settings"]
    return [
        f"{machine['model']}, {machine['dtype']}, on {hardware_line(machine)}.",
        f"Medians of {settings['repeats']} interleaved rounds. {RATIO_NOTE}",
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
    parts = ["# Reuse of prefixes", "\n".join(head_lines(results))]
    for section, (title, note, columns) in SECTIONS.items():
        rows = [row for row in results["rows"] if row["section"] == section]
        if rows:
            parts += [f"## {title}", note, markdown_table(columns, rows, LEFT)]
    parts.append("\n".join(f"- {line}" for line in conclusions(results)))
    return "\n\n".join(parts) + "\n"
