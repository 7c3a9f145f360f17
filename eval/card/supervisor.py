"""Runs a stage in processes of its own, and ends them in time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from typing import Any

from eval.card.journal import StageJournal
from eval.card.worker import MakePieces, work_alone


def run_stage(make_pieces: MakePieces, settings: Any, journal: StageJournal, seconds: float) -> None:
    """Measures what the journal does not have, and returns within `seconds` and the time to end a process.

    A piece that is under way when time is up, or whose process dies, is given up. The pieces after it go on in a new
    process while there is time, and in the next run otherwise.
    """
    start = time.monotonic()
    # A process that died with this one may have left a piece behind.
    _give_up_what_is_under_way(journal, "its process ended", 0.0)
    while True:
        begun, num_pieces = time.monotonic(), len(journal.pieces)
        arguments = (make_pieces, settings, journal, start + seconds)
        process = multiprocessing.get_context("spawn").Process(target=work_alone, args=arguments)
        process.start()
        try:
            process.join(max(start + seconds - time.monotonic(), 0.0))
            is_late = process.is_alive()
        finally:
            _end(process)
        journal.reload()
        why = f"took longer than the {seconds:.0f} s of a stage" if is_late else _how_it_ended(process.exitcode)
        _give_up_what_is_under_way(journal, why, time.monotonic() - begun)
        if is_late or not process.exitcode or journal.is_complete or len(journal.pieces) == num_pieces:
            break
    if journal.planned is None and journal.error is None:
        journal.fail(why)


def _give_up_what_is_under_way(journal: StageJournal, why: str, seconds: float) -> None:
    if journal.under_way is not None:
        journal.give_up(journal.under_way, seconds, why)


def _end(process: BaseProcess) -> None:
    """Ends a process, and those that it started."""
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
    process.join()


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"its process ended by {signal.Signals(-exit_code).name}"
    return f"its process ended with status {exit_code}"
