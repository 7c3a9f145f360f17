"""Names of what tokens stand for: one for each key, token and length, and none for what nobody has named."""

import numpy as np
import pytest

from hf_paged_cache import InvalidArgumentError
from hf_paged_cache.prefix.extra_keys import (
    WHOLE_PROMPT,
    Name,
    Names,
    Span,
    before_unknown,
    keys_of_rows,
    real_tokens,
    runs_of,
    spans_of,
)

IMAGE, VIDEO = 5, 6
TOKENS = np.array([1, IMAGE, IMAGE, 2, VIDEO, IMAGE, 3])
RUNS = [(1, 3), (4, 5), (5, 6)]


def spans(key, tokens=TOKENS, *, names_whole=False):
    return spans_of(tokens, key, [IMAGE, VIDEO], names_whole=names_whole)


def test_a_run_is_of_one_token() -> None:
    assert runs_of(TOKENS, [IMAGE, VIDEO]) == RUNS
    assert runs_of(TOKENS, [IMAGE]) == [(1, 3), (5, 6)]
    assert runs_of(TOKENS[1:3], [IMAGE]) == [(0, 2)]
    assert runs_of(TOKENS, []) == []


@pytest.mark.parametrize(
    ("extra_key", "num_rows", "expected"),
    [
        (None, 2, [None, None]),
        ("a", 1, ["a"]),
        (["a", "b"], 1, [["a", "b"]]),
        ([], 1, [[]]),
        ([["a", "b"]], 1, [["a", "b"]]),
        (["a", "b"], 2, ["a", "b"]),
        ([["a"], None, "b"], 3, [["a"], None, "b"]),
    ],
)
def test_keys_of_rows(extra_key, num_rows, expected) -> None:
    assert keys_of_rows(extra_key, num_rows) == expected


@pytest.mark.parametrize(
    ("extra_key", "num_rows"), [("a", 2), (["a"], 2), (b"a", 1), ([b"a"], 1), (7, 1), ([["a"], [7]], 2), ({"a": 1}, 1)]
)
def test_other_keys_are_refused(extra_key, num_rows) -> None:
    with pytest.raises(InvalidArgumentError, match=r"extra_key=.*: expected a"):
        keys_of_rows(extra_key, num_rows)


def test_spans_have_a_key_each_or_share_one_or_have_none() -> None:
    assert [span[:2] for span in spans(None)] == RUNS
    assert {span.name for span in spans(None)} == {None}
    assert [span.name[:3] for span in spans(["a", "b", "a"])] == [("a", 0, IMAGE), ("b", 0, VIDEO), ("a", 0, IMAGE)]
    assert [span.name[:2] for span in spans("a")] == [("a", 1), ("a", 2), ("a", 3)]
    assert spans("a", TOKENS[:4]) == spans(["a"], TOKENS[:4])
    with pytest.raises(InvalidArgumentError, match=r"2 keys, but .* 3 runs.* pass one str"):
        spans(["a", "b"])


def test_a_key_of_the_whole_prompt_names_its_first_token() -> None:
    assert spans("a", TOKENS[:1]) == (Span(0, 1, Name("a", WHOLE_PROMPT, 1, 1)),)
    assert [span.start for span in spans("a", names_whole=True)] == [0, 1, 4, 5]
    assert not spans("a", names_whole=True)[0].is_image
    assert [span.start for span in spans("a", TOKENS[1:], names_whole=True)] == [0, 3, 4]


def test_no_two_keys_have_one_name() -> None:
    names = Names()
    prompts = [(key, TOKENS[:length]) for key in ("a", "b", ["a"], ["b"], ["ab"]) for length in (2, 3, 4)]
    prompts += [("a", TOKENS[:1]), ("a", TOKENS), (["a", "b", "c"], TOKENS)]
    learned = {tuple(names.learn(tokens, spans(key, tokens)).tolist()) for key, tokens in prompts}
    assert len(learned) == len({(str(spans(key, tokens)), len(tokens)) for key, tokens in prompts})
    for key, tokens in prompts:
        named = names.named(tokens, spans(key, tokens))
        back, keys = real_tokens(named, names)
        assert back.tolist() == tokens.tolist()
        assert {*keys} == ({key} if isinstance(key, str) else {*key})


def test_what_nobody_has_named_ends_what_is_cached() -> None:
    names = Names()
    assert names.named(TOKENS, spans(["a", "b", "c"])).tolist() == [1]
    assert names.learn(TOKENS[:2], spans(["a", "b", "c"])).tolist() == [1]  # the image is longer
    assert names.learn(TOKENS[:4], spans(["a", "b", "c"])).tolist() == [1, -1, -1, 2]
    assert names.named(TOKENS, spans(["a", "c", "b"])).tolist() == [1, -1, -1, 2]
    assert names.learn(TOKENS, spans(None)).tolist() == [1]
    assert before_unknown(TOKENS, spans(None)[:2], [IMAGE, VIDEO]).tolist() == TOKENS[:5].tolist()
    assert before_unknown(TOKENS, spans(None), [IMAGE, VIDEO]).tolist() == TOKENS.tolist()


def test_another_shift_is_another_name_and_the_newest_counts() -> None:
    names = Names()
    first = spans(["a"], TOKENS[:4])
    moved = tuple(span._replace(name=span.name._replace(shift=-1)) for span in first)
    assert names.learn(TOKENS[:4], first).tolist() != names.learn(TOKENS[:4], moved).tolist()
    assert names.with_shifts(first) == moved
    assert Names(names.items()).with_shifts(first) == moved
    names.learn(TOKENS[:4], first)
    assert names.with_shifts(moved) == first


def test_names_that_nothing_has_are_forgotten_and_their_numbers_not_given_again() -> None:
    names = Names()
    numbers = [int(names.learn(TOKENS[:4], spans([f"{number}"], TOKENS[:4]))[1]) for number in range(1030)]
    assert names.may_be_unused
    names.keep({numbers[3], numbers[7], -9999})
    assert not names.may_be_unused
    assert [number for number, _ in names.items()] == [numbers[3], numbers[7]]
    assert int(names.learn(TOKENS[:4], spans(["new"], TOKENS[:4]))[1]) < min(numbers)
    assert names.named(TOKENS[:4], spans(["5"], TOKENS[:4])).tolist() == [1]
