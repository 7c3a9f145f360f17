"""Parameters of tests that are combined: a few combinations always, the others in the longer runs.

Most faults show with one value of one parameter, or with one pair of values, so a set of combinations in which every
value (or every pair) occurs finds nearly all that the full product finds, in a small part of the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

Axis = Sequence[Any] | Mapping[str, Any]
Combination = tuple[int, ...]  # for each parameter, the index of its value


@dataclass(frozen=True)
class Later:
    """A value that takes seconds, or is much like another one: not for the quick run."""

    value: Any

    def __str__(self) -> str:
        return str(self.value)


def later(*values: Any) -> list[Any]:
    """These values of a parameter of `combined`, for the slow run: `[1, *later(2, 3)]`."""
    return [Later(value) for value in values]


def combined(*, quick: int = 2, slow: int | None = None, **axes: Axis) -> Any:
    """The full product of these parameters, as a decorator that is used like `pytest.mark.parametrize`.

        @combined(lengths=[(1,), (40, 17)], window=[None, 16], query_length=[1, 9])
        def test_attention(lengths, window, query_length): ...

    Args:
        quick: the quick run has each `quick` values of different parameters together in some combination: 1 for every
            value, 2 for every pair of values.
        slow: the same for the run with the slow tests; `None` for the full product, else the rest is `evidence`.
        axes: the values of each parameter, named by `str` in the test's id, or by the keys of a mapping. The quick run
            has none of those that are `later`.
    """
    named = [
        sorted(
            axis.items() if isinstance(axis, Mapping) else [(str(value), value) for value in axis],
            key=lambda entry: isinstance(entry[1], Later),
        )
        for axis in axes.values()
    ]
    sizes = [len(axis) for axis in named]
    in_quick_run = covering([sum(not isinstance(value, Later) for _, value in axis) for axis in named], quick)
    in_slow_run = itertools.product(*map(range, sizes)) if slow is None else covering(sizes, slow, given=in_quick_run)
    run_of = dict.fromkeys(in_slow_run, pytest.mark.slow) | dict.fromkeys(in_quick_run, ())
    parameters = []
    for combination in itertools.product(*map(range, sizes)):
        chosen = [axis[index] for axis, index in zip(named, combination, strict=True)]
        marks = run_of.get(combination, pytest.mark.evidence)
        values = [value.value if isinstance(value, Later) else value for _, value in chosen]
        parameters.append(pytest.param(*values, id="-".join(name for name, _ in chosen), marks=marks))
    return pytest.mark.parametrize(tuple(axes), parameters)


def covering(sizes: Sequence[int], strength: int, given: Sequence[Combination] = ()) -> list[Combination]:
    """Few combinations that have, with those given, for each `strength` parameters all combinations of their values.

    Each combination begins with what is still missing, and takes, for one other parameter after the other, the value
    that adds the most of what is missing, or was used the least.

    Args:
        sizes: how many values each parameter has.
    """
    strength = min(strength, len(sizes))
    missing = dict.fromkeys(
        part
        for places in itertools.combinations(range(len(sizes)), strength)
        for part in itertools.product(*([(place, index) for index in range(sizes[place])] for place in places))
    )
    for combination in given:
        for part in _parts(dict(enumerate(combination)), strength):
            missing.pop(part, None)
    uses = [[0] * size for size in sizes]
    combinations: list[Combination] = []
    while missing:
        chosen = dict(next(iter(missing)))
        for place, size in enumerate(sizes):
            if place not in chosen:
                gains = [sum(part in missing for part in _parts({**chosen, place: i}, strength)) for i in range(size)]
                chosen[place] = min(range(size), key=lambda i: (-gains[i], uses[place][i], i))
        combinations.append(tuple(chosen[place] for place in range(len(sizes))))
        for place, index in chosen.items():
            uses[place][index] += 1
        for part in _parts(chosen, strength):
            missing.pop(part, None)
    return combinations


def _parts(chosen: Mapping[int, int], strength: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """What these values of parameters are combinations of."""
    return itertools.combinations(sorted(chosen.items()), strength)
