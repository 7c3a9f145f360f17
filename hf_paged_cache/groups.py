"""The layers of one cache that keep the same tokens, and so share one block table."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
from hf_paged_kernels import StepMetadata

from hf_paged_cache.blocks.exact import Pairs
from hf_paged_cache.blocks.table_state import TableState
from hf_paged_cache.blocks.tables import BlockTable
from hf_paged_cache.errors import CacheStateError, InvalidArgumentError, OutOfBlocksError, other_batch_size
from hf_paged_cache.ledger import Change
from hf_paged_cache.memory.group_pool import GroupPool


def _atomic(method: Callable) -> Callable:
    """Lets a method have the pool, which the groups of forks in other threads share, to itself; and happen all or
    not at all."""

    @wraps(method)
    def wrapper(self: "LayerGroup", *args: Any, **kwargs: Any) -> Any:
        with self.pool.lock, self.pool.ledger:
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
        records_past: whether rows keep what has left their window while there is room, since others may want it.
    """

    def __init__(self, pool: GroupPool, table: BlockTable, lengths: dict[int, int] | None = None) -> None:
        self.pool = pool
        self.table = table
        self.lengths = lengths or {}
        self.records_past = False
        self.step: StepMetadata | None = None
        self._undo: _Undo | None = None
        self._stored: tuple[tuple[int, int], StepMetadata] | None = None

    def length(self, layer_idx: int) -> int:
        """Columns that a layer has been given."""
        return self.lengths.get(layer_idx, 0)

    def accepts(self, layer_idx: int, num_new: int) -> bool:
        """Whether a layer that has no tokens yet keeps the same tokens as the others of the group."""
        return self.table.num_columns == 0 or self._joins(layer_idx, num_new)

    def begin(
        self,
        layer_idx: int,
        num_rows: int,
        num_new: int,
        attended: np.ndarray | None,
        *,
        record_past: bool,
        pass_number: int,
    ) -> StepMetadata:
        """The step in which a layer gets `num_new` columns: the group's current one, or a new one.

        Called under the lock of the pool.

        Args:
            layer_idx: the layer.
            num_rows: rows of the batch.
            num_new: new columns.
            attended: bool `[num_rows, num_new]`, the attention mask of the new columns; `None` for no padding.
            record_past: keep what leaves the window, so that `crop` can bring it back.
            pass_number: the forward pass, by which `undone` knows its steps.

        Raises:
            InvalidArgumentError: the batch size has changed.
            CacheStateError: the layer is not where the others are.
            OutOfBlocksError: there is no room. The group is as it was.
        """
        if not self._joins(layer_idx, num_new) or num_rows != self.step.batch:
            self._begin(layer_idx, num_rows, num_new, attended, record_past=record_past, pass_number=pass_number)
        return self.step

    @_atomic
    def _begin(
        self,
        layer_idx: int,
        num_rows: int,
        num_new: int,
        attended: np.ndarray | None,
        *,
        record_past: bool,
        pass_number: int,
    ) -> None:
        table = self.table
        if table.num_columns and num_rows != table.num_rows:
            raise InvalidArgumentError(other_batch_size(table.num_rows, num_rows, "the batch"))
        lagging = [idx for idx, length in self.lengths.items() if length != table.num_columns]
        if lagging or self.length(layer_idx) != table.num_columns:
            raise unfinished_pass(sorted({*lagging, layer_idx}), table.num_columns)
        before = self._before_step(num_new, attended, record_past)
        if before.state is not table.state or before.records_past != self.records_past:
            # A change of its own, so that the step may take the blocks. It shows in nothing that is read.
            self.pool.quantize(before.quantized)
            self.pool.ledger.commit(
                [table.change_to(before.state), Change(self, {"records_past": before.records_past})]
            )
        extension = table.extend(num_rows, num_new, attended, record_past=record_past or before.records_past)
        if any(extension.moves):
            self.pool.move(extension.moves)
        earlier = None if self._undo is None else self._undo._replace(earlier=None)
        undo = _Undo(pass_number, before.state.num_columns, before.state.first_kept_column, earlier)
        self.pool.ledger.commit(
            [table.change_to(extension.state), Change(self, {"step": extension.step, "_undo": undo})]
        )

    @_atomic
    def check_room(self, num_new: int, attended: np.ndarray | None, *, record_past: bool) -> None:
        """Checks that the next step fits the limits of the pool, before any layer runs.

        Raises:
            OutOfBlocksError: it does not.
        """
        before = self._before_step(num_new, attended, record_past)
        self._check_room(before.state, num_new, attended, record_past=record_past or before.records_past)

    def stored(self, layer_idx: int) -> StepMetadata:
        """A step without new tokens, to read what a layer has been given; the same one until that changes.

        It reads what a next step would: codes of what the newest tokens have moved on from.
        """
        key = (self.table.generation, self.length(layer_idx))
        if self._stored is None or self._stored[0] != key:
            with self.pool.lock:
                step, pairs = self.table.snapshot(self.length(layer_idx))
                self.pool.quantize(pairs)
            self._stored = (key, step)
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

    def num_columns_before(self, pass_number: int) -> int:
        """Columns before a forward pass."""
        undo = self._undo
        return undo.num_columns if undo is not None and undo.pass_number == pass_number else self.table.num_columns

    def undone(self, pass_number: int) -> list[Change]:
        """What takes back the step that the group has begun in a forward pass, if any."""
        undo = self._undo
        if undo is None or undo.pass_number != pass_number:
            return []
        return self._truncated(undo.num_columns, undo.first_kept_column, undo.earlier)

    def can_crop(self, num_columns: int) -> bool:
        """Whether the group can go back to `num_columns` columns."""
        return self.table.can_crop(num_columns)

    def cropped(self, num_columns: int) -> list[Change]:
        """What goes back to `num_columns` columns, and gives up what has left the window then."""
        return self._truncated(num_columns, None, None)

    def selected(self, rows: np.ndarray) -> list[Change]:
        """What replaces the rows by `rows`, indices of present ones."""
        return [self.table.change_to(self.table.selected(rows)), Change(self, {"step": None})]

    def repeated(self, repeats: int) -> list[Change]:
        """What lets every row stand `repeats` times in a row."""
        return self.selected(np.arange(self.table.num_rows).repeat(repeats))

    def emptied(self) -> list[Change]:
        """What gives back everything."""
        return [
            self.table.change_to(self.table.emptied()),
            Change(self, {"lengths": {}, "step": None, "_undo": None}),
        ]

    def adopted(
        self, num_columns: int, padding: np.ndarray, block_ids: np.ndarray, exact_ids: np.ndarray | None
    ) -> list[Change]:
        """What lets an empty group begin with cached blocks, see `BlockTable.adopted`; every layer has their tokens."""
        return [
            self.table.change_to(self.table.adopted(num_columns, padding, block_ids, exact_ids)),
            Change(self, {"lengths": dict.fromkeys(self.pool.layers, num_columns)}),
        ]

    @_atomic
    def exchange(self, entries: tuple[np.ndarray, np.ndarray], block_ids: np.ndarray) -> None:
        """Takes blocks `[n]` of the same content in the place of those at entries (rows `[n]`, logical
        blocks `[n]`)."""
        self.table.commit(self.table.state.exchanged(entries, block_ids))

    @_atomic
    def restrict_to_window(self) -> None:
        """Gives up the columns that no later step looks back at."""
        self.table.commit(self.table.within_window())

    @_atomic
    def fork(self, copies: int) -> "LayerGroup":
        """The same group for another cache, every row `copies` times, on the same blocks."""
        other = LayerGroup(self.pool, self.table.fork(copies), dict(self.lengths))
        other.records_past, other._undo = self.records_past, self._undo
        return other

    @_atomic
    def quantize(self, entries: tuple[np.ndarray, np.ndarray]) -> None:
        """Makes the codes of full exact blocks (rows `[n]`, logical blocks `[n]`), which rows go on reading exactly."""
        self.pool.quantize(self.table.exact_pairs(entries))

    def _before_step(self, num_new: int, attended: np.ndarray | None, record_past: bool) -> "_BeforeStep":
        """What the group gives up before its next step. Where the past is only kept for others, that too if there is no
        room for it.

        Raises:
            OutOfBlocksError: there is no room for the step even so.
        """
        before = _BeforeStep(*self.table.before_next_step(), self.records_past)
        if not self.records_past or record_past:
            if before.state is not self.table.state:
                self._check_room(before.state, num_new, attended, record_past=record_past)
            return before
        try:
            self._check_room(before.state, num_new, attended, record_past=True)
        except OutOfBlocksError:
            before = _BeforeStep(*self.table.before_next_step(record_past=False), False)
            self._check_room(before.state, num_new, attended, record_past=False)
        return before

    def _check_room(self, state: TableState, num_new: int, attended: np.ndarray | None, *, record_past: bool) -> None:
        """Checks that there is room for a step once the rows hold `state`."""
        if state.num_columns:
            needed = self.table.blocks_to_extend(num_new, attended, record_past=record_past, state=state)
            self.pool.check_room(*needed, let_go=self.table.blocks_let_go(state))

    def _joins(self, layer_idx: int, num_new: int) -> bool:
        step = self.step
        return (
            step is not None
            and self.length(layer_idx) == step.first_column
            and num_new == step.query_length
            and step.num_columns == self.table.num_columns
            and num_new > 0
        )

    def _truncated(self, num_columns: int, first_kept_column: int | None, undo: "_Undo | None") -> list[Change]:
        lengths = {idx: min(length, num_columns) for idx, length in self.lengths.items()}
        return [
            self.table.change_to(self.table.cropped(num_columns, first_kept_column)),
            Change(self, {"lengths": lengths, "step": None, "_undo": undo}),
        ]


class _BeforeStep(NamedTuple):
    """What a group is before its next step.

    Attributes:
        state: what its rows hold.
        quantized: exact blocks that are quantized first, as pairs of exact block and block id.
        records_past: as in `LayerGroup`.
    """

    state: TableState
    quantized: Pairs
    records_past: bool


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
