"""How keys and values lie in the blocks of one layer."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class KVBlocks:
    """All blocks of one layer, in the model's dtype.

        key[b]:    head 0: [ token 0 | token 1 | ... | token block_size - 1 ]      each token: key_dim values
                   head 1: [ ...                                            ]
        value[b]:  the same with value_dim

    A block of one head is one contiguous run, so that a kernel reads a tile of it with a single block id.
    Formats that store more (scales, zero points) add planes of their own; dimension 0 of every plane is the block.

    Attributes:
        key: `[num_blocks, num_kv_heads, block_size, key_dim]`
        value: `[num_blocks, num_kv_heads, block_size, value_dim]`; `value_dim` may differ from `key_dim`.
    """

    key: torch.Tensor
    value: torch.Tensor

    @property
    def num_blocks(self) -> int:
        return self.key.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def block_size(self) -> int:
        return self.key.shape[2]

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        return (self.key, self.value)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "KVBlocks":
        """The same layout with `function` applied to each plane, one plane after the other."""
        return KVBlocks(function(self.key), function(self.value))


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """Where tokens lie in a plane `[num_blocks, num_kv_heads, block_size, dim]` seen as rows of `dim` values.

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
    def from_slots(cls, slots: np.ndarray, num_kv_heads: int, block_size: int, device: torch.device) -> "TokenIndex":
        """
        Args:
            slots: host int64 `[batch, tokens]`, `block id * block_size + offset`, or -1 for a token that is not
                stored.
            device: where the index is to be used.
        """
        batch, tokens = slots.shape
        heads = np.arange(num_kv_heads)[None, :, None]
        safe_slots = np.maximum(slots, 0)[:, None]
        rows = (safe_slots // block_size * num_kv_heads + heads) * block_size + safe_slots % block_size
        stored = missing = None
        if (slots < 0).any():
            present = np.broadcast_to((slots >= 0)[:, None], rows.shape).reshape(-1)
            stored = torch.from_numpy(present.nonzero()[0]).to(device)
            missing = torch.from_numpy((~present).nonzero()[0]).to(device)
        return cls(torch.from_numpy(rows.reshape(-1)).to(device), stored, missing, (batch, num_kv_heads, tokens))


def gather_tokens(plane: torch.Tensor, index: TokenIndex) -> torch.Tensor:
    """Copies tokens out of their blocks.

    Args:
        plane: `[num_blocks, num_kv_heads, block_size, dim]`
        index: which tokens.

    Returns:
        `[batch, num_kv_heads, tokens, dim]`, zero where a token is not stored.
    """
    dim = plane.shape[-1]
    tokens = plane.view(-1, dim).index_select(0, index.rows)
    if index.missing is not None:
        tokens.index_fill_(0, index.missing, 0)
    return tokens.view(*index.shape, dim)
