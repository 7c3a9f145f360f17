"""8-bit codes with a scale for each token and head."""

import torch
from hf_paged_kernels import Backend, ScaledBlocks

from hf_paged_cache.codecs.base import Codec, Geometry


class ScaledCodec(Codec):
    """Stores keys and values as 8-bit codes, quantized token by token when they are written.

    Args:
        backend: as in `Codec`.
        key_offset: whether each block has an offset for each channel of its keys, so that a few large ones that are the
            same in every token cost the others no precision.
    """

    is_exact = False
    block_planes = frozenset({"key_offset"})
    code_dtype: torch.dtype

    def __init__(self, backend: Backend | None = None, *, key_offset: bool = True) -> None:
        super().__init__(backend)
        self._has_key_offset = key_offset

    def allocate(self, geometry: Geometry, block_size: int, num_blocks: int) -> ScaledBlocks:
        shape = (geometry.num_kv_heads, num_blocks, block_size)
        return ScaledBlocks(
            key=self.new_plane((*shape, geometry.key_dim), torch.int8, geometry.device),
            value=self.new_plane((*shape, geometry.value_dim), torch.int8, geometry.device),
            key_scale=self.new_plane(shape, torch.bfloat16, geometry.device),
            value_scale=self.new_plane(shape, torch.bfloat16, geometry.device),
            code_dtype=self.code_dtype,
            dtype=geometry.key_dtype,
            key_offset=self.new_plane((*shape[:2], geometry.key_dim), torch.bfloat16, geometry.device)
            if self._has_key_offset
            else None,
        )


class Int8Codec(ScaledCodec):
    """Whole numbers from -127 to 127: the closest to exact, at half of 16 bits."""

    name = "int8"
    code_dtype = torch.int8


class Fp8Codec(ScaledCodec):
    """8-bit floating point, e4m3: as large as `int8` and less close; for hardware that multiplies it."""

    name = "fp8"
    code_dtype = torch.float8_e4m3fn
