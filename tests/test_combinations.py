"""Which combinations of parameters the quick run has, and which the longer ones."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.support.combinations import Later, combined, covering, later


@pytest.mark.parametrize("sizes", [(1,), (3,), (8, 3), (6, 5, 7, 2), (2, 2, 2, 2, 2), (7, 1, 4)], ids=str)
@pytest.mark.parametrize("strength", [1, 2, 3])
def test_each_part_is_in_some_combination(sizes: tuple[int, ...], strength: int) -> None:
    combinations = covering(sizes, strength)
    assert len(set(combinations)) == len(combinations)
    for places in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        parts = {tuple(combination[place] for place in places) for combination in combinations}
        assert len(parts) == math.prod(sizes[place] for place in places)


def test_combinations_are_few() -> None:
    assert len(covering((6, 5, 7, 2), 1)) == 7
    assert len(covering((6, 5, 7, 2), 2)) <= 45  # of 420, and no fewer than 6 * 7
    assert len(covering((3, 3, 3), 2)) <= 12  # of 27, and no fewer than 9


def runs(mark: pytest.MarkDecorator) -> dict[str, str]:
    """By the id of a combination, the first run that has it."""
    return {parameter.id: parameter.marks[0].name if parameter.marks else "quick" for parameter in mark.mark.args[1]}


def test_the_quick_run_has_every_value_the_slow_one_every_pair_and_the_rest_is_evidence() -> None:
    run_of = runs(combined(quick=1, slow=2, number=[1, 2, 3], letter={"a": "A", "b": "B"}, is_on=[True, False]))
    assert len(run_of) == 12
    assert "1-a-True" in run_of
    by_run = {run: [name.split("-") for name in run_of if run_of[name] == run] for run in run_of.values()}
    assert len(by_run["quick"]) == 3
    assert [len(set(values)) for values in zip(*by_run["quick"], strict=True)] == [3, 2, 2]
    pairs = [[*itertools.combinations(name, 2)] for name in by_run["quick"] + by_run["slow"]]
    assert [len(set(of_two)) for of_two in zip(*pairs, strict=True)] == [6, 6, 4]
    assert by_run["evidence"]


def test_the_full_product_is_slow_if_nothing_else_is_asked_for() -> None:
    assert {*runs(combined(quick=1, number=[1, 2], letter=["a", "b"])).values()} == {"quick", "slow"}


def test_what_comes_later_is_never_in_the_quick_run() -> None:
    mark = combined(number=[1, *later(2, 3)], letter={"a": "A", "b": Later("B")})
    assert {name for name, run in runs(mark).items() if run == "quick"} == {"1-a"}
    assert [parameter.values for parameter in mark.mark.args[1]][-1] == (3, "B")
