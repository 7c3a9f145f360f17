"""The stages without a model: what `eval.kernels` measures, in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from eval.card.settings import Settings
from eval.card.worker import Measured, Piece
from eval.kernels.correctness import rows_of_format
from eval.kernels.peers import PEERS, Kind, contenders
from eval.kernels.problems import BLOCK_SIZE, Heads, Shape
from eval.kernels.sections import KernelBench

SHARING_ROWS = 8


def correctness(settings: Settings) -> Mapping[str, Piece]:
    """A piece for each format, dtype and kind of heads."""
    device = device_of(settings)
    if settings.is_dry_run:
        from eval.kernels.interpreter import round_as_a_gpu

        round_as_a_gpu()
    pieces = {}
    for kv, dtype, heads in itertools.product(settings.formats, settings.dtypes, settings.heads):
        shape = Shape(Heads(*heads), getattr(torch, dtype), batch=3, context=settings.checked_context, kv=kv)
        pieces[str(shape)] = partial(_check, shape, settings.query_lengths, device)
    return pieces


def tuning(settings: Settings) -> Mapping[str, Piece]:
    """A piece for each row of the launch table."""
    from eval.kernels import launch_search

    extent, device = getattr(launch_search, settings.extent), device_of(settings)

    def search(phase: str, bits: int, dim: int) -> Measured:
        found = launch_search.search(extent, phase, dim, bits, device, settings.repeats)
        return Measured([{"section": "tuning", "summary": found.summary(), "row": found.row()}])

    rows = itertools.product(("decode", "extend"), settings.tuned_bits, settings.tuned_dims)
    return {f"{phase} {dim}, {bits} bits": partial(search, phase, bits, dim) for phase, bits, dim in rows}


def attention(settings: Settings) -> Mapping[str, Piece]:
    """A piece for each shape beside what other libraries offer, for rows that share a prompt, and for launches."""
    # flex_attention is compiled for each shape, which takes longer than all else.
    bench, with_flex = _bench(settings, [peer for peer in PEERS if peer != "flex"]), _bench(settings, ["flex"])
    shapes = _shapes(settings, "raw")
    pieces: dict[str, Piece] = {str(shape): partial(_measure, bench, bench.attention, shape) for shape in shapes}
    if not settings.is_dry_run:
        pieces[f"flex_attention, {shapes[-1]}"] = partial(_measure, with_flex, with_flex.attention, shapes[-1])
    dtype, context = getattr(torch, settings.dtypes[0]), settings.prompt + BLOCK_SIZE
    for heads in settings.heads:
        shape = Shape(Heads(*heads), dtype, SHARING_ROWS, context, shared_prompt=settings.prompt)
        pieces[f"shared prompt, {shape}"] = partial(_measure, bench, bench.shared_prompt, shape)
    shape = Shape(Heads(*settings.heads[0]), dtype, batch=1, context=BLOCK_SIZE)
    return pieces | {"launch": partial(_measure, bench, bench.launch, shape)}


def formats(settings: Settings) -> Mapping[str, Piece]:
    """A piece for each shape and format of codes, beside sdpa on the same numbers in 16 bits; one kind of heads."""
    bench, one_kind = _bench(settings, ["sdpa"]), replace(settings, heads=settings.heads[:1])
    codes = [kv for kv in settings.formats if kv != "raw"]
    return {
        str(shape): partial(_measure, bench, bench.attention, shape) for kv in codes for shape in _shapes(one_kind, kv)
    }


def device_of(settings: Settings) -> torch.device:
    """The card; in a dry run the CPU."""
    return torch.device("cpu" if settings.is_dry_run else "cuda")


def _bench(settings: Settings, peers: Sequence[Kind]) -> KernelBench:
    return KernelBench(
        device_of(settings), contenders(peers), settings.repeats, settings.rotated_bytes, settings.launched_calls
    )


def _shapes(settings: Settings, kv: str) -> list[Shape]:
    sizes = itertools.product(settings.heads, settings.batches, settings.contexts)
    dtype = getattr(torch, settings.dtypes[0])
    return [Shape(Heads(*heads), dtype, batch, context, kv=kv) for heads, batch, context in sizes]


@torch.no_grad()
def _measure(bench: KernelBench, measure: Callable[[Shape], None], shape: Shape) -> Measured:
    num_rows, known = len(bench.rows), {*bench.failures}
    measure(shape)
    return Measured(bench.rows[num_rows:], [failure for failure in bench.failures if failure not in known])


@torch.no_grad()
def _check(shape: Shape, query_lengths: tuple[int, ...], device: torch.device) -> Measured:
    rows = rows_of_format(shape, query_lengths, device)
    return Measured(rows, faults=[f"{row['call']}, {shape}: {row['verdict']}" for row in rows if row["error"] is None])
