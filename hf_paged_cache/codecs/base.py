"""What a codec is: the storage format of a block."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from hf_paged_kernels import Backend, Blocks, StepMetadata, paged_attention, read_columns, write_kv

from hf_paged_cache.blocks.exact import ExactPolicy


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
        _, num_kv_heads, _, key_dim = key.shape
        return (
            num_kv_heads == self.num_kv_heads
            and key_dim == self.key_dim
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
    """Stores keys and values in blocks, reads them back, and attends to them.

    Args:
        backend: the kernels that write, copy and attend to its blocks; `None` for those that suit the device.
    """

    name: str
    """What a user calls it: `PagedCache(config, kv=name)`."""

    is_exact: bool
    """Whether what is read back is bit for bit what was written."""

    exact_policy: ExactPolicy | None = None
    """What stays exact, for codecs that quantize whole blocks."""

    block_planes: frozenset[str] = frozenset()
    """Planes that say something about a block, and nothing about single tokens of it, by their names."""

    def __init__(self, backend: Backend | None = None) -> None:
        self.backend = backend

    def block_bytes(self, geometry: Geometry, block_size: int) -> int:
        """Bytes of one block of one layer, scales and the like included."""
        on_no_device = replace(geometry, device=torch.device("meta"))
        return sum(plane.nbytes for plane in self.allocate(on_no_device, block_size, 1).planes)

    @abstractmethod
    def allocate(self, geometry: Geometry, block_size: int, num_blocks: int) -> Blocks:
        """Blocks with undefined content.

        Raises:
            UnsupportedError: the codec cannot store keys or values of that width.
        """

    @staticmethod
    def new_plane(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for one of the planes of some blocks, with undefined content."""
        # An inference tensor could not be written to once inference mode is left.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=device)

    def write(self, blocks: Blocks, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
        """Stores the new tokens `[batch, num_kv_heads, query_length, dim]` of a step."""
        write_kv(blocks, key, value, step, backend=self.backend)

    def read(
        self, blocks: Blocks, part: Literal["key", "value"], step: StepMetadata, first_column: int, last_column: int
    ) -> torch.Tensor:
        """Keys or values of the columns `first_column..last_column - 1` in the model's dtype.

        Returns:
            `[batch, num_kv_heads, columns, dim]`, zero for tokens that are not stored.
        """
        return read_columns(blocks, part, step, first_column, last_column)

    def attend(
        self,
        query: torch.Tensor,
        blocks: Blocks,
        step: StepMetadata,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None,
        **options: Any,
    ) -> torch.Tensor:
        """Attention as `hf_paged_kernels.paged_attention` defines it, whose `options` these are."""
        return paged_attention(query, blocks, step, new_kv=new_kv, backend=self.backend, **options)
