"""Whether the Triton kernels compute what plain PyTorch does, on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hf_paged_kernels import Blocks, KVBlocks, block_attention_scores, copy_blocks, paged_attention, write_kv

from eval.kernels.formats import clone
from eval.kernels.problems import TOLERANCE, Problem, Shape, WrongResult

Row = dict[str, Any]

# Of the squared error: two scales of fp8 may be as good as each other.
FP8_SLACK = 1.001


def attention_row(shape: Shape, device: torch.device) -> Row:
    """Attention against its definition in float64, over what the blocks read as.

    Several queries come with their keys and values beside the blocks, as in a prompt that continues a cached one.
    """
    problem = Problem(shape, device)
    new_kv = problem.new_kv[0] if shape.query_length > 1 else None
    attend = partial(paged_attention, step=problem.step, scale=problem.scale, new_kv=new_kv, backend="triton")
    what = "decode" if shape.query_length == 1 else f"{shape.query_length} new tokens"
    return _row(what, shape, lambda: problem.check(attend(problem.query, problem.layers[0])))


def write_row(shape: Shape, device: torch.device) -> Row:
    """New tokens in blocks: the bytes that plain PyTorch writes; of fp8 codes that are no worse."""
    problem = Problem(shape, device)
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.batch, shape.heads.num_kv_heads, shape.query_length, shape.heads.head_dim)
    new = [torch.randn(size, generator=generator, dtype=shape.dtype, device=device) for _ in range(2)]
    written = {}
    for backend in ("triton", "reference"):
        written[backend] = clone(problem.layers[0])
        write_kv(written[backend], *new, problem.step, backend=backend)
    compare = partial(_compare_error, shape, problem) if shape.kv == "fp8" else _compare_bytes
    return _row("write", shape, lambda: compare(written["triton"], written["reference"], new))


def copy_row(shape: Shape, device: torch.device) -> Row:
    """Copies of whole blocks: the bytes that plain PyTorch writes."""
    problem = Problem(shape, device)
    pairs = [(1, 0), (2, problem.layers[0].num_blocks - 1)]
    copied = {}
    for backend in ("triton", "reference"):
        copied[backend] = clone(problem.layers[0])
        copy_blocks([copied[backend]], pairs, backend=backend)
    return _row("copy", shape, lambda: _compare_bytes(copied["triton"], copied["reference"], []))


def scores_row(shape: Shape, device: torch.device) -> Row:
    """The attention that each block gets, against plain PyTorch in float64."""
    problem = Problem(shape, device)
    options = {"step": problem.step, "scale": problem.scale}
    blocks = problem.layers[0]
    _, lse = paged_attention(problem.query, blocks, return_lse=True, backend="triton", **options)
    exact = KVBlocks(*(plane.double() for plane in blocks.planes))
    query = problem.query.double()
    _, exact_lse = paged_attention(query, exact, return_lse=True, backend="reference", **options)

    def compare() -> float:
        scores = block_attention_scores(problem.query, blocks, lse=lse, backend="triton", **options)
        expected = block_attention_scores(query, exact, lse=exact_lse, backend="reference", **options)
        error = float((scores.double() - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCE[shape.dtype]:
            raise WrongResult(f"off by {error:.2g} of the largest sum, allowed is {TOLERANCE[shape.dtype]:.2g}")
        return error

    return _row("attention by block", shape, compare)


def rows_of_format(shape: Shape, query_lengths: Sequence[int], device: torch.device) -> list[Row]:
    """Everything that the Triton kernels do on blocks of one format."""
    rows = [attention_row(replace(shape, query_length=queries), device) for queries in query_lengths]
    if shape.kv in ("raw", "int8", "fp8"):
        rows.append(write_row(replace(shape, query_length=max(query_lengths)), device))
    if shape.kv == "raw":
        rows += [copy_row(shape, device), scores_row(shape, device)]
    return rows


def _row(what: str, shape: Shape, compare: Callable[[], float]) -> Row:
    row = {"section": "correctness", "call": what, "kv": shape.kv, "dtype": shape.dtype_name}
    row |= {"heads": str(shape.heads), "batch": shape.batch, "context": shape.context}
    try:
        return row | {"error": compare(), "verdict": "right"}
    except WrongResult as error:
        return row | {"error": None, "verdict": f"WRONG: {error}"}


def _compare_bytes(written: Blocks, expected: Blocks, new: Sequence[torch.Tensor]) -> float:
    for plane, wanted in zip(written.planes, expected.planes, strict=True):
        different = int((plane.view(torch.uint8) != wanted.view(torch.uint8)).sum())
        if different:
            raise WrongResult(f"{different} of {plane.nbytes} bytes differ")
    return 0.0


def _compare_error(
    shape: Shape, problem: Problem, written: Blocks, expected: Blocks, new: Sequence[torch.Tensor]
) -> float:
    """
    Returns:
        By how much the squared error of what was written exceeds that of plain PyTorch, as a part of it.
    """
    slots = torch.from_numpy(problem.step.slots.astype("int64")).to(problem.device)
    block_ids, offsets = slots // problem.step.block_size, slots % problem.step.block_size
    excess = 0.0
    for part, states in zip(("key", "value"), new, strict=True):
        errors = []
        for blocks in (written, expected):
            read = blocks.read_blocks(part, block_ids.flatten())  # [heads, rows * queries, block_size, dim]
            tokens = read[:, torch.arange(offsets.numel()), offsets.flatten()].unflatten(1, offsets.shape)
            errors.append(float((tokens.transpose(0, 1).double() - states.double()).square().sum()))
        if not errors[0] <= FP8_SLACK * errors[1]:
            raise WrongResult(f"the squared error of a {part} is {errors[0]:.4g}, plain PyTorch's is {errors[1]:.4g}")
        excess = max(excess, errors[0] / errors[1] - 1)
    return excess
