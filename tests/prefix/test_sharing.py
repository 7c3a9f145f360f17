"""What of a batch is computed once: rows of letters, one token each."""

import numpy as np
import pytest

from hf_paged_cache.prefix.sharing import plan_parts


def plan(rows: list[str], known: list[int], *, least_saved: int = 1) -> list[tuple[int, int]]:
    width = max(map(len, rows))
    tokens = [np.array([ord(letter) for letter in row]) for row in rows]
    padding = [width - len(row) for row in rows]
    return [tuple(part) for part in plan_parts(tokens, known, padding, least_saved=least_saved)]


def test_what_all_rows_begin_with_is_computed_once():
    assert plan(["abcdefXX", "abcdefYY", "abcdefZZ"], [0, 0, 0]) == [(0, 6)]


def test_nothing_is_computed_twice():
    assert plan(["abcdefXX", "abcdefYY"], [6, 6]) == []
    assert plan(["abcdefXX", "abcdefYY"], [4, 4]) == [(0, 6)]
    assert plan(["abcdefXX"], [0]) == []


def test_equal_rows_leave_the_last_token_to_generate():
    assert plan(["abcdef", "abcdef"], [0, 0]) == [(0, 5)]


def test_rows_that_share_in_pairs_are_brought_to_one_length():
    # Each pair shares 6 of 8; the shorter sharing of all four, 2, is in the first part already.
    parts = plan(["abcdefXX", "abcdefYY", "abghijXX", "abghijYY"], [0, 0, 0, 0])
    assert parts == [(0, 6), (2, 6)]


def test_a_row_that_lags_is_brought_up_where_that_is_less_than_what_the_others_would_compute_again():
    rows = [20 * letter for letter in "abcdefgh"]
    known = [19, 19, 19, 19, 19, 19, 19, 0]
    assert plan(rows, known) == [(7, 19)]
    # Brought up or not, two rows without anything known are computed as well by `generate`.
    assert plan(rows[:2], [0, 0]) == []


def test_padding_counts_for_where_rows_can_go_on_from():
    # The short row may begin at column 6, so the long one goes on from there at most if nothing else is done.
    assert plan(["abcdefghij", "wxyz"], [9, 0]) == [(1, 3)]
    assert plan(["abcdefghij", "wxyz"], [9, 3]) == []


def test_it_has_to_be_worth_while():
    rows = ["abcdefXX", "abcdefYY"]
    assert plan(rows, [0, 0], least_saved=6) == [(0, 6)]
    assert plan(rows, [0, 0], least_saved=7) == []


@pytest.mark.parametrize("seeds", [range(50), range(50, 1000)], ids=["few", "many"])
def test_the_plan_is_never_more_work_than_none(seeds: range):
    """Random batches of few letters: computed by the plan and by `generate` together, against `generate` alone."""
    for seed in seeds:
        check_plan(np.random.default_rng(seed))


def check_plan(generator: np.random.Generator) -> None:
    rows = ["".join(generator.choice([*"ab"], generator.integers(1, 12))) for _ in range(generator.integers(1, 6))]
    width, known = max(map(len, rows)), {""}
    for row in rows:
        if generator.random() < 0.3:
            known |= {row[:end] for end in range(generator.integers(0, len(row)) + 1)}

    def reach(row: str) -> int:
        return max(len(beginning) for beginning in known if row.startswith(beginning) and len(beginning) < len(row))

    def rest() -> int:
        return len(rows) * (width - min(reach(row) + width - len(row) for row in rows))

    alone, computed = rest(), 0
    for row, num_tokens in plan(rows, [reach(row) for row in rows]):
        beginnings = {rows[row][:end] for end in range(num_tokens + 1)}
        computed += len(beginnings - known)
        known |= beginnings
    assert computed + rest() <= alone
