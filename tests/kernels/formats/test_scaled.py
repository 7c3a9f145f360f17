"""`int8` and `fp8`: each token of each head is quantized by itself, as the definition says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hf_paged_kernels import ScaledBlocks, TokenIndex

from tests.kernels.definition import (
    E4M3,
    LARGEST_CODE,
    LARGEST_STATE,
    assert_as_near,
    bfloat,
    hard_inputs,
    nearest_e4m3,
    outlying,
    token_wise,
    with_offset,
)
from tests.kernels.hostile import poison_planes

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS, BLOCK_SIZE, DIMS, NUM_BLOCKS = 2, 16, (24, 8), 5
KINDS = sorted(hard_inputs((1, 1, 16, 8), torch.Generator()))
names = pytest.mark.parametrize("name", ["int8", "fp8"])


def new_blocks(name: str, dtype: torch.dtype = torch.float32, *, key_offset: bool = True) -> ScaledBlocks:
    shape = (HEADS, NUM_BLOCKS, BLOCK_SIZE)
    blocks = ScaledBlocks(
        *(torch.empty(*shape, dim, dtype=torch.int8) for dim in DIMS),
        *(torch.empty(shape, dtype=torch.bfloat16) for _ in DIMS),
        code_dtype=torch.int8 if name == "int8" else torch.float8_e4m3fn,
        dtype=dtype,
        key_offset=torch.empty(HEADS, NUM_BLOCKS, DIMS[0], dtype=torch.bfloat16) if key_offset else None,
    )
    poison_planes(blocks)
    return blocks


def write(blocks: ScaledBlocks, key: torch.Tensor, value: torch.Tensor, slots: list[list[int]]) -> None:
    index = TokenIndex.from_slots(np.array(slots), blocks)
    blocks.write("key", key, index)
    blocks.write("value", value, index)


def read_back(name: str, states: torch.Tensor, *, key_offset: bool = True) -> tuple[torch.Tensor, ScaledBlocks]:
    """What keys `[HEADS, BLOCK_SIZE, DIMS[0]]` read as in the model's dtype, and the blocks: all in block 2."""
    blocks = new_blocks(name, states.dtype, key_offset=key_offset)
    write(blocks, states[None], states[None, ..., : DIMS[1]], [list(range(2 * BLOCK_SIZE, 3 * BLOCK_SIZE))])
    return blocks.read_blocks("key", torch.tensor([2]))[:, 0], blocks


@names
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key_offset", [True, False])
def test_what_is_read_is_what_the_definition_says(name: str, kind: str, dtype: torch.dtype, key_offset: bool) -> None:
    states = hard_inputs((HEADS, BLOCK_SIZE, DIMS[0]), torch.Generator().manual_seed(0))[kind].to(dtype)
    read, blocks = read_back(name, states, key_offset=key_offset)
    assert read.dtype == dtype
    exact = states.double()
    keys = exact.numpy()
    expected = with_offset(keys, keys[:, :1], name) if key_offset else token_wise(keys, name)
    assert_as_near(read, expected, exact, axis=-1)
    if key_offset:
        assert (blocks.key_offset[:, 2].double().numpy() == outlying(exact[:, 0].numpy())).all()


@names
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_nearest_ones_to_the_stored_scale(name: str, kind: str) -> None:
    states = hard_inputs((HEADS, BLOCK_SIZE, DIMS[0]), torch.Generator().manual_seed(1))[kind]
    _, blocks = read_back(name, states, key_offset=False)
    exact, bits = states.double().numpy(), blocks.key[:, 2].view(torch.uint8).numpy()
    codes = bits.astype(np.int8).astype(np.float64) if name == "int8" else E4M3[bits]
    scale = blocks.key_scale[:, 2].double().numpy()
    smallest = np.abs(exact).max(-1) / LARGEST_CODE[name]
    tried = smallest * 2 ** (np.arange(1 if name == "int8" else 16)[:, None, None] / 16)
    assert (np.abs(scale - bfloat(tried)).min(0) <= scale * 2**-8).all()
    grid = np.arange(-127.0, 128) if name == "int8" else E4M3[~np.isnan(E4M3)]
    nearest = np.abs(grid * scale[..., None, None] - exact[..., None]).min(-1)
    assert (np.abs(codes * scale[..., None] - exact) <= nearest + 1e-6 * np.abs(exact)).all()


