"""`parse_bytes` and `MemoryBudget`: how a limit is written, and what is counted against it."""

import numpy as np
import pytest

from hf_paged_cache.arguments import parse_bytes
from hf_paged_cache.errors import InvalidArgumentError
from hf_paged_cache.memory.budget import MemoryBudget


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (1, 1),
        (123456789, 123456789),
        (np.int64(4096), 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("1kB", 1000),
        ("512MB", 512_000_000),
        ("2GB", 2_000_000_000),
        ("1KiB", 1024),
        ("3 MiB", 3 * 2**20),
        ("  2gib ", 2 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("0.5 kb", 500),
        (2e9, 2_000_000_000),
    ],
)
def test_bytes_are_a_number_or_text_with_a_unit(memory, expected):
    assert parse_bytes(memory) == expected


@pytest.mark.parametrize(
    "memory",
    [
        *("", " ", "GiB", "2 G", "2Gi", "2TB", "-1", "-2GiB", "+2GiB", "1e9", "1,000", "1_000", "2 GiB free", "two"),
        *("1.GiB", ".5GiB", "2GiB2", None, True, -5, float("inf"), float("nan"), [2], b"2GiB"),
    ],
)
def test_what_is_no_number_of_bytes_is_refused_by_name(memory):
    with pytest.raises(InvalidArgumentError, match="expected bytes as a number, or text such as '2GiB'") as error:
        parse_bytes(memory)
    assert repr(memory) in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("memory", [0, "0", "0GiB", "0.0001 B"])
def test_nothing_at_all_is_refused(memory):
    with pytest.raises(InvalidArgumentError, match="expected more than 0 bytes"):
        parse_bytes(memory)


def test_a_budget_counts_what_is_held_and_the_most_that_was():
    budget = MemoryBudget(100)
    budget.add(60)
    budget.add(30)
    budget.remove(60)
    assert (budget.allocated, budget.remaining, budget.peak) == (30, 70, 90)
    budget.remove(30)
    assert (budget.allocated, budget.remaining, budget.peak) == (0, 100, 90)


def test_a_budget_without_a_limit_counts_all_the_same():
    budget = MemoryBudget()
    budget.add(10**15)
    assert budget.limit is None
    assert budget.remaining is None
    assert budget.peak == 10**15
