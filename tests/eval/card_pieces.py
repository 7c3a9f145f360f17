"""Pieces of a stage that end in every way, for processes that import as little as they can."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

from eval.card.worker import Measured, Piece


def make(names: list[str]) -> Mapping[str, Piece]:
    """Pieces by what they do."""
    return {name: PIECES[name.partition(" ")[0]] for name in names}


def _succeeds() -> Measured:
    return Measured([{"section": "tests", "file": "a", "passed": 1, "failed": 0, "skipped": 0, "seconds": 0.1}])


def _raises() -> Measured:
    raise ValueError("no kernel in /usr/lib/somewhere")


def _dies() -> Measured:
    os.kill(os.getpid(), signal.SIGKILL)
    return Measured()


def _hangs() -> Measured:
    time.sleep(600)
    return Measured()


PIECES: dict[str, Piece] = {"succeeds": _succeeds, "raises": _raises, "dies": _dies, "hangs": _hangs}