@names
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_bounded(name: str, kind: str, dtype: torch.dtype) -> None:
    """int8: half a step of the token's largest value. fp8: half a unit of the last of 4 bits of each value."""
    states = hard_inputs((HEADS, BLOCK_SIZE, DIMS[0]), torch.Generator().manual_seed(2))[kind].to(dtype)
    read, _ = read_back(name, states, key_offset=False)
    exact = states.double()
    largest = exact.abs().amax(-1, keepdim=True)
    bounds = {"int8": largest / 254, "fp8": torch.maximum(exact.abs() / 16, largest / 448 / 2**9)}
    bound = bounds[name] * (1 + 2**-8)  # that a scale is rounded by
    rounding = torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert bool(((read.double() - exact).abs() <= bound + rounding).all())


@names
@pytest.mark.parametrize("exponent", [-15, -7, -6, 0, 5, 6, 15])
def test_numbers_of_any_magnitude_are_stored_alike(name: str, exponent: int) -> None:
    """Nothing vanishes for being small, nor is cut off for being large: errors scale with the numbers."""
    states = torch.randn(HEADS, BLOCK_SIZE, DIMS[0], generator=torch.Generator().manual_seed(5))
    plain, _ = read_back(name, states)
    read, _ = read_back(name, states * 10.0**exponent)
    error = (read.double() * 10.0**-exponent - states).norm()
    assert float(error) == pytest.approx(float((plain.double() - states).norm()), rel=0.1)


@names
@pytest.mark.parametrize("channels", [slice(3, None, 8), slice(0, 1), slice(5, 11)], ids=str)
def test_large_channels_that_all_tokens_share_cost_the_others_no_precision(name: str, channels: slice) -> None:
    """As in Qwen2: a bias of 200 beside numbers around 1."""
    states = torch.randn(HEADS, BLOCK_SIZE, DIMS[0], generator=torch.Generator().manual_seed(6))
    error_without = (read_back(name, states)[0] - states).square().mean()
    states[..., channels] += 200.0
    error = (read_back(name, states)[0] - states).square().mean()
    error_of_codes_of_keys = (read_back(name, states, key_offset=False)[0] - states).square().mean()
    assert error < 4 * error_without
    assert error_of_codes_of_keys > 5 * error


@names
def test_tokens_that_come_later_are_stored_with_the_offset_of_their_block(name: str) -> None:
    """Until another first key takes its place, as when a row was cropped to the begin of the block."""
    generator = torch.Generator().manual_seed(7)
    keys = torch.randn(1, HEADS, BLOCK_SIZE, DIMS[0], generator=generator)
    keys[..., 4] += 90.0
    value = torch.zeros(1, HEADS, BLOCK_SIZE, DIMS[1])
    slots = np.arange(BLOCK_SIZE, 2 * BLOCK_SIZE)
    at_once, in_parts = new_blocks(name), new_blocks(name)
    write(at_once, keys, value, [slots.tolist()])
    for part in ([0, 1, 2], [3], [4, 5], list(range(6, BLOCK_SIZE))):
        write(in_parts, keys[:, :, part], value[:, :, part], [slots[part].tolist()])
    for plane, other in zip(at_once.planes, in_parts.planes, strict=True):
        assert torch.equal(plane.view(torch.uint8), other.view(torch.uint8))

    write(at_once, keys[:, :, 9:12], value[:, :, 9:12], [slots[5:8].tolist()])
    assert torch.equal(at_once.key_offset.view(torch.uint8), in_parts.key_offset.view(torch.uint8))
    write(at_once, -keys[:, :, 9:12], value[:, :, 9:12], [slots[:3].tolist()])
    assert torch.equal(at_once.key_offset[:, 1, 4], -keys[0, :, 9, 4].bfloat16())


