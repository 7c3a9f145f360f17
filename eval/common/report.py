"""Measured rows as tables in text and Markdown, and what all reports have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tabulate import tabulate

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]

RATIO_NOTE = (
    "Columns marked x are divided by DynamicCache's value in the same round (medians over the rounds): "
    "below 1 is faster or smaller."
)


class Section(NamedTuple):
    """A part of a report with one table.

    Attributes:
        title: of the part.
        note: what the columns mean.
        columns: of the table.
        left: the column that holds words; the others hold numbers.
    """

    title: str
    note: str
    columns: tuple[Column, ...]
    left: str

    def text(self, rows: Sequence[Row]) -> str:
        """For a terminal."""
        return "\n".join([self.title, self.note, "", text_table(self.columns, rows, self.left)])

    def markdown(self, rows: Sequence[Row], heading: str = "##") -> str:
        """In Markdown."""
        return "\n\n".join([f"{heading} {self.title}", self.note, markdown_table(self.columns, rows, self.left)])


def figure(key: str, digits: int = 0, factor: float = 1.0, sign: str = "") -> Callable[[Row], str]:
    """A cell with a measured figure; a dash where there is none."""
    return lambda row: "-" if row.get(key) is None else f"{row[key] * factor:{sign},.{digits}f}"


def rows_of(rows: Sequence[Row], section: str) -> list[Row]:
    """Those that belong to a section."""
    return [row for row in rows if row["section"] == section]


def text_table(columns: Sequence[Column], rows: Sequence[Row], left: str) -> str:
    """An aligned table; the column `left` holds words, the others numbers."""
    return _table(columns, rows, left, "simple")


def markdown_table(columns: Sequence[Column], rows: Sequence[Row], left: str) -> str:
    """The same in Markdown."""
    return _table(columns, rows, left, "pipe")


def _table(columns: Sequence[Column], rows: Sequence[Row], left: str, table_format: str) -> str:
    return tabulate(
        [[cell(row) for _, cell in columns] for row in rows],
        [header for header, _ in columns],
        table_format,
        colalign=["left" if header == left else "right" for header, _ in columns],
        disable_numparse=True,
    )


def bullets(lines: Sequence[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def markdown_report(
    title: str, head: Sequence[str], sections: Mapping[str, Section], rows: Sequence[Row], conclusions: Sequence[str]
) -> str:
    """A whole report in Markdown: the sections that have rows, between what was measured on and what it comes to."""
    tables = [section.markdown(of_section) for name, section in sections.items() if (of_section := rows_of(rows, name))]
    parts = [f"# {title}", "\n".join(head), *tables, bullets(conclusions)]
    return "\n\n".join(part for part in parts if part) + "\n"


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


def write_files(
    arguments: argparse.Namespace, results: Mapping[str, Any], markdown: Callable[[Mapping[str, Any]], str]
) -> None:
    """Writes the files that `--json` and `--markdown` name."""
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(results))
