"""What to compute once and not once for each row, before a batch is handed to `generate`."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class SharedPrefill(NamedTuple):
    """The beginning of a row that is to be computed by itself.

    Attributes:
        row: the row.
        num_tokens: of the row, up to where it is to be cached.
    """

    row: int
    num_tokens: int


def plan_parts(
    rows: Sequence[np.ndarray], cached: Sequence[int], padding: Sequence[int], *, least_saved: int
) -> list[SharedPrefill]:
    """The parts of a batch that are worth a forward pass of their own, with a batch of one.

    `generate` goes on from one column in all rows, so a batch computes again what is cached for some of its rows
    only, and each row computes what all of them begin with. Either can be computed once instead: what rows share, and
    what the rows with the shortest cached prefix lack. Costs are counted in tokens.

    Args:
        rows: tokens of each row, int `[n]`, padding left out.
        cached: tokens of each row that are cached.
        padding: leading columns of each row that are not tokens.
        least_saved: tokens that have to be saved for any of it to be worth while.

    Returns:
        The parts in the order to compute them; none if it does not pay.
    """
    num_columns = max(len(tokens) + pad for tokens, pad in zip(rows, padding, strict=True))
    order = sorted(range(len(rows)), key=lambda row: rows[row].tolist())
    shared, parts, reach, cost = _shared_lengths(rows, order), [], list(cached), 0
    carried = 0
    for place, row in enumerate(order):
        # What the row before has, as far as this one begins alike.
        have = max(cached[row], min(carried, shared[place]))
        most = min(max(shared[place], shared[place + 1]), len(rows[row]) - 1)
        if most > have:
            parts.append(SharedPrefill(row, most))
            cost += most - have
        reach[row] = carried = max(have, most)
    ends = [min(tokens + pad, num_columns - 1) for tokens, pad in zip(reach, padding, strict=True)]
    plain = len(rows) * (num_columns - min(tokens + pad for tokens, pad in zip(cached, padding, strict=True)))
    with_shared = cost + len(rows) * (num_columns - min(ends))
    lagging = [SharedPrefill(row, max(ends) - padding[row]) for row in order if ends[row] < max(ends)]
    with_lagging = cost + sum(max(ends) - ends[part.row] for part in lagging)
    with_lagging += len(rows) * (num_columns - max(ends))
    if plain - min(with_shared, with_lagging) < least_saved:
        return []
    return parts if with_shared <= with_lagging else parts + lagging


def _shared_lengths(rows: Sequence[np.ndarray], order: Sequence[int]) -> list[int]:
    """Tokens that each row of an order begins with like the one before; 0 at both ends."""
    lengths = [0]
    for first, second in pairwise(order):
        length = min(len(rows[first]), len(rows[second]))
        differ = np.flatnonzero(rows[first][:length] != rows[second][:length])
        lengths.append(int(differ[0]) if differ.size else length)
    return [*lengths, 0]
