"""Measures everything that only a GPU can tell, in stages that end within minutes and can be resumed.

    python -m eval.card --out card                     all stages, one after the other
    python -m eval.card --out card --stage attention   one of them
    python -m eval.card --out card --list              how far each stage is
    python -m eval.card --out trial --dry-run          tiny sizes on the CPU, with Triton's interpreter

A stage is a list of pieces. Each finished piece is kept in `STAGE.json`, and `report.md` has the tables of all stages.
The next run with the same `--out` skips what is there and goes on: with the pieces that are left of a stage whose time
was up, too. A piece that failed is not tried again; remove the stage's file to measure it anew. Stages run in
processes of their own, so that one that fails or hangs leaves the others alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eval.card.journal import JournalError, StageJournal
from eval.card.report import Progress, failures_of, markdown
from eval.card.settings import DRY_RUN, ON_A_CARD, Settings
from eval.card.stages import STAGES
from eval.card.supervisor import run_stage
from eval.common.arguments import add_model, parser_of, positive
from eval.common.machine import describe_card
from eval.common.report import text_table

# What a process needs to begin and to end comes on top of it.
STAGE_SECONDS = 7 * 60 + 30
# Results of another card or of other versions are not continued.
IDENTITY = ("device", "device_memory", "driver", "toolkit", "torch", "triton", "transformers", "hf_paged_cache")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("python -m eval.card", __doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where results are, or will be")
    parser.add_argument("--stage", choices=[*STAGES], action="append", help="only this one; may be given several times")
    parser.add_argument("--list", action="store_true", help="say what the stages are and how far they are")
    parser.add_argument(
        "--seconds", type=positive, default=STAGE_SECONDS, help=f"after which a stage ends; default {STAGE_SECONDS}"
    )
    add_model(parser, "random weights in the shape of a model of 1.2 billion parameters")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU: shows that everything runs")
    return parser


def _settings(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Settings:
    if arguments.dry_run:
        # Before a process imports the kernels.
        os.environ["TRITON_INTERPRET"] = "1"
        return replace(DRY_RUN, model=arguments.model)
    if not torch.cuda.is_available() and not arguments.list:
        parser.error("there is no card: --dry-run shows on the CPU that everything runs")
    return replace(ON_A_CARD, model=arguments.model)


def _setup(name: str, settings: Settings, machine: dict[str, Any]) -> dict[str, Any]:
    """What has to be the same in all runs of a stage."""
    setup = {key: machine[key] for key in IDENTITY} | {"is_dry_run": settings.is_dry_run}
    if STAGES[name].uses_model:
        model = settings.model
        setup["model"] = "random" if model is None else Path(model).resolve().name if Path(model).exists() else model
    return setup


def _progress_table(journals: dict[str, StageJournal]) -> str:
    rows = [
        {"stage": name, "about": STAGES[name].about, **vars(Progress.of(journal))} for name, journal in journals.items()
    ]
    columns = (
        ("stage", lambda row: row["stage"]),
        ("state", lambda row: row["state"]),
        ("pieces", lambda row: "-" if row["left"] is None else str(row["measured"] + row["failed"] + row["left"])),
        ("failed", lambda row: str(row["failed"])),
        ("wrong", lambda row: str(row["faults"])),
        ("measures", lambda row: row["about"]),
    )
    return text_table(columns, rows, "measures")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 1 if something is wrong, failed, or is left to be measured."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    settings = _settings(parser, arguments)
    device = torch.device("cuda" if torch.cuda.is_available() and not settings.is_dry_run else "cpu")
    machine = describe_card(device)
    try:
        journals = {name: StageJournal(arguments.out, name, _setup(name, settings, machine)) for name in STAGES}
    except JournalError as error:
        parser.error(str(error))
    if arguments.list:
        print(_progress_table(journals))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in STAGES if name in (arguments.stage or STAGES)]
    for name in tqdm(wanted, unit="stage", file=sys.stderr):
        if not journals[name].is_complete:
            run_stage(STAGES[name].make_pieces, settings, journals[name], arguments.seconds)
        (arguments.out / "report.md").write_text(markdown(machine, journals))
    print(_progress_table(journals))
    lines = [f"{name}: {line}" for name in wanted for line in failures_of(journals[name])]
    print(*lines, f"The tables are in {arguments.out / 'report.md'}.", sep="\n")
    states = [Progress.of(journals[name]) for name in wanted]
    return 0 if all(state.state == "done" and not state.failed and not state.faults for state in states) else 1
