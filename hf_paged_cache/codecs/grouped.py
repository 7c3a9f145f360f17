"""2-, 4- or 8-bit codes: keys in groups along the tokens of a block, values in groups along the channels of a token."""

import torch
from hf_paged_kernels import Backend, GroupedBlocks

from hf_paged_cache.codecs.base import Codec, Geometry
from hf_paged_cache.errors import UnsupportedError
from hf_paged_cache.hot import HotPolicy


class GroupedCodec(Codec):
    """Quantizes a block once, when it is full and the newest tokens have moved on.

    Args:
        name: what a user calls it.
        key_bits, value_bits: of a code: 2, 4 or 8.
        value_group: channels of a value that share scale and zero, at most.
        hot: what stays exact.
        backend: as in `Codec`.
    """

    is_exact = False

    def __init__(
        self,
        name: str,
        key_bits: int,
        value_bits: int,
        value_group: int,
        hot: HotPolicy,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(backend)
        self.name = name
        self.key_bits, self.value_bits = key_bits, value_bits
        self.value_group = value_group
        self.hot = hot

    def block_bytes(self, geometry: Geometry, block_size: int) -> int:
        key_bits = block_size * geometry.key_dim * self.key_bits + 2 * 16 * geometry.key_dim
        value_bits = geometry.value_dim * self.value_bits + 2 * 16 * self._num_value_groups(geometry)
        return geometry.num_kv_heads * (key_bits + block_size * value_bits) // 8

    def allocate(self, geometry: Geometry, block_size: int, num_blocks: int) -> GroupedBlocks:
        self._check(geometry)
        shape = (geometry.num_kv_heads, num_blocks)
        num_groups = self._num_value_groups(geometry)

        def plane(*dims: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
            return torch.empty(*shape, *dims, dtype=dtype, device=geometry.device)

        # An inference tensor could not be written to once inference mode is left.
        with torch.inference_mode(False):
            return GroupedBlocks(
                key=plane(block_size, geometry.key_dim * self.key_bits // 8, dtype=torch.uint8),
                value=plane(block_size, geometry.value_dim * self.value_bits // 8, dtype=torch.uint8),
                key_scale=plane(geometry.key_dim),
                key_zero=plane(geometry.key_dim),
                value_scale=plane(block_size, num_groups),
                value_zero=plane(block_size, num_groups),
                key_bits=self.key_bits,
                value_bits=self.value_bits,
                dtype=geometry.key_dtype,
            )

    def _num_value_groups(self, geometry: Geometry) -> int:
        group = next(size for size in range(self.value_group, 0, -1) if geometry.value_dim % size == 0)
        return geometry.value_dim // group

    def _check(self, geometry: Geometry) -> None:
        for part in ("key", "value"):
            dim, bits = getattr(geometry, f"{part}_dim"), getattr(self, f"{part}_bits")
            if dim * bits % 8:
                raise UnsupportedError(
                    f'kv="{self.name}" puts {8 // bits} channels in a byte, but a {part} of this model has {dim} '
                    'channels: use kv="int8"'
                )
