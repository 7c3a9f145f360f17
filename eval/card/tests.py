"""The tests that run on a card where there is one, a file at a time."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from eval.card.settings import Settings
from eval.card.worker import Measured, Piece

REPOSITORY = Path(__file__).parents[2]
# Kernels are compiled by the CPU, which takes most of the time.
MAX_PROCESSES = 8


def make_pieces(settings: Settings) -> Mapping[str, Piece]:
    """A piece for each file."""
    return {path: partial(_run, path) for path in settings.tests}


def _run(path: str) -> Measured:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", path]
        command += [f"--junitxml={report}"]
        cores = min(os.cpu_count() or 1, MAX_PROCESSES)
        if cores > 2 and importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(cores)]
        result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if result.returncode not in (0, 1) or not report.exists():
            last = next(reversed((result.stdout + result.stderr).strip().splitlines()), "it says nothing")
            raise RuntimeError(f"pytest ended with status {result.returncode}: {last}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {case.get("name", ""): bad for case in cases for kind in ("failure", "error") for bad in case.iter(kind)}
    skipped = sum(case.find("skipped") is not None for case in cases)
    row = {
        "section": "tests",
        "file": path,
        "passed": len(cases) - len(failed) - skipped,
        "failed": len(failed),
        "skipped": skipped,
        "seconds": time.monotonic() - start,
    }
    return Measured([row], faults=[f"{path}, {name}: {_first_line(bad)}" for name, bad in failed.items()])


def _first_line(failure: ElementTree.Element) -> str:
    return next(iter((failure.get("message") or "").splitlines()), "no message")
