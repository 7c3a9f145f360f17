"""What was measured on a card, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.card.journal import StageJournal
from eval.common.report import Row, Section, bullets, figure, hardware_line, rows_of
from eval.kernels import tables as kernel_tables
from eval.speed import tables as speed_tables

OWN_SECTIONS: dict[str, Section] = {
    "tests": Section(
        "Tests",
        "Those that run on a card where there is one.",
        (
            ("file", lambda row: row["file"]),
            ("passed", figure("passed")),
            ("failed", figure("failed")),
            ("skipped", figure("skipped")),
            ("s", figure("seconds", 0)),
        ),
        "file",
    ),
    "correctness": Section(
        "The Triton kernels against plain PyTorch",
        "error: the largest, as a part of the largest value. Attention is compared with float64 over what the blocks "
        "read as, what is written and copied byte by byte, fp8 by its squared error.",
        (
            ("heads", lambda row: row["heads"]),
            ("dtype", lambda row: row["dtype"]),
            ("kv", lambda row: row["kv"]),
            ("call", lambda row: row["call"]),
            ("error", lambda row: "-" if row["error"] is None else f"{row['error']:.1e}"),
            ("verdict", lambda row: row["verdict"]),
        ),
        "call",
    ),
    "codecs": Section(
        "Greedy decoding with every codec",
        speed_tables.SECTIONS["decode"].note,
        speed_tables.SECTIONS["decode"].columns,
        speed_tables.LEFT,
    ),
    "metadata": Section(
        "Metadata of a step",
        "host us: until the call returns. done us: until the device has them too. A step uploads once for all layers "
        "of a group.",
        (
            ("batch", figure("batch")),
            ("context", figure("context")),
            ("KiB", figure("bytes", 1, 2**-10)),
            ("way", lambda row: row["way"]),
            ("host us", figure("host_us", 1)),
            ("done us", figure("done_us", 1)),
        ),
        "way",
    ),
    "copies": Section(
        "Copies",
        "One tensor, many copies in a row.",
        (
            ("KiB", figure("bytes", 0, 2**-10)),
            ("way", lambda row: row["way"]),
            ("us", figure("us", 1)),
            ("GB/s", figure("bytes_per_second", 2, 1e-9)),
        ),
        "way",
    ),
    "waits": Section(
        "How often the host waits for the device in decode steps",
        "As PyTorch's sync debug mode counts them; there should be none.",
        (("way", lambda row: row["way"]), ("steps", figure("steps")), ("waits", figure("waits"))),
        "way",
    ),
    "tuning": Section(
        "The launch table",
        "The fastest launch of each row, and how many candidates took part.",
        (("found", lambda row: row["summary"]),),
        "found",
    ),
}
SECTIONS = OWN_SECTIONS | kernel_tables.SECTIONS | speed_tables.SECTIONS


@dataclass(frozen=True)
class Progress:
    """How far a stage is.

    Attributes:
        state: `not begun`, `cannot begin`, `unfinished` or `done`.
        measured, failed, left: pieces. `left` is `None` where they were not worked out yet.
        faults: what is wrong in the pieces that were measured.
        seconds: of all pieces.
    """

    state: str
    measured: int = 0
    failed: int = 0
    left: int | None = None
    faults: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, journal: StageJournal) -> Progress:
        pieces = journal.pieces.values()
        failed = sum("reason" in piece for piece in pieces)
        seconds = sum(piece["seconds"] for piece in pieces)
        left = None if journal.planned is None else len({*journal.planned} - {*journal.pieces})
        if journal.is_complete:
            state = "done"
        elif journal.error is not None:
            state = "cannot begin"
        else:
            state = "unfinished" if journal.path.exists() else "not begun"
        faults = sum(len(piece.get("faults", [])) for piece in pieces)
        return cls(state, len(pieces) - failed, failed, left, faults, seconds)


def failures_of(journal: StageJournal) -> list[str]:
    """In plain words, what could not be measured and what is wrong."""
    lines = [] if journal.error is None else [f"The stage cannot begin: {journal.error}"]
    for name, piece in journal.pieces.items():
        lines += [f"{name}: {piece['reason']}"] if "reason" in piece else piece["faults"] + piece["failures"]
    return [*dict.fromkeys(lines)]


def markdown(machine: Mapping[str, Any], journals: Mapping[str, StageJournal]) -> str:
    """The whole report: what it was measured on, how far each stage is, and the tables of those that have results."""
    head = [
        f"On {hardware_line(machine)}.",
        f"Triton {machine['triton']}, {machine['toolkit']}, driver {machine['driver']}, "
        f"{machine['device_memory'] / 2**30:,.0f} GiB, {machine['multiprocessors']} multiprocessors.",
    ]
    if any(journal.setup["is_dry_run"] for journal in journals.values()):
        head.append("**A dry run on the CPU, with Triton's interpreter: no figure says anything of a card.**")
    parts = [f"# {machine['device']}", "\n".join(head), _stages(journals)]
    for name, journal in journals.items():
        rows = [row for piece in journal.pieces.values() for row in piece.get("rows", [])]
        lines = failures_of(journal)
        if rows or lines:
            parts += [f"## Stage {name}", *_tables(rows), bullets(lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _tables(rows: Sequence[Row]) -> list[str]:
    parts = []
    for name, section in SECTIONS.items():
        if of_section := rows_of(rows, name):
            if name in (*speed_tables.SECTIONS, "codecs"):
                of_section = speed_tables.with_cost_of_context(of_section)
            parts.append(section.markdown(of_section, "###"))
    attention = rows_of(rows, "attention") + rows_of(rows, "shared")
    if attention:
        results = {"copy_bytes_per_second": None, "rows": attention, "failures": []}
        parts.append(bullets(kernel_tables.conclusions(results)))
    if tuned := rows_of(rows, "tuning"):
        parts.append("\n".join(["```python", *(row["row"] for row in tuned), "```"]))
    return parts


def _stages(journals: Mapping[str, StageJournal]) -> str:
    section = Section(
        "Stages",
        "Pieces that were measured, that failed, and that are left for another run; what is wrong in those measured.",
        (
            ("stage", lambda row: row["stage"]),
            ("state", lambda row: row["state"]),
            ("measured", figure("measured")),
            ("failed", figure("failed")),
            ("left", figure("left")),
            ("wrong", figure("faults")),
            ("s", figure("seconds", 0)),
            ("begun (UTC)", lambda row: row["begun"]),
        ),
        "stage",
    )
    return section.markdown(
        [
            {"stage": name, **vars(Progress.of(journal)), "begun": journal.begun if journal.path.exists() else "-"}
            for name, journal in journals.items()
        ]
    )
