"""Plot of `eval.quality`: divergence against size for each context, and a map of the pass keys for each cache."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.common.report import Row, machine_line

# Okabe and Ito's colours, told apart with every kind of colour vision; so are the markers.
_STYLES = {
    "paged": ("PagedCache", "#0072B2", "o"),
    "quantized": ("QuantizedCache", "#E69F00", "s"),
}
_MAPS_A_ROW = 6


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Writes what there is of both as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    likelihood = [row for row in results["rows"] if row["section"] == "likelihood" and not row["is_exact"]]
    passkey = [row for row in results["rows"] if row["section"] == "passkey"]
    contexts = sorted({row["context"] for row in likelihood})
    caches = list(dict.fromkeys(row["cache"] for row in passkey))
    map_rows = -(-len(caches) // _MAPS_A_ROW)
    heights = [4.5] * bool(contexts) + [1.9 * map_rows] * bool(caches)
    figure = Figure(figsize=(max(9.0, 4.8 * len(contexts)), sum(heights) + 0.9), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    parts = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if contexts:
        part = next(parts)
        panels = part.subplots(1, len(contexts), squeeze=False)[0]
        for axes, context in zip(panels, contexts, strict=True):
            _draw_divergence(axes, [row for row in likelihood if row["context"] == context])
        part.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    if caches:
        _draw_maps(next(parts), [[row for row in passkey if row["cache"] == cache] for cache in caches])
    figure.suptitle("\n".join(textwrap.wrap(machine_line(results["machine"]), 110)), fontsize=8)
    figure.savefig(file)


def _draw_divergence(axes: Any, rows: Sequence[Row]) -> None:
    for family, (label, colour, marker) in _STYLES.items():
        of_family = [row for row in rows if row["family"] == family and row["bits_stored"] is not None]
        axes.errorbar(
            [row["bits_stored"] for row in of_family],
            [row["kl_mean"] for row in of_family],
            yerr=[row["kl_error"] or 0.0 for row in of_family],
            label=label,
            color=colour,
            marker=marker,
            linestyle="none",
        )
        # Those of one size stand above each other, and so do their labels.
        for index, row in enumerate(sorted(of_family, key=lambda row: (row["bits_stored"], -row["kl_mean"]))):
            axes.annotate(
                row["cache"],
                (row["bits_stored"], row["kl_mean"]),
                (5, -11 if index % 2 else 5),
                textcoords="offset points",
                fontsize=8,
            )
    axes.set_yscale("log")
    axes.margins(x=0.15, y=0.12)
    axes.set_title(f"{rows[0]['context']:,} tokens of context", fontsize=11)
    axes.set_xlabel("bits a number, all included", fontsize=10)
    axes.set_ylabel("KL divergence, nats", fontsize=10)
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_maps(part: Any, maps: Sequence[Sequence[Row]]) -> None:
    """Depth by context, one map a cache; the darker, the more were found."""
    grid = part.subplots(-(-len(maps) // _MAPS_A_ROW), _MAPS_A_ROW, squeeze=False).ravel()
    for axes in grid[len(maps) :]:
        axes.set_visible(False)
    for axes, rows in zip(grid, maps, strict=False):
        rows = sorted(rows, key=lambda row: row["context"])
        found = [list(depths) for depths in zip(*(row["found"] for row in rows), strict=True)]
        axes.imshow(found, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for y, depths in enumerate(found):
            for x, share in enumerate(depths):
                axes.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=7, color="w" if share > 0.5 else "k")
        axes.set_xticks(range(len(rows)), [f"{row['context']:,}" for row in rows], fontsize=7)
        axes.set_yticks(range(len(found)), [f"{depth:.0%}" for depth in rows[0]["depths"]], fontsize=7)
        axes.set_title(rows[0]["cache"], fontsize=8)
    part.supxlabel("tokens of context", fontsize=9)
    part.supylabel("depth of the pass key", fontsize=9)
