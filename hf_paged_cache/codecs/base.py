"""What a codec is: the storage format of a block."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from hf_paged_kernels import Backend, KVBlocks, StepMetadata, TokenIndex


@dataclass(frozen=True)
class Geometry:
    """Shape of the keys and values of one layer, taken from the first ones it was given.

    Tensor parallelism slices heads, MLA caches latents, some models change head_dim between layers: so none of this
    is read from a model's config.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor) -> "Geometry":
        """Geometry of keys and values `[batch, num_kv_heads, tokens, dim]`."""
        return cls(key.shape[1], key.shape[3], value.shape[3], key.dtype, value.dtype, key.device)

    def fits(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether keys and values have this geometry."""
        return (
            key.shape[1] == self.num_kv_heads
            and key.shape[3] == self.key_dim
            and value.shape[3] == self.value_dim
            and key.dtype == self.key_dtype
            and value.dtype == self.value_dtype
            and key.device == self.device
        )

    def __str__(self) -> str:
        dims = str(self.key_dim) if self.key_dim == self.value_dim else f"{self.key_dim}/{self.value_dim}"
        names = (str(dtype).removeprefix("torch.") for dtype in (self.key_dtype, self.value_dtype))
        dtypes = "/".join(dict.fromkeys(names))
        return f"{self.num_kv_heads} KV heads of {dims}, {dtypes}, {self.device}"


class Codec(ABC):
    """Stores keys and values in blocks and reads them back.

    Args:
        backend: the kernels that write, copy and attend to its blocks; `None` for those that suit the device.
    """

    name: str
    """What a user calls it: `PagedCache(config, kv=name)`."""

    is_exact: bool
    """Whether what is read back is bit for bit what was written."""

    def __init__(self, backend: Backend | None = None) -> None:
        self.backend = backend

    @abstractmethod
    def block_bytes(self, geometry: Geometry, block_size: int) -> int:
        """Bytes of one block of one layer, scales and the like included."""

    @abstractmethod
    def allocate(self, geometry: Geometry, block_size: int, num_blocks: int) -> KVBlocks:
        """Blocks with undefined content."""

    @abstractmethod
    def write(self, blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
        """Stores the new tokens `[batch, num_kv_heads, query_length, dim]` of a step."""

    @abstractmethod
    def read_key(self, blocks: KVBlocks, index: TokenIndex) -> torch.Tensor:
        """Keys `[batch, num_kv_heads, tokens, key_dim]` in the model's dtype, zero for tokens not stored."""

    @abstractmethod
    def read_value(self, blocks: KVBlocks, index: TokenIndex) -> torch.Tensor:
        """Values `[batch, num_kv_heads, tokens, value_dim]` in the model's dtype, zero for tokens not stored."""
