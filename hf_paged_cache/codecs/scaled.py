"""8-bit codes with a scale for each token and head."""

import torch
from hf_paged_kernels import ScaledBlocks

from hf_paged_cache.codecs.base import Codec, Geometry


class ScaledCodec(Codec):
    """Stores keys and values as 8-bit codes, quantized token by token when they are written."""

    is_exact = False
    code_dtype: torch.dtype

    def block_bytes(self, geometry: Geometry, block_size: int) -> int:
        scale_bytes = torch.float16.itemsize
        return geometry.num_kv_heads * block_size * (geometry.key_dim + geometry.value_dim + 2 * scale_bytes)

    def allocate(self, geometry: Geometry, block_size: int, num_blocks: int) -> ScaledBlocks:
        shape = (geometry.num_kv_heads, num_blocks, block_size)
        return ScaledBlocks(
            key=self.new_plane((*shape, geometry.key_dim), torch.int8, geometry.device),
            value=self.new_plane((*shape, geometry.value_dim), torch.int8, geometry.device),
            key_scale=self.new_plane(shape, torch.float16, geometry.device),
            value_scale=self.new_plane(shape, torch.float16, geometry.device),
            code_dtype=self.code_dtype,
            dtype=geometry.key_dtype,
        )


class Int8Codec(ScaledCodec):
    """Whole numbers from -127 to 127: the closest to exact, at half of 16 bits."""

    name = "int8"
    code_dtype = torch.int8


class Fp8Codec(ScaledCodec):
    """8-bit floating point, e4m3: as large as `int8` and less close; for hardware that multiplies it."""

    name = "fp8"
    code_dtype = torch.float8_e4m3fn
