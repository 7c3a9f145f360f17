"""What is finished of a stage, kept in a file of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class JournalError(ValueError):
    """A file holds something else than what is measured now."""


class StageJournal:
    """The results of one stage, by piece. The file is complete after every change, whatever interrupts the process.

    Args:
        folder: where the file is, or will be.
        stage: name of the stage.
        setup: what has to be the same in all runs: card, versions, sizes.

    Raises:
        JournalError: the file is of another card, of other versions or sizes, or is no such file.
    """

    def __init__(self, folder: Path, stage: str, setup: Mapping[str, Any]) -> None:
        self.path = folder / f"{stage}.json"
        self._content: dict[str, Any] = {
            "stage": stage,
            "setup": dict(setup),
            "begun": _now(),
            "planned": None,
            "pieces": {},
        }
        if self.path.exists():
            self._content = self._read(stage)
            found = self._content["setup"]
            different = [name for name in {**found, **setup} if found.get(name) != setup.get(name)]
            if different:
                told = "; ".join(f"{name} {found.get(name)!r}, now {setup.get(name)!r}" for name in sorted(different))
                raise JournalError(f"{self.path.name} was measured otherwise ({told}): choose another --out")

    @property
    def setup(self) -> dict[str, Any]:
        return self._content["setup"]

    @property
    def begun(self) -> str:
        """When the first run of the stage began, in UTC."""
        return self._content["begun"]

    @property
    def pieces(self) -> dict[str, dict[str, Any]]:
        """By name, each with `seconds`, and `rows`, `failures` and `faults`, or the `reason` why there are none."""
        return {name: piece for name, piece in self._content["pieces"].items() if not piece.get("is_under_way")}

    @property
    def planned(self) -> list[str] | None:
        """Names of all pieces; `None` until they were worked out once."""
        return self._content["planned"]

    @property
    def is_complete(self) -> bool:
        """Whether every piece has been measured, or has failed."""
        return self.planned is not None and {*self.planned} <= {*self.pieces}

    @property
    def under_way(self) -> str | None:
        """The piece that was begun and neither finished nor failed."""
        return next((name for name, piece in self._content["pieces"].items() if piece.get("is_under_way")), None)

    @property
    def error(self) -> str | None:
        """Why the pieces could not be worked out."""
        return self._content.get("error")

    def plan(self, names: list[str]) -> None:
        """Notes the names of all pieces."""
        self._content |= {"planned": names, "error": None}
        self._write()

    def fail(self, error: str) -> None:
        """Notes why the stage could not begin; the next run tries it again."""
        self._content["error"] = error
        self._write()

    def begin(self, name: str) -> None:
        """Notes that a piece is under way."""
        self._content["pieces"][name] = {"is_under_way": True}
        self._write()

    def finish(self, name: str, seconds: float, rows: list[Row], failures: list[str], faults: list[str]) -> None:
        """Keeps what a piece came to."""
        self._content["pieces"][name] = {"seconds": seconds, "rows": rows, "failures": failures, "faults": faults}
        self._write()

    def give_up(self, name: str, seconds: float, reason: str) -> None:
        """Keeps why a piece came to nothing."""
        self._content["pieces"][name] = {"seconds": seconds, "reason": reason}
        self._write()

    def reload(self) -> None:
        """Reads what another process has written."""
        if self.path.exists():
            self._content = self._read(self._content["stage"])

    def _read(self, stage: str) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text())
            if content["stage"] != stage or not {"setup", "begun", "planned", "pieces"} <= {*content}:
                raise KeyError(stage)
        except (ValueError, KeyError, TypeError) as error:
            raise JournalError(f"{self.path.name} is no file of the stage {stage}: remove it") from error
        return content

    def _write(self) -> None:
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self._content, indent=1) + "\n")
        os.replace(unfinished, self.path)


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
