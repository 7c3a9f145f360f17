"""The search of `eval.kernels.tune`: which tile, warps, stages and rows are fastest for one row of the launch table."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, replace
from functools import partial

import torch
import triton
from hf_paged_kernels.triton import paged_attention
from hf_paged_kernels.triton.device import architecture
from hf_paged_kernels.triton.launch import MAX_DIM, Launch, Phase, select

from eval.common.timing import interleave, median_ratio
from eval.kernels.problems import Heads, Problem, Shape, checked_round
from eval.kernels.timing import Call, rotated_bytes

__all__ = ["INTERPRETED", "MAX_DIM", "MEDIUM", "QUICK", "THOROUGH", "Extent", "Found", "Size", "search"]

# A launch that is faster by less is not told from today's.
LEAST_GAIN = 1.02


@dataclass(frozen=True)
class Size:
    """What of a shape does not depend on the row that is searched."""

    batch: int
    context: int
    query_length: int = 1
    shared_prompt: int = 0


@dataclass(frozen=True)
class Extent:
    """How far a search goes.

    Attributes:
        tiles, warps, stages, rows: the candidates are all combinations.
        kept: candidates that come into the second round.
        sizes: for each phase; the first is that of the first round.
        heads: query heads and KV heads.
    """

    tiles: tuple[int, ...]
    warps: tuple[int, ...]
    stages: tuple[int, ...]
    rows: tuple[int, ...]
    kept: int
    sizes: dict[Phase, tuple[Size, ...]]
    heads: tuple[int, int] = (32, 8)


THOROUGH = Extent(
    tiles=(16, 32, 64, 128),
    warps=(2, 4, 8, 16),
    stages=(1, 2, 3, 4, 5),
    rows=(16, 32, 64, 128),
    kept=6,
    sizes={
        # A batch, one long row, rows enough to need no splits, a draft of four tokens, eight beams.
        "decode": (
            Size(8, 4096),
            Size(1, 16384),
            Size(64, 1024),
            Size(8, 4096, query_length=4),
            Size(8, 16384 + 64, shared_prompt=16384),
        ),
        # A chunk of a long prompt, prompts that continue a cached one, long drafts.
        "extend": (
            Size(1, 8192, query_length=512),
            Size(4, 2048, query_length=128),
            Size(8, 4096, query_length=16),
        ),
    },
)
# What a card does in some minutes for a row.
MEDIUM = replace(THOROUGH, warps=(4, 8), stages=(2, 3, 4), rows=(16, 64), kept=3)
QUICK = Extent(
    tiles=(32, 64, 128),
    warps=(4, 8),
    stages=(2, 3),
    rows=(16, 64),
    kept=2,
    sizes={phase: sizes[:2] for phase, sizes in THOROUGH.sizes.items()},
)
# Shows that a search runs; its times say nothing of a card.
INTERPRETED = Extent(
    tiles=(16, 32),
    warps=(4,),
    stages=(1,),
    rows=(16,),
    kept=1,
    sizes={"decode": (Size(1, 48),), "extend": (Size(1, 48, query_length=16),)},
    heads=(2, 1),
)


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        launch: the fastest, or today's if none is faster by more than times scatter.
        today: what the table has for this card now.
        gains: by how much `launch` is faster, for each shape.
        num_candidates: launches that were tried.
        left_out: how many of them failed, by the kind of failure.
    """

    launch: Launch
    today: Launch
    gains: list[float]
    num_candidates: int
    left_out: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        """One line in words."""
        launch, today = (
            f"rows {each.rows}, tile {each.tile}, warps {each.num_warps}, stages {each.num_stages}"
            for each in (self.launch, self.today)
        )
        gain = statistics.geometric_mean(self.gains)
        line = f"{self.launch.phase} {self.launch.max_dim}, {self.launch.bits} bits: {launch}, "
        if launch == today:
            line += "as today"
        else:
            line += (
                f"{gain:.2f} times as fast as today's {today} ({min(self.gains):.2f} to {max(self.gains):.2f} by shape)"
            )
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.left_out.most_common())
        return f"{line}; {self.num_candidates} candidates" + (f", left out: {reasons}" if reasons else "")

    def row(self) -> str:
        """The launch as a row of the table."""
        *values, source = astuple(self.launch)
        return f"Launch({', '.join(map(json.dumps, values))}, source={json.dumps(source)}),"


