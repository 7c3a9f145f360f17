"""How a call of `paged_attention` is done, as far as shapes, options and the step decide it.

That is the same for all layers of a step, so it is worked out once a step.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton

from hf_paged_kernels.formats.blocks import Blocks
from hf_paged_kernels.step import StepMetadata
from hf_paged_kernels.triton.device import architecture, processors
from hf_paged_kernels.triton.formats import Format, format_of, largest_power_of_2
from hf_paged_kernels.triton.launch import Launch, phase_of, rows_of_program, select
from hf_paged_kernels.triton.shared import SharedRuns, find_shared_runs

RAW = ("raw",)
MAX_SPLITS = 64
# A split shorter than this spends more on its start and its merge than on its keys.
MIN_SPLIT_LENGTH = 256


@dataclass(frozen=True)
class Problem:
    """What a plan depends on besides the step."""

    query_shape: tuple[int, int, int, int]
    device: torch.device
    format: Format
    num_kv_heads: int
    block_size: int
    window: int | None
    has_key_mask: bool
    has_new: bool
    num_splits: int | None
    launch: Launch | None

    @property
    def group(self) -> int:
        return self.query_shape[1] // self.num_kv_heads


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """The first pass where rows share the beginning of their tables.

    Attributes:
        runs: which rows share what.
        tile_rows, tile_lengths, first_tokens: those of `runs`, on the device.
        num_splits, split_length: of this pass.
        sequences, rows: of a program.
        reaches_all: whether every row shares something.
    """

    runs: SharedRuns
    tile_rows: torch.Tensor
    tile_lengths: torch.Tensor
    first_tokens: torch.Tensor
    num_splits: int
    split_length: int
    sequences: int
    rows: int
    reaches_all: bool


@dataclass(frozen=True, eq=False)
class Plan:
    """The launches of one call.

    Attributes:
        constants: compile-time arguments that all attention kernels have in common.
        rows: of a program.
        query_tiles: programs for all queries of a row and KV head.
        num_splits, split_length: how the keys of a row are divided.
        shared: the pass before; `None` if there is none.
    """

    constants: dict[str, Any]
    rows: int
    query_tiles: int
    num_splits: int
    split_length: int
    shared: SharedPlan | None

    @property
    def all_splits(self) -> int:
        return self.num_splits + (self.shared.num_splits if self.shared else 0)


def planned(
    query: torch.Tensor,
    blocks: Blocks,
    step: StepMetadata,
    *,
    window: int | None,
    has_key_mask: bool,
    has_new: bool,
    num_splits: int | None,
    launch: Launch | None,
) -> Plan:
    """The plan of a call, worked out once a step; arguments as in `paged_attention`."""
    problem = Problem(
        query.shape, query.device, format_of(blocks), blocks.num_kv_heads, blocks.block_size, window,
        has_key_mask, has_new, num_splits, launch,
    )  # fmt: skip
    return step.memo(problem, lambda: _plan(problem, step))


def _plan(problem: Problem, step: StepMetadata) -> Plan:
    launch, rows, constants = _shape(problem)
    batch, _, query_length, _ = problem.query_shape
    query_tiles = triton.cdiv(query_length, rows // problem.group)
    programs = batch * problem.num_kv_heads * query_tiles
    tile = constants["TILE"]
    shared = _shared(problem, step, launch)
    first_tokens = shared.runs.first_tokens if shared else np.zeros(batch, dtype=np.int32)
    last_tokens = step.past_lens if problem.has_new else step.seq_lens
    num_splits = problem.num_splits
    if num_splits is None:
        num_splits = _wanted_splits(problem, programs, int((last_tokens - first_tokens).max()))
    num_splits, split_length = _split_lengths(problem, tile, num_splits, first_tokens, last_tokens)
    return Plan(constants, rows, query_tiles, num_splits, split_length, shared)


@lru_cache(maxsize=256)
def _shape(problem: Problem) -> tuple[Launch, int, dict[str, Any]]:
    """Launch, rows of a program, and compile-time arguments, none of which depend on the step."""
    launch = problem.launch or select(
        architecture(problem.device),
        phase_of(problem.query_shape[2]),
        problem.format.width,
        problem.format.bits,
        problem.group,
    )
    tile = launch.tile
    if problem.format.has_block_planes:
        # A tile of codes has one block id, and scales or offsets of one block.
        tile = min(tile, largest_power_of_2(problem.block_size))
    constants = {
        "KEY": problem.format.key,
        "VALUE": problem.format.value,
        "FORMAT": problem.format.constants,
        "GROUP": problem.group,
        "BLOCK_SIZE": problem.block_size,
        "TILE": tile,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }
    return launch, rows_of_program(launch, problem.group, problem.query_shape[2]), constants


def _shared(problem: Problem, step: StepMetadata, launch: Launch) -> SharedPlan | None:
    is_decode = phase_of(problem.query_shape[2]) == "decode"
    if not is_decode or problem.format.constants != RAW or problem.window or problem.has_key_mask or problem.num_splits:
        return None
    batch, _, query_length, _ = problem.query_shape
    # Sequences whose queries fit in one program together.
    rows_each = problem.group * query_length
    sequences = min(launch.rows // rows_each, triton.next_power_of_2(batch))
    runs = find_shared_runs(step, sequences, problem.num_kv_heads) if sequences > 1 else None
    if runs is None:
        return None
    longest = int(runs.tile_lengths.max())
    wanted = _wanted_splits(problem, len(runs.tile_rows) * problem.num_kv_heads, longest)
    num_splits, split_length = _split_lengths(problem, launch.tile, wanted, np.zeros(1), runs.tile_lengths)
    return SharedPlan(
        runs,
        *runs.on(problem.device),
        num_splits=num_splits,
        split_length=split_length,
        sequences=sequences,
        rows=max(16, triton.next_power_of_2(sequences * rows_each)),
        reaches_all=bool(runs.first_tokens.all()),
    )


def _wanted_splits(problem: Problem, programs: int, num_tokens: int) -> int:
    """Splits that fill the card once, from the host's lengths: no wait for the device."""
    available = processors(problem.device)
    if programs >= 0.8 * available:
        return 1
    if problem.window is not None:
        num_tokens = min(num_tokens, problem.window + problem.query_shape[2])
    return max(1, min(MAX_SPLITS, 2 * available // programs, num_tokens // MIN_SPLIT_LENGTH))


def _split_lengths(
    problem: Problem, tile: int, num_splits: int, first_tokens: np.ndarray, last_tokens: np.ndarray
) -> tuple[int, int]:
    """The number of splits that have something to do, and the tokens of each, a multiple of the tile.

    The first tile of a row begins at or before the first token that it sees.
    """
    first, last = first_tokens.astype(np.int64), last_tokens.astype(np.int64)
    if problem.window is not None:
        new = 0 if problem.has_new else problem.query_shape[2]
        first = np.maximum(first, last - new - problem.window + 1)
    tiles = int((-(-last // tile) - first // tile).max())
    tiles_each = max(1, -(-tiles // num_splits))
    return max(1, -(-tiles // tiles_each)), tiles_each * tile
