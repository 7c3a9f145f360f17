"""`write_kv`, `gather_tokens` and `copy_blocks`: what goes in comes out, and nothing else is touched."""

import math

import numpy as np
import pytest
import torch
from hf_paged_kernels import KVBlocks, StepMetadata, TokenIndex, copy_blocks, gather_tokens, write_kv

from tests.kernels.hostile import poisoned_blocks


def step_with(slots: list[list[int]], block_size: int) -> StepMetadata:
    """A step that has only its slots, which is all that writing looks at."""
    batch, num_new = len(slots), len(slots[0])
    return StepMetadata(
        block_table=np.zeros((batch, 1), dtype=np.int32),
        seq_lens=np.full(batch, num_new, dtype=np.int32),
        padding=np.zeros(batch, dtype=np.int32),
        slots=np.array(slots, dtype=np.int32),
        num_columns=num_new,
        block_size=block_size,
        new_tokens_stored=True,
    )


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1.0, 1 + math.prod(shape)).view(shape).to(dtype)


def written(blocks: KVBlocks) -> torch.Tensor:
    """bool `[num_blocks, block_size]`, the slots that hold a token; those half written would show in the assert."""
    flags = torch.cat([~plane.isnan().permute(0, 3, 1, 2).flatten(0, 1) for plane in blocks.planes])
    assert bool((flags == flags[0]).all())
    return flags[0]


@pytest.mark.parametrize("block_size", [16, 256, 24])
@pytest.mark.parametrize("dims", [(8, 8), (6, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_come_back_from_the_slots_they_were_written_to(block_size, dims, dtype):
    blocks = poisoned_blocks(5, 3, block_size, dims, dtype, math.nan)
    slots = [[4 * block_size + 1, 2 * block_size], [3 * block_size + 15, 4 * block_size]]
    key, value = numbered(2, 3, 2, dims[0], dtype=dtype), -numbered(2, 3, 2, dims[1], dtype=dtype)

    write_kv(blocks, key, value, step_with(slots, block_size))

    for b, row in enumerate(slots):
        for i, slot in enumerate(row):
            block, offset = divmod(slot, block_size)
            assert torch.equal(blocks.key[:, block, offset], key[b, :, i])
            assert torch.equal(blocks.value[:, block, offset], value[b, :, i])
    assert sorted(written(blocks).flatten().nonzero().flatten().tolist()) == sorted(slots[0] + slots[1])
    index = TokenIndex.from_slots(np.array(slots), blocks)
    assert torch.equal(gather_tokens(blocks.key, index), key)
    assert torch.equal(gather_tokens(blocks.value, index), value)


def test_tokens_without_a_slot_are_passed_over():
    blocks = poisoned_blocks(2, 2, 4, (3, 3), torch.float32, math.nan)
    key, value = numbered(2, 2, 3, 3), -numbered(2, 2, 3, 3)
    write_kv(blocks, key, value, step_with([[-1, 5, -1], [-1, -1, 6]], 4))
    assert written(blocks).flatten().nonzero().flatten().tolist() == [5, 6]
    assert torch.equal(blocks.key[:, 1, 1], key[0, :, 1])
    assert torch.equal(blocks.value[:, 1, 2], value[1, :, 2])


def test_a_step_without_any_slot_writes_nothing():
    blocks = poisoned_blocks(2, 1, 4, (3, 3), torch.float32, math.nan)
    write_kv(blocks, numbered(1, 1, 2, 3), numbered(1, 1, 2, 3), step_with([[-1, -1]], 4))
    assert not written(blocks).any()


def test_keys_may_be_any_view():
    """Models transpose heads and tokens, and expand what all heads share."""
    blocks = poisoned_blocks(2, 2, 4, (3, 5), torch.float32, math.nan)
    key, value = numbered(1, 3, 2, 3).transpose(1, 2), numbered(1, 1, 3, 5).expand(1, 2, 3, 5)
    write_kv(blocks, key, value, step_with([[4, 7, 5]], 4))
    assert torch.equal(blocks.key[:, 1, [0, 3, 1]], key[0])
    assert torch.equal(blocks.value[:, 1, [0, 3, 1]], value[0])


def test_missing_tokens_read_as_zero_and_not_as_the_null_block():
    blocks = poisoned_blocks(2, 2, 4, (3, 3), torch.float32, math.nan)
    blocks.key[:, 1] = 1.0
    index = TokenIndex.from_slots(np.array([[-1, 4, -1], [7, -1, -1]]), blocks)
    expected = torch.zeros(2, 2, 3, 3)
    expected[0, :, 1] = expected[1, :, 0] = 1.0
    assert torch.equal(gather_tokens(blocks.key, index), expected)
    # What was copied out is the caller's own.
    gather_tokens(blocks.key, index).fill_(5.0)
    assert torch.equal(gather_tokens(blocks.key, index), expected)


def test_no_tokens_can_be_gathered():
    blocks = poisoned_blocks(2, 2, 4, (3, 3), torch.float32, math.nan)
    index = TokenIndex.from_slots(np.zeros((2, 0), dtype=np.int64), blocks)
    assert gather_tokens(blocks.key, index).shape == (2, 2, 0, 3)


def test_a_pool_without_blocks_reads_as_zero():
    blocks = poisoned_blocks(0, 2, 4, (3, 3), torch.float32, math.nan)
    index = TokenIndex.from_slots(np.full((2, 5), -1), blocks)
    assert torch.equal(gather_tokens(blocks.key, index), torch.zeros(2, 2, 5, 3))


def test_copied_blocks_are_the_same_bit_for_bit():
    """Unwritten slots too: NaN is copied as it is. Several blocks may be copies of one."""
    blocks = poisoned_blocks(6, 2, 4, (3, 5), torch.float32, math.nan)
    write_kv(blocks, numbered(1, 2, 3, 3), numbered(1, 2, 3, 5), step_with([[4, 5, 11]], 4))
    before = [plane.clone() for plane in blocks.planes]

    copy_blocks([blocks], [(1, 5), (2, 3), (1, 4)])

    for plane, old in zip(blocks.planes, before, strict=True):
        torch.testing.assert_close(plane[:, [5, 3, 4]], old[:, [1, 2, 1]], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(plane[:, :3], old[:, :3], rtol=0, atol=0, equal_nan=True)


def test_copying_no_blocks_changes_nothing():
    blocks = poisoned_blocks(2, 1, 4, (3, 3), torch.float32, 1e30)
    copy_blocks([blocks], [])
    assert bool((blocks.key == 1e30).all())


def test_layout_says_its_sizes():
    blocks = poisoned_blocks(7, 2, 16, (8, 4), torch.float32, 0.0)
    assert (blocks.num_blocks, blocks.num_kv_heads, blocks.block_size) == (7, 2, 16)


def test_a_token_for_each_slot_is_a_view_of_the_blocks():
    blocks = poisoned_blocks(7, 2, 16, (8, 4), torch.float32, 0.0)
    key, value = blocks.token_planes
    assert (key.shape, value.shape) == ((2, 7 * 16, 8), (2, 7 * 16, 4))
    key[:, 5 * 16 + 3] = 1.0
    assert bool((blocks.key[:, 5, 3] == 1).all())
    assert int(blocks.key.sum()) == 2 * 8
