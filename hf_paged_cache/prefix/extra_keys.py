"""What tokens stand for that do not say it themselves: images, and whatever else a prompt's input has beside tokens.

In the prefix index such tokens have names in the place of their ids: a *span* of placeholder tokens is called by the
key of its image, and found under that name only. Names are numbers below zero, one for each key, so no two keys can be
taken for each other.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hf_paged_cache.errors import InvalidArgumentError

Key = str | Sequence[str] | None

# `Name.place` of a key that names all tokens of a prompt.
WHOLE_PROMPT = -1
# Names are looked through for unused ones when there are so many more than after the last time.
_FEW = 1024


class Name(NamedTuple):
    """What a span of tokens stands for.

    Attributes:
        key: as the caller calls it.
        place: 0 for a key of one image; from 1 on the number of the span under a key that names several images;
            `WHOLE_PROMPT` for a key that names a whole prompt.
        token: the token id of the span.
        num_tokens: tokens of the span.
        shift: how much further later tokens are rotated because of the image, in positions, under multimodal rotary
            embeddings.
    """

    key: str
    place: int
    token: int
    num_tokens: int
    shift: int = 0


class Span(NamedTuple):
    """Tokens of a row that stand for something: `[start, stop)`, padding left out.

    Attributes:
        name: what they stand for; `None` if nobody has said it.
    """

    start: int
    stop: int
    name: Name | None

    @property
    def is_image(self) -> bool:
        """Whether inputs beside tokens are put in its place; not so for the first token of a prompt with a key."""
        return self.name is None or self.name.place != WHOLE_PROMPT


Spans = tuple[Span, ...]


def keys_of_rows(extra_key: Any, num_rows: int) -> list[Key]:
    """The key of each row of a batch: a text, a list of texts, or `None`.

    Raises:
        InvalidArgumentError: `extra_key` is none of what `BlockStore.cache_for` takes.
    """
    if extra_key is None:
        return [None] * num_rows
    if num_rows == 1 and (isinstance(extra_key, str) or _is_list_of_keys(extra_key)):
        return [extra_key]
    has_rows = isinstance(extra_key, list | tuple) and len(extra_key) == num_rows
    if has_rows and all(key is None or isinstance(key, str) or _is_list_of_keys(key) for key in extra_key):
        return [*extra_key]
    expected = (
        "a str, or a list with a str for each image"
        if num_rows == 1
        else f"a list with the key of each of the {num_rows} rows: a str, a list with a str for each image, or None"
    )
    text = repr(extra_key)
    raise InvalidArgumentError(
        f"extra_key={text if len(text) < 80 else text[:77] + '...'}: expected {expected}. Of bytes take a digest in "
        "hexadecimal"
    )


def _is_list_of_keys(keys: Any) -> bool:
    return isinstance(keys, list | tuple) and all(isinstance(key, str) for key in keys)


def runs_of(tokens: np.ndarray, placeholders: Sequence[int]) -> list[tuple[int, int]]:
    """The runs `[start, stop)` of equal tokens that are placeholders."""
    is_placeholder = np.isin(tokens, placeholders)
    if not is_placeholder.any():
        return []
    follows = np.zeros(len(tokens), dtype=bool)
    follows[1:] = is_placeholder[1:] & (tokens[1:] == tokens[:-1])
    starts = np.flatnonzero(is_placeholder & ~follows)
    ends = np.flatnonzero(is_placeholder & ~np.append(follows[1:], False)) + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def spans_of(tokens: np.ndarray, key: Key, placeholders: Sequence[int], *, names_whole: bool) -> Spans:
    """The spans of a row.

    Args:
        tokens: int64 `[n]`.
        key: of the row.
        placeholders: tokens that stand for inputs beside tokens.
        names_whole: whether the key has to name all tokens, since all depend on inputs beside them.

    Raises:
        InvalidArgumentError: there are more or fewer keys than runs of placeholders.
    """
    runs = runs_of(tokens, placeholders)
    if key is None:
        return tuple(Span(start, stop, None) for start, stop in runs)
    if isinstance(key, str):
        is_one = len(runs) == 1 and not names_whole
        spans = [
            Span(start, stop, Name(key, 0 if is_one else place, int(tokens[start]), stop - start))
            for place, (start, stop) in enumerate(runs, start=1)
        ]
        if (names_whole or not runs) and not (runs and runs[0][0] == 0):
            spans.insert(0, Span(0, 1, Name(key, WHOLE_PROMPT, int(tokens[0]), 1)))
        return tuple(spans)
    if len(key) != len(runs):
        raise InvalidArgumentError(
            f"extra_key has {len(key)} keys, but the prompt has {len(runs)} runs of placeholder tokens: expected a key "
            "for each of them, in their order. Where an image has several runs, or images stand side by side, pass "
            "one str that names all images of the prompt"
        )
    return tuple(
        Span(start, stop, Name(name, 0, int(tokens[start]), stop - start))
        for (start, stop), name in zip(runs, key, strict=True)
    )


def before_unknown(tokens: np.ndarray, spans: Spans, placeholders: Sequence[int]) -> np.ndarray:
    """Tokens of a row up to the first placeholder that is in no span, such as one that the model has generated."""
    is_unknown = np.isin(tokens, placeholders)
    for span in spans:
        is_unknown[span.start : span.stop] = False
    unknown = np.flatnonzero(is_unknown)
    return tokens[: unknown[0]] if unknown.size else tokens


class Names:
    """The names that spans have in a prefix index. Whoever calls a method holds the lock of the pools.

    Args:
        names: numbers below zero, and what they name.
    """

    def __init__(self, names: Iterable[tuple[int, Name]] = ()) -> None:
        self._names = dict(names)
        self._next = min(self._names, default=0) - 1
        self._num_used = 0
        self._index()

    def _index(self) -> None:
        self._numbers = {name: number for number, name in self._names.items()}
        # The newest name whatever its shift, which only those know who have the image.
        self._newest = {name[:-1]: name for name in self._names.values()}

    def __getitem__(self, number: int) -> Name:
        return self._names[number]

    def items(self) -> list[tuple[int, Name]]:
        """All numbers and what they name."""
        return [*self._names.items()]

    def with_shifts(self, spans: Spans) -> Spans:
        """Spans with the shifts that their names were cached with."""
        return tuple(
            span if span.name is None else span._replace(name=self._newest.get(span.name[:-1], span.name))
            for span in spans
        )

    def named(self, tokens: np.ndarray, spans: Spans) -> np.ndarray:
        """Tokens of a row with names in the place of spans, up to the first span that has none: int64 `[n]`."""
        with_names = tokens.copy()
        for start, stop, name in spans:
            number = None if name is None else self._numbers.get(name)
            if number is None or stop > len(tokens):
                return with_names[:start]
            with_names[start:stop] = number
        return with_names

    def learn(self, tokens: np.ndarray, spans: Spans) -> np.ndarray:
        """`named`, after spans that nobody has named so far were given names."""
        for span in spans:
            if span.name is None or span.stop > len(tokens):
                break
            if span.name not in self._numbers:
                self._names[self._next] = span.name
                self._numbers[span.name] = self._next
                self._next -= 1
            self._newest[span.name[:-1]] = span.name
        return self.named(tokens, spans)

    @property
    def may_be_unused(self) -> bool:
        """Whether it is time for `keep`."""
        return len(self._names) > 2 * self._num_used + _FEW

    def keep(self, used: Iterable[int]) -> None:
        """Forgets all names but these; others may be among them."""
        kept = {*used}
        self._names = {number: name for number, name in self._names.items() if number in kept}
        self._num_used = len(self._names)
        self._index()


def real_tokens(named: np.ndarray, names: Mapping[int, Name] | Names) -> tuple[np.ndarray, tuple[str, ...]]:
    """The tokens that were named, and the keys that name some of them, in their order."""
    tokens, keys = named.copy(), {}
    for place in np.flatnonzero(named < 0).tolist():
        name = names[int(named[place])]
        tokens[place] = name.token
        keys[name.key] = None
    return tokens, tuple(keys)
