"""How a call is divided into pieces of work: the same for all layers of a step, so worked out once a step."""

from array import array
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

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
        num_pieces: how many.
        num_units: units that they belong to.
        num_partial_rows: rows of all parts.
        max_rows: rows of the largest piece.
        is_worth_threads: whether several threads are faster than one.
    """

    pieces: array
    num_pieces: int
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
    units = _units(step, max(1, MAX_ROWS // group), window)
    # A tile of keys costs about as much as the products of two queries with it.
    work = [(unit.last - unit.first) * ((unit.end_query - unit.first_query) * group + 2) for unit in units]
    total = sum(work) * num_kv_heads
    target = max(total / (num_threads * PIECES_PER_THREAD), 1)
    pieces: list[tuple[int, ...]] = []
    num_partial_rows = num_units = max_rows = 0
    for unit, unit_work in zip(units, work, strict=True):
        row, first_query, end_query, first, last, past = unit
        rows = (end_query - first_query) * group
        max_rows = max(max_rows, rows)
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
    pieces.sort(key=lambda piece: piece[4] - piece[5])
    return Plan(
        pieces=array("q", chain.from_iterable(pieces)),
        num_pieces=len(pieces),
        num_units=num_units,
        num_partial_rows=num_partial_rows,
        is_worth_threads=len(pieces) > 1 and total > WORTH_THREADS,
        max_rows=max_rows,
    )


class _Unit(NamedTuple):
    """Queries of a row that are attended to together, the keys that some of them see, and the tokens before them."""

    row: int
    first_query: int
    end_query: int
    first: int
    last: int
    past: int


def _units(step: StepMetadata, tile: int, window: int | None) -> list[_Unit]:
    """The units of one KV head, of up to `tile` queries."""
    units = []
    for row, length in enumerate(step.seq_lens.tolist()):
        past = length - step.query_length
        for begin in range(max(-past, 0), step.query_length, tile):
            end = min(begin + tile, step.query_length)
            first = 0 if window is None else max(past + begin - window + 1, 0)
            units.append(_Unit(row, begin, end, first, past + end, past))
    return units


def _bounds(first: int, last: int, num_parts: int, block_size: int) -> list[int]:
    """Where the parts of `first .. last - 1` begin and end, in whole blocks inside."""
    inner = {
        round((first + (last - first) * part / num_parts) / block_size) * block_size for part in range(1, num_parts)
    }
    return [first, *sorted(bound for bound in inner if first < bound < last), last]
