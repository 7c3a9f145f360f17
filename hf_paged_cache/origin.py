"""What a `BlockStore` put into a cache, which the cache carries along."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hf_paged_cache.errors import InvalidArgumentError


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a cache came from.

    Attributes:
        store: what knows the tokens of its blocks.
        namespace: under which they are known.
        rows: the prompt of each row, int64 `[n]`, padding left out.
        padding: int32 `[num_rows]`, leading columns of each prompt that are not tokens.
        reused_tokens: tokens of all rows whose keys and values were not computed for this cache.
        why: why it is not more, in words; empty if there is no reason but that nothing more was known.
        is_unknown: whether nothing may become known of it either.
        is_reordered: whether rows have been moved since, so that only their prompts are certain.
    """

    store: Any
    namespace: Any
    rows: list[np.ndarray]
    padding: np.ndarray
    reused_tokens: int
    why: str
    is_unknown: bool
    is_reordered: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        # A cache that is pickled leaves its store.
        return type(None), ()

    def repeated(self, repeats: int) -> "Origin":
        """With every row `repeats` times in a row."""
        rows = [row for row in self.rows for _ in range(repeats)]
        return replace(self, rows=rows, padding=self.padding.repeat(repeats))

    def selected(self, rows: np.ndarray) -> "Origin":
        """With the rows replaced by those of these indices."""
        kept = [self.rows[row] for row in rows.tolist()]
        return replace(self, rows=kept, padding=self.padding[rows], is_reordered=True)

    def known_rows(
        self, lengths: Sequence[int], sequences: torch.Tensor | None, ends: Sequence[int]
    ) -> list[np.ndarray]:
        """The tokens, int64 `[n]`, that each row of the cache is known to hold.

        Args:
            lengths: tokens of each row of the cache.
            sequences: ids `[batch, tokens]`, prompts included, as `generate` returns them; `None` if there are none.
            ends: tokens that end an answer. What follows one, while other rows go on, is padding.

        Raises:
            InvalidArgumentError: a sequence does not begin with its prompt.
        """
        if sequences is None or self.is_reordered or len(sequences) != len(self.rows):
            return [tokens[:length] for tokens, length in zip(self.rows, lengths, strict=True)]
        rows = []
        for row, (prompt, length) in enumerate(zip(self.rows, lengths, strict=True)):
            tokens = sequences[row, self.padding[row] :].cpu().numpy().astype(np.int64)
            if not np.array_equal(tokens[: len(prompt)], prompt):
                raise InvalidArgumentError(
                    f"row {row} of the output does not begin with the prompt that `cache_for` was given: pass what "
                    "`generate` returned for that prompt, prompt included"
                )
            answer_ends = np.flatnonzero(np.isin(tokens[len(prompt) :], ends))
            stop = len(prompt) + int(answer_ends[0]) + 1 if answer_ends.size else len(tokens)
            rows.append(tokens[: min(length, stop)])
        return rows
