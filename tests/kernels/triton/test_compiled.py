"""What the compiler makes of the kernels, for GPUs that are not there.

It runs in a process of its own, since here the kernels are interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

REPOSITORY = Path(__file__).parents[3]
TARGETS = ("sm_80", "sm_90", "gfx942")


def rows(target: str, *options: str) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "eval.kernels.report", "--json", "--targets", target, *options]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def check(row: dict) -> None:
    compiled, case = row["compiled"], f"{row['compiled']['target']}, {row['case']}"
    assert compiled["spilled"] == 0, case
    assert compiled["shared"] <= row["shared_limit"], case
    if row["launch"] is None:
        return
    if compiled["in_flight"] is not None and row["launch"]["num_stages"] > 2:
        assert compiled["in_flight"] > 0, f"{case}: loads are waited for before a tile is worked on"
    bits = row["launch"]["bits"]
    assert compiled["mma"] > 0 or bits == 32, case
    # Keys and values come 16 bytes at a time; 2-byte and single-byte loads are sinks, the 2-D mask and scales of codes.
    widths = {int(width): count for width, count in compiled["loads"].items()}
    part = 128 * widths[128] / sum(width * count for width, count in widths.items())
    assert part >= (0.2 if bits == 8 else 0.5), case
    if "all features" not in row["case"]:
        assert bits == 8 or not widths.keys() & {8, 16}, case
        assert row["bytes_ratio"] is None or row["bytes_ratio"] <= (1.2 if bits == 8 else 1.15), case


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", [target if target == "sm_90" else pytest.param(target, marks=pytest.mark.evidence) for target in TARGETS]
)
def test_the_most_used_width_compiles_as_it_is_meant_to(target: str) -> None:
    compiled = rows(target, "--quick")
    assert {row["compiled"]["kernel"] for row in compiled} == {
        "attend_kernel",
        "attend_shared_kernel",
        "block_scores_kernel",
        "merge_kernel",
        "write_kernel",
        "copy_kernel",
    }
    for row in compiled:
        check(row)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_a_decode_loop_does_not_compile_kernels_anew(batch: int) -> None:
    """With and without splits, and for 2 to 8 splits: not for every length, number of splits or size of the table."""
    command = [sys.executable, "-m", "tests.kernels.decode_loop", "1200", str(batch)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"write_kernel": 1, "attend_kernel": 2, "merge_kernel": 1}


@pytest.mark.evidence
@pytest.mark.parametrize("target", TARGETS)
def test_every_row_of_the_launch_table_compiles_as_it_is_meant_to(target: str) -> None:
    for row in rows(target):
        check(row)
