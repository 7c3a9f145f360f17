"""Runs the pieces of a stage, one after the other, as long as there is time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eval.card.journal import Row, StageJournal
from eval.common.failures import reason

# The device does nothing any more in this process; a new one can go on.
DEVICE_LOST = 3


@dataclass
class Measured:
    """What a piece came to.

    rows: for tables. failures: in plain words, what could not be measured. faults: what was measured and is wrong.
    """

    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


Piece = Callable[[], Measured]
MakePieces = Callable[[Any], Mapping[str, Piece]]


def work(make_pieces: MakePieces, settings: Any, journal: StageJournal, deadline: float) -> int:
    """Runs the pieces that the journal does not have.

    A piece is not begun if the longest one so far would not end before `deadline`, in seconds of `time.monotonic`.

    Returns:
        The exit status of the process: 0, or `DEVICE_LOST`.
    """
    try:
        pieces = make_pieces(settings)
    except Exception as error:
        journal.fail(reason(error))
        return 0
    journal.plan([*pieces])
    longest = 0.0
    for name, piece in pieces.items():
        if name in journal.pieces:
            continue
        start = time.monotonic()
        if start + longest > deadline:
            break
        journal.begin(name)
        try:
            measured = piece()
        except Exception as error:
            journal.give_up(name, time.monotonic() - start, reason(error))
        else:
            journal.finish(name, time.monotonic() - start, **vars(measured))
        if not _device_works():
            return DEVICE_LOST
        longest = max(longest, time.monotonic() - start)
    return 0


def work_alone(make_pieces: MakePieces, settings: Any, journal: StageJournal, deadline: float) -> None:
    """As `work`, in a process and a process group of its own, whose end it is."""
    os.setpgrp()
    raise SystemExit(work(make_pieces, settings, journal, deadline))


def _device_works() -> bool:
    """False after an error that takes the device from this process, such as an illegal access."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
