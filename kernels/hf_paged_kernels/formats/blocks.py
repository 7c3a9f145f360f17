"""How keys and values lie in the blocks of one layer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import torch

Part = Literal["key", "value"]
T = TypeVar("T")


class Blocks(ABC):
    """All blocks of one layer, in some format.

    Each plane is `[num_kv_heads, num_blocks, ...]`, and nothing about a block is anywhere else: whoever copies its part
    of each plane copies the block. The first plane has an entry for each token next, and none shares memory with
    another. As long as the planes are the same tensors, so are the blocks: what is derived from them is
    worked out once.
    """

    def __getstate__(self) -> dict[str, Any]:
        # Pickled along, what is derived from planes would come back as memory of its own.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    @abstractmethod
    def planes(self) -> tuple[torch.Tensor, ...]:
        """Everything that a block consists of."""

    @property
    @abstractmethod
    def dims(self) -> tuple[int, int]:
        """Width of a key and of a value."""

    @abstractmethod
    def read_blocks(self, part: Part, block_ids: torch.Tensor) -> torch.Tensor:
        """Keys or values of whole blocks in the model's dtype, `[num_kv_heads, n, block_size, dim]`.

        Args:
            block_ids: int64 `[n]`. Slots that were never written read as anything.
        """

    def with_plane(self, index: int, plane: torch.Tensor) -> "Blocks":
        """The blocks with another tensor as one of `planes`."""
        old = self.planes[index]
        name = next(field.name for field in fields(self) if getattr(self, field.name) is old)
        return replace(self, **{name: plane})

    def memo(self, key: Hashable, compute: Callable[[], T]) -> T:
        """`compute()`, done once for each `key`. Addresses are nothing to keep: memory that is shared with another
        process moves."""
        try:
            return self._memo[key]
        except KeyError:
            value = self._memo[key] = compute()
            return value

    @cached_property
    def num_kv_heads(self) -> int:
        return self.planes[0].shape[0]

    @cached_property
    def num_blocks(self) -> int:
        return self.planes[0].shape[1]

    @cached_property
    def block_size(self) -> int:
        return self.planes[0].shape[2]

    @cached_property
    def device(self) -> torch.device:
        return self.planes[0].device

    @cached_property
    def _memo(self) -> dict[Hashable, Any]:
        return {}


def in_model_dtype(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What codes read as, float32, in the model's dtype.

    What float16 holds can read as a little more than it holds, since scales are rounded. It stays finite.
    """
    if dtype == torch.float16:
        states = states.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return states.to(dtype)


@dataclass(frozen=True, eq=False)
class KVBlocks(Blocks):
    """All blocks of one layer, in the model's dtype.

        key[head]:   block 0: [ token 0 | ... | token block_size - 1 ]     each token: key_dim values
                     block 1: [ ...                                  ]
        value[head]: the same with value_dim

    One block of one head is one contiguous run, so that a kernel reads a tile of it with a single block id. Heads come
    first: blocks whose ids follow each other are then, for each head, one array of tokens, which any attention kernel
    can read in place as `[num_kv_heads, tokens, dim]`.

    Attributes:
        key: `[num_kv_heads, num_blocks, block_size, key_dim]`
        value: `[num_kv_heads, num_blocks, block_size, value_dim]`; `value_dim` may differ from `key_dim`.
    """

    key: torch.Tensor
    value: torch.Tensor

    def __post_init__(self) -> None:
        if not (self.key.is_contiguous() and self.value.is_contiguous()):
            raise ValueError("planes of blocks have to be contiguous: kernels know their layout from their shape")

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        return (self.key, self.value)

    @cached_property
    def dims(self) -> tuple[int, int]:
        return self.key.shape[-1], self.value.shape[-1]

    def read_blocks(self, part: Part, block_ids: torch.Tensor) -> torch.Tensor:
        return getattr(self, part).index_select(1, block_ids)

    @cached_property
    def token_planes(self) -> tuple[torch.Tensor, ...]:
        """The planes as `[num_kv_heads, num_blocks * block_size, dim]`: a token for each slot."""
        return tuple(plane.flatten(1, 2) for plane in self.planes)


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """Where tokens lie in a plane, seen as rows of `dim` values.

    Attributes:
        rows: int64 `[batch * num_kv_heads * tokens]`, a row for each (sequence, head, token); row 0 where the token
            is not stored.
        stored: int64, the positions in `rows` of the stored tokens; `None` if all are stored.
        missing: int64, the positions of the others; `None` if all are stored.
        shape: `(batch, num_kv_heads, tokens)`
    """

    rows: torch.Tensor
    stored: torch.Tensor | None
    missing: torch.Tensor | None
    shape: tuple[int, int, int]

    @classmethod
    def from_slots(cls, slots: np.ndarray, blocks: Blocks) -> "TokenIndex":
        """
        Args:
            slots: host int64 `[batch, tokens]`, `block id * block_size + offset`, or -1 for a token that is not
                stored.
            blocks: the blocks that the index is for.
        """
        batch, tokens = slots.shape
        device = blocks.device
        heads = np.arange(blocks.num_kv_heads)[None, :, None]
        rows = heads * (blocks.num_blocks * blocks.block_size) + np.maximum(slots, 0)[:, None]
        stored = missing = None
        if (slots < 0).any():
            present = np.broadcast_to((slots >= 0)[:, None], rows.shape).reshape(-1)
            stored = torch.from_numpy(present.nonzero()[0]).to(device)
            missing = torch.from_numpy((~present).nonzero()[0]).to(device)
        shape = (batch, blocks.num_kv_heads, tokens)
        return cls(torch.from_numpy(rows.reshape(-1)).to(device), stored, missing, shape)


def gather_tokens(plane: torch.Tensor, index: TokenIndex) -> torch.Tensor:
    """Copies tokens out of their blocks.

    Args:
        plane: `[num_kv_heads, num_blocks, block_size, dim]`
        index: which tokens.

    Returns:
        `[batch, num_kv_heads, tokens, dim]`, zero where a token is not stored.
    """
    dim = plane.shape[-1]
    if plane.shape[1] == 0:
        return plane.new_zeros(*index.shape, dim)
    tokens = plane.view(-1, dim).index_select(0, index.rows)
    if index.missing is not None:
        tokens.index_fill_(0, index.missing, 0)
    return tokens.view(*index.shape, dim)
