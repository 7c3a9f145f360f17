"""Rotates keys, values or both before another codec stores them, which spreads outliers over all channels."""

from functools import lru_cache
from typing import Any, Literal

import torch
from hf_paged_kernels import Blocks, StepMetadata
from hf_paged_kernels.modes import matmul, ordinary_tensors

from hf_paged_cache.codecs.base import Codec, Geometry


class RotatedCodec(Codec):
    """Stores `key @ R` and `value @ R` by another codec, for a Hadamard matrix `R`.

    Scores stay what they are if queries are rotated as keys are, and the output is rotated back. Ashkboos et al.,
    "QuaRot", arXiv 2404.00456, without its changes to the weights.

    Tokens that stay exact are stored rotated too. In 16 bits that rounds them, and rotating back once more: by 1.6e-3
    in bfloat16 and 2.0e-4 in float16 (relative, root mean square). In float32 they are exact.

    Args:
        codec: stores what is rotated.
        rotates_keys, rotates_values: which.
    """

    is_exact = False

    def __init__(self, codec: Codec, *, rotates_keys: bool, rotates_values: bool) -> None:
        super().__init__(codec.backend)
        self.name, self.exact_policy, self.block_planes = codec.name, codec.exact_policy, codec.block_planes
        self._codec = codec
        self._rotates = {"key": rotates_keys, "value": rotates_values}

    def allocate(self, geometry: Geometry, block_size: int, num_blocks: int) -> Blocks:
        return self._codec.allocate(geometry, block_size, num_blocks)

    def write(self, blocks: Blocks, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
        self._codec.write(blocks, self._rotated("key", key), self._rotated("value", value), step)

    def read(
        self, blocks: Blocks, part: Literal["key", "value"], step: StepMetadata, first_column: int, last_column: int
    ) -> torch.Tensor:
        # The matrix is its own inverse.
        return self._rotated(part, self._codec.read(blocks, part, step, first_column, last_column))

    def attend(
        self,
        query: torch.Tensor,
        blocks: Blocks,
        step: StepMetadata,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None,
        **options: Any,
    ) -> torch.Tensor:
        if new_kv is not None and not step.has_past:
            return self._codec.attend(query, blocks, step, new_kv, **options)
        if new_kv is not None:
            new_kv = (self._rotated("key", new_kv[0]), self._rotated("value", new_kv[1]))
        out = self._codec.attend(self._rotated("key", query), blocks, step, new_kv, **options)
        return self._rotated("value", out)

    def _rotated(self, part: Literal["key", "value"], states: torch.Tensor) -> torch.Tensor:
        if not self._rotates[part]:
            return states
        matrix = hadamard(states.shape[-1] & -states.shape[-1], states.device)
        pieces = states.float().unflatten(-1, (-1, len(matrix)))
        return matmul(pieces, matrix).flatten(-2).to(states.dtype)


@lru_cache
def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """The orthonormal Hadamard matrix of a power of two, float32 `[size, size]`; symmetric, so its own inverse.

    A width that is no power of two is rotated in pieces of the largest one that divides it.
    """
    with ordinary_tensors():
        matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
        return matrix / size**0.5
