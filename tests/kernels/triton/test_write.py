"""Writing and copying by the Triton kernels."""

from __future__ import annotations

import math

import pytest
import torch
from hf_paged_kernels import KVBlocks, copy_blocks

from tests.kernels.device import on_device

pytest.importorskip("triton")


@pytest.mark.parametrize("shape", [(16, 8), (2, 3), (1, 5), (3, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8], ids=str)
def test_all_bytes_of_a_block_are_copied(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Blocks of 8-byte words, and those that are no whole number of such words."""
    numbers = torch.arange(2 * 5 * math.prod(shape)).view(2, 5, *shape)
    layers = [KVBlocks(numbers.to(dtype), numbers.flip(0).to(dtype)) for _ in range(2)]
    before = [[plane.clone() for plane in blocks.planes] for blocks in layers]
    on_device(copy_blocks)(layers, [(1, 3), (2, 4)], backend="triton")
    for blocks, planes in zip(layers, before, strict=True):
        for plane, old in zip(blocks.planes, planes, strict=True):
            assert torch.equal(plane[:, [3, 4]], old[:, [1, 2]])
            assert torch.equal(plane[:, :3], old[:, :3])
