"""Measurements that are finished, kept in a file so that a run can be interrupted and continued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Section, context, the piece of text or the question, cache.
Key = tuple[str, int, str, str]
Measurement = dict[str, Any]


class JournalError(ValueError):
    """A file is no journal, or of a run with other settings."""


class Journal:
    """Measurements by key. With a file, each is appended to it at once, one JSON line each.

    Args:
        settings: what all measurements of the run depend on.
        file: where they are kept; what it holds already need not be measured again.

    Raises:
        JournalError: the file is of a run with other settings, or no journal.
    """

    def __init__(self, settings: Mapping[str, Any], file: Path | None = None) -> None:
        self._file = file
        self._measurements: dict[Key, Measurement] = {}
        if file is None:
            return
        if file.exists():
            self._load(file, dict(settings))
        else:
            self._append({"settings": dict(settings)})

    def __contains__(self, key: Key) -> bool:
        return key in self._measurements

    def __getitem__(self, key: Key) -> Measurement:
        return self._measurements[key]

    def add(self, key: Key, measurement: Measurement) -> None:
        """Keeps a measurement."""
        self._measurements[key] = measurement
        if self._file is not None:
            self._append({"key": key, "measurement": measurement})

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _load(self, file: Path, settings: dict[str, Any]) -> None:
        text = file.read_text(encoding="utf-8")
        # A run that was killed may have left half a line.
        complete = text[: text.rfind("\n") + 1]
        try:
            first, *lines = [json.loads(line) for line in complete.splitlines()]
            found = first["settings"]
            self._measurements = {tuple(line["key"]): line["measurement"] for line in lines}
        except (KeyError, TypeError, ValueError) as error:
            raise JournalError(f"{file} is no file of --resume ({error}): choose another name") from error
        changed = [name for name in settings if found.get(name) != settings[name]]
        if changed:
            differences = "; ".join(f"{name} was {found.get(name)}, is {settings[name]}" for name in changed)
            raise JournalError(f"{file} is of another run ({differences}): choose another name for --resume")
        if complete != text:
            file.write_text(complete, encoding="utf-8")
