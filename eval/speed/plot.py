"""Plot of `eval.speed`: time of a greedy step, bytes and time of beam search by context length, one line a cache."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.common.report import machine_line

# Okabe and Ito's colours, told apart with every kind of colour vision; markers tell lines apart that lie together.
_STYLES = {
    "dynamic": ("#000000", "o"),
    "quantized": ("#E69F00", "s"),
    "paged": ("#0072B2", "^"),
    "int8": ("#CC79A7", "D"),
    "int4": ("#F0E442", "P"),
    "paged+gather": ("#56B4E9", "v"),
    "paged+fork": ("#009E73", "D"),
}


@dataclass(frozen=True)
class _Panel:
    """What one panel shows: a field of rows, by context."""

    title: str
    unit: str
    field: str
    rows: list[Mapping[str, Any]]
    factor: float = 1.0


def _panels(rows: list[Mapping[str, Any]]) -> list[_Panel]:
    panels = []
    decode = [row for row in rows if row["section"] == "decode"]
    for batch in dict.fromkeys(row["batch"] for row in decode):
        of_batch = [row for row in decode if row["batch"] == batch]
        panels.append(_Panel(f"Greedy, batch {batch}", "milliseconds a step", "step_ms", of_batch))
    beam = [row for row in rows if row["section"] == "beam"]
    for beams in dict.fromkeys(row["beams"] for row in beam):
        of_beams = [row for row in beam if row["beams"] == beams]
        panels.append(_Panel(f"{beams} beams", "MiB of keys and values", "bytes_used", of_beams, 2**-20))
        panels.append(_Panel(f"{beams} beams", "seconds a call", "call_seconds", of_beams))
    return panels


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Writes the plot of the decode and beam rows as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(results["rows"])
    figure = Figure(figsize=(max(7.2, 4.2 * len(panels)), 5.0), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    handles = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name in dict.fromkeys(row["cache"] for row in panel.rows):
            line = [row for row in panel.rows if row["cache"] == name]
            colour, marker = _STYLES[name]
            (handles[line[0]["label"]],) = axes.plot(
                [row["context"] for row in line],
                [row[panel.field] * panel.factor for row in line],
                color=colour,
                marker=marker,
                markersize=5,
                linewidth=1.8,
            )
        contexts = sorted({row["context"] for row in panel.rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.minorticks_off()
        axes.margins(x=0.12, y=0.12)
        axes.set_ylim(bottom=0)
        axes.set_title(panel.title, fontsize=11)
        axes.set_ylabel(panel.unit, fontsize=10)
        axes.set_xlabel("tokens of context", fontsize=10)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(results["machine"]["model"], fontsize=13)
    figure.legend(
        handles.values(),
        handles,
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
        title="\n".join(textwrap.wrap(machine_line(results["machine"]), 110)),
        title_fontproperties={"size": 8},
    )
    figure.savefig(file)
