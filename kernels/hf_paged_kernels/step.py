"""What is the same for every layer of a group in one forward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from hf_paged_kernels.formats.blocks import Blocks, TokenIndex

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class DeviceStep:
    """The part of a step that kernels read, on their device. All int32, views of one upload.

    Attributes:
        block_table: `[batch, max_blocks]`, logical block -> block id; 0 where there is nothing to read.
        seq_lens: `[batch]`, tokens of each row, those of this step included.
        slot_mapping: `[batch, query_length]`, the slot of each new token; -1 if it is not stored.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor


class StepMetadata:
    """Block table, lengths and slots of one forward pass, computed once and shared by the layers of a group.

    The caller sees columns: every row of the batch has `num_columns` of them, and the last `query_length` are new.
    The blocks hold tokens: row `b` starts at column `padding[b]`, so its token `t` is column `padding[b] + t`, and
    leading padding is nowhere. New column `i` is token `seq_lens[b] - query_length + i`, negative for padding.

    Everything stands on the host, so that decisions need no wait for a device. `on(device)` uploads what kernels
    read; what a backend derives from a step (indices, masks) it keeps with `memo`.

    Blocks that are quantized as a whole hold codes only once they are. Until then their tokens are in exact blocks, in
    the model's dtype: `exact` is the same step as it sees those.

    Args:
        block_table: int32 `[batch, max_blocks]`; 0 (the null block) where nothing may be read.
        seq_lens: int32 `[batch]`, tokens of each row after this step.
        padding: int32 `[batch]`, leading columns of each row that are not tokens.
        slots: int32 `[batch, query_length]`, `block id * block_size + offset` of each new column, -1 if not stored.
        num_columns: columns after this step.
        block_size: tokens a block.
        new_tokens_stored: whether all new tokens have a slot, so that attention may read them from the blocks.
        exact_table: int32 `[batch, max_blocks]`, the exact block of each logical block; -1 where a row reads codes.
            There is no null block among exact ones. `None` if there are none.
        exact_slots: int32 `[batch, query_length]`, the slots of new columns in exact blocks; -1 for those that are
            quantized at once.
        quantized: int `[n, 3]`, blocks that the new tokens fill and that are quantized at once: row, column of the
            first of their tokens among the new ones, block id.
        first_block_id: the lowest id in `block_table` that is a block.
    """

    def __init__(
        self,
        *,
        block_table: np.ndarray,
        seq_lens: np.ndarray,
        padding: np.ndarray,
        slots: np.ndarray,
        num_columns: int,
        block_size: int,
        new_tokens_stored: bool,
        exact_table: np.ndarray | None = None,
        exact_slots: np.ndarray | None = None,
        quantized: np.ndarray | None = None,
        first_block_id: int = 1,
    ) -> None:
        self.block_table = block_table
        self.seq_lens = seq_lens
        self.padding = padding
        self.slots = slots
        self.num_columns = num_columns
        self.block_size = block_size
        self.new_tokens_stored = new_tokens_stored
        self.quantized = quantized
        self._exact_table, self._exact_slots = exact_table, exact_slots
        self._first_block_id = first_block_id
        self.batch, self.query_length = slots.shape
        self._memo: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # What backends keep has addresses of this process.
        return vars(self) | {"_memo": {}}

    @cached_property
    def first_column(self) -> int:
        """Columns before this step."""
        return self.num_columns - self.query_length

    @cached_property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max())

    @cached_property
    def past_lens(self) -> np.ndarray:
        """int32 `[batch]`, tokens of each row before this step."""
        return np.maximum(self.seq_lens - self.query_length, 0)

    @cached_property
    def has_past(self) -> bool:
        return bool(self.past_lens.any())

    @cached_property
    def has_empty_queries(self) -> bool:
        """Whether some new column is leading padding, which attends to nothing."""
        return bool((self.seq_lens < self.query_length).any())

    @cached_property
    def exact(self) -> "StepMetadata | None":
        """The step in exact blocks; `None` if there are none."""
        if self._exact_table is None:
            return None
        return StepMetadata(
            block_table=self._exact_table,
            seq_lens=self.seq_lens,
            padding=self.padding,
            slots=self.slots if self._exact_slots is None else self._exact_slots,
            num_columns=self.num_columns,
            block_size=self.block_size,
            new_tokens_stored=self.new_tokens_stored,
            first_block_id=0,
        )

    def memo(self, key: Any, compute: Callable[[], T]) -> T:
        """`compute()`, done once a step for each `key`."""
        try:
            return self._memo[key]
        except KeyError:
            value = self._memo[key] = compute()
            return value

    def on(self, device: torch.device) -> DeviceStep:
        """The step on `device`, uploaded at most once."""
        return self.memo(("device", device), lambda: self._upload(device))

    def slots_of(self, tokens: np.ndarray) -> np.ndarray:
        """Slots of stored tokens.

        Args:
            tokens: int `[batch or 1, n]`, token numbers; negative for padding.

        Returns:
            int64 `[batch, n]`, -1 where a row does not hold the token.
        """
        blocks = np.clip(tokens // self.block_size, 0, self.block_table.shape[1] - 1)
        blocks = np.broadcast_to(blocks, (self.batch, tokens.shape[1]))
        block_ids = np.take_along_axis(self.block_table, blocks, axis=1).astype(np.int64)
        present = (tokens >= 0) & (tokens < self.seq_lens[:, None]) & (block_ids >= self._first_block_id)
        if not self.new_tokens_stored:
            # A block may be there for tokens before those that were left out.
            columns = tokens - (self.seq_lens - self.query_length)[:, None]
            slots = np.take_along_axis(self.slots, np.clip(columns, 0, self.query_length - 1), axis=1)
            present &= (columns < 0) | (slots >= 0)
        return np.where(present, block_ids * self.block_size + tokens % self.block_size, -1)

    def column_index(self, first_column: int, last_column: int, blocks: Blocks) -> TokenIndex:
        """Index of the columns `first_column..last_column - 1` in `blocks`, for `gather_tokens`."""
        columns = np.arange(first_column, last_column)[None]
        return self._index(
            ("columns", first_column, last_column), blocks, lambda: self.slots_of(columns - self.padding[:, None])
        )

    def token_index(self, first: int, last: int, blocks: Blocks) -> TokenIndex:
        """Index of the tokens `first..last - 1` of every row in `blocks`, for `gather_tokens`."""
        return self._index(("tokens", first, last), blocks, lambda: self.slots_of(np.arange(first, last)[None]))

    def write_index(self, blocks: Blocks) -> TokenIndex:
        """Index of the new columns in `blocks`, for `write_kv`."""
        return self._index(("new",), blocks, lambda: self.slots)

    def run_of_slots(self, first: int, last: int) -> slice | None:
        """The slots of the tokens `first..last - 1` if there is one row and they follow each other; else `None`."""
        return self.memo(("run", first, last), lambda: self._run_of_slots(first, last))

    def _run_of_slots(self, first: int, last: int) -> slice | None:
        if self.batch > 1:
            return None
        slots = self.slots_of(np.arange(first, last)[None])[0]
        if slots[0] < 0 or (np.diff(slots) != 1).any():
            return None
        return slice(int(slots[0]), int(slots[0]) + last - first)

    def _index(self, key: tuple, blocks: Blocks, slots: Callable[[], np.ndarray]) -> TokenIndex:
        key = (*key, blocks.num_kv_heads, blocks.num_blocks, blocks.device)
        return self.memo(key, lambda: TokenIndex.from_slots(slots(), blocks))

    def _upload(self, device: torch.device) -> DeviceStep:
        return DeviceStep(*upload((self.block_table, self.seq_lens, self.slots), device))


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Integer arrays on `device`, in the dtype of the first, by a single copy that the host does not wait for.

    Each begins at a multiple of 16 bytes: whether a pointer does is part of what a kernel is compiled for.
    """
    dtype = arrays[0].dtype
    sizes = [-(-array.size // (16 // dtype.itemsize)) * (16 // dtype.itemsize) for array in arrays]
    is_pinned = device.type == "cuda"
    packed = torch.zeros(sum(sizes), dtype=torch.from_numpy(arrays[0][:0]).dtype, device="cpu", pin_memory=is_pinned)
    for part, array in zip(packed.split(sizes), arrays, strict=True):
        part.numpy()[: array.size] = array.reshape(-1)
    views = packed.to(device, non_blocking=True).split(sizes)
    return [view[: array.size].view(array.shape) for view, array in zip(views, arrays, strict=True)]
