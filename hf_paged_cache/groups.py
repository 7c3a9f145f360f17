"""The layers of one cache that keep the same tokens, and so share one block table."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np
from hf_paged_kernels import StepMetadata

from hf_paged_cache.errors import CacheStateError, InvalidArgumentError, OutOfBlocks, other_batch_size
from hf_paged_cache.hot import Moves
from hf_paged_cache.pool import GroupPool
from hf_paged_cache.tables import BlockTable

T = TypeVar("T")


def _locked(method: Callable) -> Callable:
    """Lets a method have the pool, which the groups of forks in other threads share, to itself."""

    @wraps(method)
    def wrapper(self: "LayerGroup", *args: Any, **kwargs: Any) -> Any:
        with self.pool.lock:
            return method(self, *args, **kwargs)

    return wrapper


class LayerGroup:
    """A block table over a `GroupPool`, and how many columns each layer has been given.

    The first layer that is updated in a forward pass extends the table (`begin`); the others join that step.

    Args:
        pool: the blocks; forks of the cache share it.
        table: the rows of this cache.
        lengths: columns that each layer has been given, by layer index.

    Attributes:
        keeps_past: whether rows hold on to what has left their window as long as there is room, since it may be wanted
            by others.
    """

    def __init__(self, pool: GroupPool, table: BlockTable, lengths: dict[int, int] | None = None) -> None:
        self.pool = pool
        self.table = table
        self.lengths = lengths or {}
        self.keeps_past = False
        self.step: StepMetadata | None = None
        self._undo: _Undo | None = None
        self._stored: tuple[tuple[int, int], StepMetadata] | None = None

    def length(self, layer_idx: int) -> int:
        """Columns that a layer has been given."""
        return self.lengths.get(layer_idx, 0)

    def accepts(self, layer_idx: int, num_new: int) -> bool:
        """Whether a layer that has no tokens yet keeps the same tokens as the others of the group."""
        return self.table.num_columns == 0 or self._joins(layer_idx, num_new)

    @_locked
    def begin(
        self,
        layer_idx: int,
        num_rows: int,
        num_new: int,
        attended: np.ndarray | None,
        *,
        keep_past: bool,
        pass_number: int,
    ) -> StepMetadata:
        """The step in which a layer gets `num_new` columns: the group's current one, or a new one.

        Args:
            layer_idx: the layer.
            num_rows: rows of the batch.
            num_new: new columns.
            attended: bool `[num_rows, num_new]`, the attention mask of the new columns; `None` for no padding.
            keep_past: keep what leaves the window, so that `crop` can bring it back.
            pass_number: the forward pass, by which `undo_step` knows its steps.

        Raises:
            InvalidArgumentError: the batch size has changed.
            CacheStateError: the layer is not where the others are.
            OutOfBlocks: there is no room. The group is as it was.
        """
        table = self.table
        if table.num_columns and num_rows != table.num_rows:
            raise InvalidArgumentError(other_batch_size(table.num_rows, num_rows, "the batch"))
        if not self._joins(layer_idx, num_new):
            lagging = [idx for idx, length in self.lengths.items() if length != table.num_columns]
            if lagging or self.length(layer_idx) != table.num_columns:
                raise unfinished_pass(sorted({*lagging, layer_idx}), table.num_columns)
            self._give_up_old_tokens()
            earlier = None if self._undo is None else self._undo._replace(earlier=None)

            def extend(keep_past: bool) -> tuple[StepMetadata, Moves, _Undo]:
                undo = _Undo(pass_number, table.num_columns, table.first_kept_column, earlier)
                return *table.extend(num_rows, num_new, attended, keep_past=keep_past), undo

            self.step, moves, self._undo = self._with_or_without_past(extend, keep_past)
            self.pool.move(moves)
        return self.step

    @_locked
    def check_room(self, num_new: int, attended: np.ndarray | None, *, keep_past: bool) -> None:
        """Checks that the next step fits the limits of the pool, before any layer runs. Nothing changes.

        What a store's caches keep beyond their window does not count as room: no cache that is checked keeps any.

        Raises:
            OutOfBlocks: it does not.
        """
        count, hot_count = self.table.blocks_to_extend(num_new, attended, keep_past=keep_past)
        freed, hot_freed = self.table.blocks_to_give_up()
        self.pool.check_room(max(count - freed, 0), max(hot_count - hot_freed, 0))

    def stored(self, layer_idx: int) -> StepMetadata:
        """A step without new tokens, to read what a layer has been given; the same one until that changes."""
        key = (self.table.generation, self.length(layer_idx))
        if self._stored is None or self._stored[0] != key:
            self._stored = (key, self.table.snapshot(self.length(layer_idx)))
        return self._stored[1]

    def finish(self, layer_idx: int) -> None:
        """Records that a layer has been given the columns of the current step."""
        self.lengths[layer_idx] = self.table.num_columns

    @property
    def last_pass(self) -> int:
        """The forward pass that last began a step which can be taken back; -1 for none."""
        return -1 if self._undo is None else self._undo.pass_number

    @property
    def began_empty(self) -> bool:
        """Whether the last step is the first one."""
        return self._undo is not None and self._undo.num_columns == 0

    def undo_step(self, pass_number: int) -> None:
        """Takes back the step that the group has begun in a forward pass, if any."""
        if self._undo is not None and self._undo.pass_number == pass_number:
            undo = self._undo
            self._truncate(undo.num_columns, undo.first_kept_column)
            self._undo = undo.earlier

    def can_crop(self, num_columns: int) -> bool:
        """Whether the group can go back to `num_columns` columns."""
        return self.table.can_crop(num_columns)

    @_locked
    def crop(self, num_columns: int) -> None:
        """Goes back to `num_columns` columns, and gives up what has left the window then."""
        self._truncate(num_columns, None)
        self.table.restrict_to_window()

    @_locked
    def select(self, rows: np.ndarray) -> None:
        """Replaces the rows by `rows`, indices of present ones."""
        self.table.select(rows)
        self.step = None

    @_locked
    def reset(self) -> None:
        """Gives back everything."""
        self.table.reset()
        self.lengths.clear()
        self.step = self._undo = None

    @_locked
    def fork(self, copies: int) -> "LayerGroup":
        """The same group for another cache, every row `copies` times, on the same blocks."""
        other = LayerGroup(self.pool, self.table.fork(copies), dict(self.lengths))
        other.keeps_past, other._undo = self.keeps_past, self._undo
        return other

    @_locked
    def adopt(self, num_columns: int, padding: np.ndarray, block_ids: np.ndarray, hot_ids: np.ndarray | None) -> None:
        """Lets an empty group begin with known blocks, see `BlockTable.adopt`; every layer has their tokens."""
        self.table.adopt(num_columns, padding, block_ids, hot_ids)
        self.lengths = dict.fromkeys(self.pool.layers, num_columns)

    @_locked
    def seal(self, entries: tuple[np.ndarray, np.ndarray]) -> None:
        """Makes the codes of full hot blocks (rows `[n]`, logical blocks `[n]`), which rows go on reading exactly."""
        pairs = self.table.hot_pairs(entries)
        if pairs:
            self.pool.seal(pairs)

    def _with_or_without_past(self, extend: Callable[[bool], T], keep_past: bool) -> T:
        """`extend(keep_past)`; where the past is only kept for others, without it if there is no room."""
        if self.keeps_past and not keep_past:
            try:
                return extend(True)
            except OutOfBlocks:
                self.keeps_past = False
                self.table.restrict_to_window()
        return extend(keep_past)

    def _give_up_old_tokens(self) -> None:
        """Quantizes what the newest tokens have moved on from, and gives back what has left the window."""
        self.table.release_unkept()
        if self.pool.hot is not None:
            entries, pairs = self.table.blocks_to_seal()
            if pairs:
                self.pool.seal(pairs)
                self.table.drop_hot(entries)

    def _joins(self, layer_idx: int, num_new: int) -> bool:
        step = self.step
        return (
            step is not None
            and self.length(layer_idx) == step.first_column
            and num_new == step.query_length
            and step.num_columns == self.table.num_columns
            and num_new > 0
        )

    @_locked
    def _truncate(self, num_columns: int, first_kept_column: int | None) -> None:
        self.table.crop(num_columns, first_kept_column)
        self.lengths = {idx: min(length, num_columns) for idx, length in self.lengths.items()}
        self.step = self._undo = None


class _Undo(NamedTuple):
    """What a group was before its last step."""

    pass_number: int
    num_columns: int
    first_kept_column: int
    earlier: "_Undo | None"


def unfinished_pass(layers: list[int], num_columns: int) -> CacheStateError:
    """The error for layers that have not been given what the others have."""
    return CacheStateError(
        f"layers {layers} have not been given the same tokens as the other layers of their group, which hold "
        f"{num_columns}: an earlier forward pass stopped half-way. Call `cache.rollback()` to take that pass back, "
        "then go on from there, or `cache.reset()`."
    )
