"""How a call is divided into pieces of work: the same for all layers of a step, so worked out once a step."""

from dataclasses import dataclass

import numpy as np

from hf_paged_kernels.cpu_kernels.call import PIECE
from hf_paged_kernels.step import StepMetadata

MAX_ROWS = 64
"""Queries, times heads of a group, that share a tile of keys. One query at least, however large its group."""
PIECES_PER_THREAD = 3
"""Of a call that has to be divided. More of them even out what else the machine does; each costs a merge."""
MIN_PIECE = 128
"""Tokens of a piece, at least."""
WORTH_THREADS = 2048
"""Products of a query with a key, or what reading it takes, below which waking threads costs more than they do."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The pieces of a call.

    Attributes:
        pieces: int64 `[num_pieces, len(PIECE)]`, see `PIECE`; `partial` counts rows.
        num_units: units that they belong to.
        num_partial_rows: rows of all parts.
        max_rows: rows of the largest piece.
        is_worth_threads: whether several threads are faster than one.
    """

    pieces: np.ndarray
    num_units: int
    num_partial_rows: int
    max_rows: int
    is_worth_threads: bool


def make_plan(
    step: StepMetadata, group: int, num_kv_heads: int, window: int | None, *, has_new: bool, num_threads: int
) -> Plan:
    """Divides a call so that threads end together.

    Args:
        step: the forward pass.
        group: query heads a KV head.
        num_kv_heads: KV heads, each with work of its own.
        window: tokens that a query sees; `None` for all.
        has_new: whether new tokens are not read from blocks.
        num_threads: threads that are to share the work.
    """
    tile = max(1, MAX_ROWS // group)
    units = _units(step, tile, window)
    # A tile of keys costs about as much as the products of two queries with it.
    work = (units["last"] - units["first"]) * ((units["end_query"] - units["first_query"]) * group + 2)
    total = int(work.sum()) * num_kv_heads
    target = max(total / (num_threads * PIECES_PER_THREAD), 1)
    pieces, num_partial_rows, num_units = [], 0, 0
    for unit, unit_work in zip(units.tolist(), work.tolist(), strict=True):
        row, first_query, end_query, first, last, past = unit
        rows = (end_query - first_query) * group
        num_parts = 1 if num_threads == 1 else max(1, min(round(unit_work / target), (last - first) // MIN_PIECE))
        bounds = _bounds(first, last, num_parts, step.block_size)
        fresh_from = max(past, 0) if has_new else last
        for kv_head in range(num_kv_heads):
            partial = num_partial_rows if len(bounds) > 2 else -1
            for part in range(len(bounds) - 1):
                pieces.append(
                    (row, kv_head, first_query, end_query, bounds[part], bounds[part + 1], fresh_from, num_units,
                     partial, len(bounds) - 1, past, part)
                )  # fmt: skip
            num_partial_rows += rows * (len(bounds) - 1) if partial >= 0 else 0
            num_units += 1
    # Long pieces first: what is left at the end is short.
    order = sorted(range(len(pieces)), key=lambda i: pieces[i][4] - pieces[i][5])
    return Plan(
        pieces=np.array([pieces[i] for i in order], dtype=np.int64).reshape(-1, len(PIECE)),
        num_units=num_units,
        num_partial_rows=num_partial_rows,
        is_worth_threads=len(pieces) > 1 and total > WORTH_THREADS,
        max_rows=int((units["end_query"] - units["first_query"]).max(initial=0)) * group,
    )


def _units(step: StepMetadata, tile: int, window: int | None) -> np.ndarray:
    """Queries that are attended to together, and the keys that some of them see."""
    kind = [(name, np.int64) for name in ("row", "first_query", "end_query", "first", "last", "past")]
    units = []
    for row, length in enumerate(step.seq_lens.tolist()):
        past = length - step.query_length
        for begin in range(max(-past, 0), step.query_length, tile):
            end = min(begin + tile, step.query_length)
            first = 0 if window is None else max(past + begin - window + 1, 0)
            units.append((row, begin, end, first, past + end, past))
    return np.array(units, dtype=kind)


def _bounds(first: int, last: int, num_parts: int, block_size: int) -> list[int]:
    """Where the parts of `first .. last - 1` begin and end, in whole blocks inside."""
    inner = {
        round((first + (last - first) * part / num_parts) / block_size) * block_size for part in range(1, num_parts)
    }
    return [first, *sorted(bound for bound in inner if first < bound < last), last]