def search(extent: Extent, phase: Phase, dim: int, bits: int, device: torch.device, repeats: int) -> Found:
    """Finds a row of the launch table for a card.

    Raises:
        RuntimeError: the launch that the table has now does not work.
    """
    arch = architecture(device)
    today = replace(select(arch, phase, dim, bits), arch=arch, max_dim=dim, source=_source(device))
    shapes = _shapes(extent, phase, dim, bits, device)
    candidates = [
        today,
        *(
            replace(today, tile=tile, num_warps=warps, num_stages=stages)
            for tile in extent.tiles
            for warps in extent.warps
            for stages in extent.stages
        ),
    ]
    times, failures = _race(today, candidates, shapes[0], device, repeats)
    kept = sorted(times, key=times.get)[: extent.kept]
    finalists = [today, *kept, *(replace(launch, rows=rows) for launch in kept for rows in extent.rows)]
    by_shape = []
    for shape in shapes:
        times, more_failures = _race(today, finalists, shape, device, repeats)
        by_shape.append(times)
        failures |= more_failures
        finalists = [launch for launch in finalists if launch in times]

    def gain(launch: Launch) -> float:
        return statistics.geometric_mean(1 / times[launch] for times in by_shape)

    best = max(finalists, key=gain)
    launch = best if gain(best) >= LEAST_GAIN else today
    return Found(
        launch=launch,
        today=today,
        gains=[1 / times[launch] for times in by_shape],
        num_candidates=len({*candidates, *finalists, *failures}),
        left_out=Counter(reason.partition(":")[0] for reason in failures.values()),
    )


def _race(
    today: Launch, launches: Iterable[Launch], shape: Shape, device: torch.device, repeats: int
) -> tuple[dict[Launch, float], dict[Launch, str]]:
    """Lets launches take turns on one shape.

    Returns:
        The time of each, divided by that of today's launch, and the reasons of those that failed.
    """
    problem = Problem(shape, device, rotated_bytes(device) if device.type == "cuda" else 0)
    runs = {launch: partial(checked_round, problem, partial(_calls, launch)) for launch in launches}
    ready, failures = interleave(runs, 1)
    times, later_failures = interleave({launch: one_round for launch, (one_round,) in ready.items()}, repeats)
    failures |= later_failures
    if today in failures:
        raise RuntimeError(f"today's launch {today} fails with {shape}: {failures[today]}")
    return {launch: median_ratio(seconds, times[today]) for launch, seconds in times.items()}, failures


def _calls(launch: Launch, problem: Problem) -> list[Call]:
    attend = partial(paged_attention, step=problem.step, scale=problem.scale, launch=launch)
    if launch.phase == "decode":
        return [partial(attend, problem.query, blocks) for blocks in problem.layers]
    return [
        partial(attend, problem.query, blocks, new_kv=new_kv)
        for blocks, new_kv in zip(problem.layers, problem.new_kv, strict=True)
    ]


def _shapes(extent: Extent, phase: Phase, dim: int, bits: int, device: torch.device) -> list[Shape]:
    # Triton's interpreter does not multiply bfloat16.
    has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.float32 if bits == 32 else torch.bfloat16 if has_bfloat16 else torch.float16
    return [
        Shape(Heads(*extent.heads, dim), dtype, size.batch, size.context, size.query_length, size.shared_prompt)
        for size in extent.sizes[phase]
    ]


def _source(device: torch.device) -> str:
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "no card: interpreted"
    return f"timed on {card}, Triton {triton.__version__}"
