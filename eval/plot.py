"""Plot of `speed.py`: milliseconds a step by context length, one line a cache, one panel for each kind of call."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from report import machine_line

# Okabe and Ito's colours, told apart with every kind of colour vision; markers tell lines apart that lie together.
_STYLES = {
    "dynamic": ("#000000", "o"),
    "quantized": ("#E69F00", "s"),
    "paged": ("#0072B2", "^"),
    "paged+gather": ("#56B4E9", "v"),
    "paged+fork": ("#009E73", "D"),
}


def _panels(rows: list[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["section"] == "decode":
            panels.setdefault(f"Greedy, batch {row['batch']}", []).append(row)
        elif row["section"] == "beam":
            panels.setdefault(f"Beam search, {row['beams']} beams", []).append(row)
    return panels


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Writes the plot of the decode and beam rows as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(results["rows"])
    figure = Figure(figsize=(max(7.2, 4.2 * len(panels)), 5.0), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    handles = {}
    for axes, (title, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name in dict.fromkeys(row["cache"] for row in rows):
            line = [row for row in rows if row["cache"] == name]
            colour, marker = _STYLES[name]
            (handles[line[0]["label"]],) = axes.plot(
                [row["context"] for row in line],
                [row["step_ms"] for row in line],
                color=colour,
                marker=marker,
                markersize=5,
                linewidth=1.8,
            )
        contexts = sorted({row["context"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.minorticks_off()
        axes.margins(x=0.12, y=0.12)
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("tokens of context", fontsize=10)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("milliseconds a step", fontsize=10)
    figure.suptitle(f"Time of a decode step, {results['machine']['model']}", fontsize=13)
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
