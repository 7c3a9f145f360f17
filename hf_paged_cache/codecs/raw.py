"""Keys and values as the model computed them."""

from hf_paged_kernels import KVBlocks

from hf_paged_cache.codecs.base import Codec, Geometry


class RawCodec(Codec):
    """Stores keys and values in the model's dtype, unchanged."""

    name = "raw"
    is_exact = True

    def allocate(self, geometry: Geometry, block_size: int, num_blocks: int) -> KVBlocks:
        shape = (geometry.num_kv_heads, num_blocks, block_size)
        return KVBlocks(
            key=self.new_plane((*shape, geometry.key_dim), geometry.key_dtype, geometry.device),
            value=self.new_plane((*shape, geometry.value_dim), geometry.value_dtype, geometry.device),
        )
