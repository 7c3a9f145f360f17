"""Where the tokens of a cache came from, as far as the cache itself has to know."""

from typing import Protocol

import numpy as np


class Provenance(Protocol):
    """What a cache carries along for whoever filled it. It is a value: each method gives another one.

    Attributes:
        reused_tokens: tokens of all rows whose keys and values were not computed for this cache.
        why: why it is not more, in words; empty if there is no reason.
    """

    reused_tokens: int
    why: str

    def repeated(self, repeats: int) -> "Provenance":
        """With every row `repeats` times in a row."""
        ...

    def for_rows(self, num_rows: int) -> "Provenance | None":
        """With each row as often as it takes to be `num_rows`; `None` if that is no whole number of times."""
        ...

    def selected(self, rows: np.ndarray) -> "Provenance":
        """With the rows replaced by those of these indices."""
        ...

    def cropped(self, num_columns: int) -> "Provenance":
        """With the tokens of so many columns."""
        ...