@pytest.mark.parametrize("kind", ["random", "outlier channels", "growing magnitude"])
def test_fp8_takes_the_scale_that_rounds_a_token_best(kind: str) -> None:
    """A fifth less squared error than with the smallest scale, and never more."""
    states = hard_inputs((HEADS, BLOCK_SIZE, DIMS[0]), torch.Generator().manual_seed(3))[kind]
    exact = states.double().numpy()
    scale = bfloat(np.abs(exact).max(-1, keepdims=True) / LARGEST_CODE["fp8"])
    with_smallest = ((nearest_e4m3(exact / scale) * scale - exact) ** 2).sum(-1)
    errors = ((read_back("fp8", states, key_offset=False)[0].double().numpy() - exact) ** 2).sum(-1)
    assert (errors <= with_smallest * 1.02).all()
    assert errors.sum() < 0.8 * with_smallest.sum()


@names
def test_nan_stays_with_its_token_and_infinity_becomes_the_largest_value(name: str) -> None:
    states = torch.randn(HEADS, BLOCK_SIZE, DIMS[0], generator=torch.Generator().manual_seed(0))
    clean, _ = read_back(name, states)
    broken = states.clone()
    broken[0, 3, 5], broken[1, 7, 0], broken[1, 8, 2] = math.nan, math.inf, -math.inf
    read, _ = read_back(name, broken)
    assert bool(read[0, 3].isnan().all())
    for number, sign in ((read[1, 7, 0], 1), (read[1, 8, 2], -1)):
        assert float(number) == pytest.approx(sign * LARGEST_STATE, rel=0.07)
    assert not bool(read[1].isnan().any())
    untouched = torch.ones(HEADS, BLOCK_SIZE, dtype=torch.bool)
    untouched[[0, 1, 1], [3, 7, 8]] = False
    assert torch.equal(read[untouched], clean[untouched])


@names
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_first_key_that_is_not_finite_does_not_reach_the_others_of_its_block(name: str, number: float) -> None:
    states = torch.randn(HEADS, BLOCK_SIZE, DIMS[0], generator=torch.Generator().manual_seed(0))
    states[:, 0, 5] = number
    read, _ = read_back(name, states)
    torch.testing.assert_close(read[:, 1:], states[:, 1:], atol=0.05, rtol=0.07)
    assert bool(read[:, 0].isnan().all()) == math.isnan(number)


@names
def test_only_the_written_slots_change(name: str) -> None:
    blocks, untouched = new_blocks(name), new_blocks(name)
    for both in (blocks, untouched):
        both.key_offset.fill_(0.5)
    key, value = (torch.randn(2, HEADS, 3, dim) for dim in DIMS)
    write(blocks, key, value, [[-1, 17, 60], [-1, -1, 33]])
    is_written = torch.zeros(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    is_written[[17, 60, 33]] = True
    assert torch.equal(blocks.key_offset, untouched.key_offset)
    for plane, before in zip(blocks.planes[:4], untouched.planes[:4], strict=True):
        slots, slots_before = (it.view(torch.uint8).reshape(HEADS, len(is_written), -1) for it in (plane, before))
        assert torch.equal(slots[:, ~is_written], slots_before[:, ~is_written])
    for part, states in (("key", key), ("value", value)):
        read = blocks.read_blocks(part, torch.tensor([1, 2, 3])).flatten(1, 2)
        torch.testing.assert_close(read[:, 1], states[0, :, 1], atol=0.2, rtol=0.07)
        torch.testing.assert_close(read[:, 44], states[0, :, 2], atol=0.2, rtol=0.07)
        torch.testing.assert_close(read[:, 17], states[1, :, 2], atol=0.2, rtol=0.07)


@names
def test_a_token_has_the_same_codes_whatever_is_written_with_it(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(1, HEADS, BLOCK_SIZE, dim, generator=generator) for dim in DIMS)
    together, apart = new_blocks(name), new_blocks(name)
    write(together, key, value, [list(range(BLOCK_SIZE))])
    for token in (0, *reversed(range(1, BLOCK_SIZE))):
        write(apart, key[:, :, token : token + 1], value[:, :, token : token + 1], [[token]])
    for plane, other in zip(together.planes, apart.planes, strict=True):
        assert torch.equal(plane.view(torch.uint8), other.view(torch.uint8))
