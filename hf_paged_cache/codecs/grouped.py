"""2-, 4- or 8-bit codes: keys in groups along the tokens of a block, values in groups along the channels of a token."""

import torch
from hf_paged_kernels import Backend, GroupedBlocks

from hf_paged_cache.blocks.exact import ExactPolicy
from hf_paged_cache.codecs.base import Codec, Geometry
from hf_paged_cache.codecs.quant import KVQuant
from hf_paged_cache.errors import UnsupportedError


class GroupedCodec(Codec):
    """Quantizes a block once, when it is full and the newest tokens have moved on.

    Args:
        quant: the details, all of them given.
        backend: as in `Codec`.
    """

    is_exact = False

    def __init__(self, quant: KVQuant, backend: Backend | None = None) -> None:
        super().__init__(backend)
        self.name, self._quant = quant.base, quant
        self.exact_policy = ExactPolicy(quant.exact_recent, quant.exact_sinks)

    def allocate(self, geometry: Geometry, block_size: int, num_blocks: int) -> GroupedBlocks:
        self._check(geometry)
        quant = self._quant
        key_groups = (_num_groups(block_size, quant.key_group), geometry.key_dim)
        value_groups = (block_size, _num_groups(geometry.value_dim, quant.value_group))

        def plane(*dims: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
            return self.new_plane((geometry.num_kv_heads, num_blocks, *dims), dtype, geometry.device)

        return GroupedBlocks(
            key=plane(block_size, geometry.key_dim * quant.key_bits // 8, dtype=torch.uint8),
            value=plane(block_size, geometry.value_dim * quant.value_bits // 8, dtype=torch.uint8),
            key_scale=plane(*key_groups, dtype=torch.bfloat16),
            key_zero=plane(*key_groups),
            value_scale=plane(*value_groups, dtype=torch.bfloat16),
            value_zero=plane(*value_groups),
            key_bits=quant.key_bits,
            value_bits=quant.value_bits,
            key_coverage=quant.key_coverage,
            value_coverage=quant.value_coverage,
            dtype=geometry.key_dtype,
        )

    def _check(self, geometry: Geometry) -> None:
        for part in ("key", "value"):
            dim, bits = getattr(geometry, f"{part}_dim"), getattr(self._quant, f"{part}_bits")
            if dim * bits % 8:
                raise UnsupportedError(
                    f'kv="{self.name}" puts {8 // bits} channels in a byte, but a {part} of this model has {dim} '
                    'channels: use kv="int8"'
                )


def _num_groups(size: int, group: int) -> int:
    """Groups of equal size, as large as may be but not larger than `group`."""
    return size // next(divisor for divisor in range(group, 0, -1) if size % divisor == 0)
