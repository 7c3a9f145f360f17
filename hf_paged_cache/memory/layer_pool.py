"""The blocks of one layer as memory: its tensors, and how they grow."""

from dataclasses import fields
from math import prod

import torch
from hf_paged_kernels import Blocks, MixedBlocks, StepMetadata

from hf_paged_cache.codecs import Codec, Geometry
from hf_paged_cache.memory.budget import MemoryBudget


class LayerPool:
    """The tensors that hold all blocks of one layer. It knows blocks, no sequences.

    Args:
        codec: how tokens are stored.
        geometry: shape, dtypes and device of the layer's keys and values.
        block_size: tokens a block.
        num_blocks: blocks to begin with, the null block included if there is one.
        budget: counts the bytes of the layer; they are in it from the first.
        exact_pool: the pool of the layer's exact blocks, for a codec that quantizes whole blocks.
    """

    def __init__(
        self,
        codec: Codec,
        geometry: Geometry,
        block_size: int,
        num_blocks: int,
        budget: MemoryBudget,
        exact_pool: "LayerPool | None" = None,
    ) -> None:
        self.codec = codec
        self.geometry = geometry
        self.block_size = block_size
        self.block_bytes = codec.block_bytes(geometry, block_size)
        self.exact_pool = exact_pool
        self._budget = budget
        self._own = codec.allocate(geometry, block_size, num_blocks)
        self._with_codes: MixedBlocks | None = None  # of a pool of exact blocks: those, and the codes beside them
        budget.add(self.num_bytes)

    @property
    def blocks(self) -> Blocks:
        """All that a reader needs: the same object until the pool grows, and readable from then on too."""
        # Not between two planes that another thread is moving.
        with self._budget.lock:
            if self.exact_pool is None:
                return self._own
            if self.exact_pool._with_codes is None:
                self.exact_pool._with_codes = MixedBlocks(self._own, self.exact_pool._own)
            return self.exact_pool._with_codes

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the layer, exact blocks not included."""
        return self._own.planes

    @property
    def planes_by_name(self) -> dict[str, torch.Tensor]:
        """The tensors of the layer by what they hold, exact blocks not included."""
        return planes_by_name(self._own)

    @property
    def num_blocks(self) -> int:
        return self._own.num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, those of exact blocks not included."""
        return self._own.num_blocks * self.block_bytes

    def grow(self, num_blocks: int) -> None:
        """Moves the blocks into larger planes, one after the other, so that only one of them is held twice. Done under
        the lock of the budget."""
        try:
            self._move(num_blocks)
        except BaseException:
            self.settle()
            raise

    def settle(self) -> None:
        """After a move that was interrupted: all planes have to hold the same blocks. What has moved goes back to where
        room became free."""
        self._move(min(plane.shape[1] for plane in self.planes))

    def _move(self, num_blocks: int) -> None:
        for index in range(len(self._own.planes)):
            old = self._own.planes[index]
            num_kv_heads, present, *dims = old.shape
            if present == num_blocks:
                continue
            num_bytes = num_kv_heads * num_blocks * prod(dims) * old.itemsize
            self._budget.add(num_bytes)
            try:
                new = self.codec.new_plane((num_kv_heads, num_blocks, *dims), old.dtype, old.device)
            except BaseException:
                self._budget.remove(num_bytes)
                raise
            kept = min(present, num_blocks)
            new[:, :kept] = old[:, :kept]
            self._own = self._own.with_plane(index, new)
            (self.exact_pool or self)._with_codes = None
            self._budget.remove(old.nbytes)

    def write(self, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
        """Stores the new tokens `[batch, num_kv_heads, query_length, dim]` of a step."""
        if key.requires_grad or value.requires_grad:
            key, value = key.detach(), value.detach()
        self.codec.write(self.blocks, key, value, step)


def planes_by_name(blocks: Blocks) -> dict[str, torch.Tensor]:
    """The tensors of blocks by what they hold."""
    values = {field.name: getattr(blocks, field.name) for field in fields(blocks)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
