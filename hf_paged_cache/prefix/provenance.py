"""What a `BlockStore` put into a cache, which the cache carries along."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged_cache.errors import CacheStateError, InvalidArgumentError
from hf_paged_cache.prefix.extra_keys import Spans


class Positions(NamedTuple):
    """The positions of a prompt under multimodal rotary embeddings.

    Attributes:
        ids: int64 `[axes, batch, tokens]` or `[batch, tokens]`. Of what is cached only those behind the last image are
            certain to be right.
        shifts: int64 `[batch, 1]`, how much further tokens behind the prompt are than they would be without images.
    """

    ids: torch.Tensor
    shifts: torch.Tensor

    def for_rows(self, num_rows: int) -> "Positions":
        """Those of a batch in which every prompt stands more often in a row, or less."""
        places = torch.arange(num_rows, device=self.ids.device) * len(self.shifts) // num_rows
        return self.selected(places)

    def selected(self, rows: torch.Tensor) -> "Positions":
        """Those of some rows, int64 `[num_rows]`."""
        return Positions(self.ids.index_select(self.ids.ndim - 2, rows), self.shifts.index_select(0, rows))


@dataclass(frozen=True, eq=False)
class StoreProvenance:
    """Where a cache of a store came from. It is a `hf_paged_cache.provenance.Provenance`.

    Attributes:
        store: what knows the tokens of its blocks.
        namespace: under which they are cached.
        rows: what each row is sure to begin with, int64 `[n]`, padding left out: the prompt, and what was committed.
        padding: int32 `[num_rows]`, leading columns of each prompt that are not tokens.
        reused_tokens: tokens of all rows whose keys and values were not computed for this cache.
        why: why it is not more, in words; empty if there is no reason but that nothing more was cached.
        is_unknown: whether nothing of it may be committed either.
        spans: of each row the tokens that stand for something else, such as images.
        positions: of the prompts, under multimodal rotary embeddings; of each prompt once, whatever stands how often.
        is_certain: whether the outputs of `generate` tell what each row holds. They do not any more when rows have been
            moved (beams), or tokens of `rows` been taken back.
    """

    store: Any
    namespace: Any
    rows: list[np.ndarray]
    padding: np.ndarray
    reused_tokens: int
    why: str
    is_unknown: bool
    spans: list[Spans]
    positions: Positions | None = None
    is_certain: bool = True

    def repeated(self, repeats: int) -> "StoreProvenance":
        """With every row `repeats` times in a row."""
        rows = [row for row in self.rows for _ in range(repeats)]
        spans = [row for row in self.spans for _ in range(repeats)]
        return replace(self, rows=rows, padding=self.padding.repeat(repeats), spans=spans)

    def for_rows(self, num_rows: int) -> "StoreProvenance | None":
        """That of a cache with so many rows, where `generate` has repeated each prompt; `None` if it cannot have."""
        copies, rest = divmod(num_rows, len(self.rows))
        return None if rest or not copies else self if copies == 1 else self.repeated(copies)

    def selected(self, rows: np.ndarray) -> "StoreProvenance":
        """With the rows replaced by those of these indices."""
        kept, spans = ([values[row] for row in rows.tolist()] for values in (self.rows, self.spans))
        positions = self.positions
        if positions is not None:
            of_rows = torch.from_numpy(rows * len(positions.shifts) // len(self.rows))
            positions = positions.selected(of_rows.to(positions.ids.device))
        padding = self.padding[rows]
        return replace(self, rows=kept, padding=padding, spans=spans, positions=positions, is_certain=False)

    def cropped(self, num_columns: int) -> "StoreProvenance":
        """With the tokens of so many columns. Whether others have come in the place of some is not known."""
        lengths = np.maximum(num_columns - self.padding, 0).tolist()
        rows = [tokens[:length] for tokens, length in zip(self.rows, lengths, strict=True)]
        is_cut = any(len(tokens) < len(before) for tokens, before in zip(rows, self.rows, strict=True))
        return replace(self, rows=rows, is_certain=self.is_certain and not is_cut)

    def committed(self, rows: list[np.ndarray]) -> "StoreProvenance":
        """With the tokens that have been committed."""
        longer = [max(tokens, before, key=len) for tokens, before in zip(rows, self.rows, strict=True)]
        return replace(self, rows=longer)

    def known_rows(
        self,
        num_columns: int,
        lengths: Sequence[int],
        sequences: torch.Tensor,
        ends: Sequence[int],
        pads: Sequence[int],
    ) -> list[np.ndarray]:
        """The tokens, int64 `[n]`, that each row of the cache is sure to hold.

        Args:
            num_columns: columns of the cache.
            lengths: tokens of each row of the cache.
            sequences: ids `[batch, tokens]`, prompts included, as `generate` returns them.
            ends: tokens that end an answer.
            pads: tokens that follow an end while other rows go on.

        Raises:
            InvalidArgumentError: these are not the sequences of this cache.
            CacheStateError: the cache holds more than they do.
        """
        if not isinstance(sequences, torch.Tensor) or sequences.ndim != 2:
            raise InvalidArgumentError(
                "output: expected what `generate` returned, ids [batch, tokens] with the prompts"
            )
        if self.is_certain and len(sequences) != len(self.rows):
            raise InvalidArgumentError(
                f"the output has {len(sequences)} rows, but the cache has {len(self.rows)}: pass all that `generate` "
                "returned, and ask `cache_for` for as many `copies` as beams or samples"
            )
        prompt_of = np.arange(len(sequences)) * len(self.rows) // max(len(sequences), 1)
        ids = sequences.cpu().numpy().astype(np.int64)
        rows = [
            self._answered(row, place, tokens, ends, pads)
            for row, (place, tokens) in enumerate(zip(prompt_of.tolist(), ids, strict=True))
        ]
        if not self.is_certain:
            return [tokens[:length] for tokens, length in zip(self.rows, lengths, strict=True)]
        if num_columns > ids.shape[1]:
            raise CacheStateError(
                f"the cache holds {num_columns} tokens of a row, but the output has {ids.shape[1]}: nobody knows what "
                "they are. Was `generate` called with use_cache=False, or the output cut?"
            )
        num_known = max(
            (int(pad) + len(tokens) for pad, tokens in zip(self.padding, self.rows, strict=True)), default=0
        )
        # The last token of an answer is in no cache, and a prompt may have been interrupted.
        if ids.shape[1] > max(num_columns + 1, num_known):
            raise InvalidArgumentError(
                f"the output has {ids.shape[1]} tokens, but the cache holds {num_columns} of a row: it is not what "
                "`generate` returned last with this cache. After `crop`, pass what is left of the output"
            )
        return [tokens[:length] for tokens, length in zip(rows, lengths, strict=True)]

    def _answered(self, row: int, place: int, ids: np.ndarray, ends: Sequence[int], pads: Sequence[int]) -> np.ndarray:
        """The prompt at `place` and its answer, without what follows the answer's end."""
        prompt, tokens = self.rows[place], ids[self.padding[place] :]
        if not np.array_equal(tokens[: len(prompt)], prompt):
            raise InvalidArgumentError(
                f"row {row} of the output does not begin with the {len(prompt)} tokens of the prompt that `cache_for` "
                "was given, and of what was committed since: pass what `generate` returned for it, prompt included"
            )
        is_filler = np.isin(tokens, [*ends, *pads])
        is_filler[: len(prompt)] = False
        end = int(np.flatnonzero(~is_filler)[-1]) + 1 if len(prompt) else 0
        return tokens[: end + 1] if end < len(tokens) and tokens[end] in ends else tokens
