"""Codes of 2, 4 and 8 bits in groups: quantized, packed and read as the definition says."""

from __future__ import annotations

import math

import pytest
import torch
from hf_paged_kernels import GroupedBlocks, MixedBlocks, copy_blocks, dequantize_blocks, quantize_blocks

from hf_paged_cache import KVQuant
from hf_paged_cache.codecs import Geometry, make_codec
from tests.kernels.definition import LARGEST_STATE, assert_as_near, block_keys, block_values, hard_inputs
from tests.kernels.hostile import poison_planes, poisoned_blocks

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS, BLOCK_SIZE, DIMS, GROUP, NUM_BLOCKS = 2, 16, (24, 32), 8, 6
KINDS = sorted(hard_inputs((1, 1, 16, 8), torch.Generator()))
ID = 4
SCHEMES = {
    "4 and 4 bits": KVQuant("int4", value_group=GROUP),
    "8 and 4 bits": KVQuant("int4", key_bits=8, value_group=GROUP),
    "4 and 2 bits, the middle": KVQuant("int4", value_bits=2, value_group=GROUP, value_coverage=0.9),
    "2 and 2 bits, groups of 8 tokens, the middle": KVQuant(
        "int4", key_bits=2, value_bits=2, key_group=8, value_group=GROUP, key_coverage=0.85
    ),
    "2 and 8 bits": KVQuant("int4", key_bits=2, value_bits=8, value_group=GROUP),
}
schemes = pytest.mark.parametrize("quant", [quant.filled() for quant in SCHEMES.values()], ids=SCHEMES)


def new_blocks(quant: KVQuant, dtype: torch.dtype = torch.float32, block_size: int = BLOCK_SIZE) -> GroupedBlocks:
    geometry = Geometry(HEADS, *DIMS, dtype, dtype, torch.device("cpu"))
    blocks = make_codec(quant).allocate(geometry, block_size, NUM_BLOCKS)
    poison_planes(blocks)
    return blocks


def hard_states(kind: str, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one block, `[HEADS, BLOCK_SIZE, dim]`."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (hard_inputs((HEADS, BLOCK_SIZE, dim), generator)[kind].to(dtype) for dim in DIMS)
    return key, value


def read_back(
    quant: KVQuant, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, GroupedBlocks]:
    """What a block of them reads as, and the blocks."""
    blocks = new_blocks(quant, key.dtype)
    blocks.quantize(key[:, None], value[:, None], torch.tensor([ID]))
    return *(blocks.read_blocks(part, torch.tensor([ID]))[:, 0] for part in ("key", "value")), blocks


def bits_of(blocks: GroupedBlocks) -> list[torch.Tensor]:
    return [plane.contiguous().view(torch.uint8).clone() for plane in blocks.planes]


@schemes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_read_is_what_the_definition_says(quant: KVQuant, kind: str, dtype: torch.dtype) -> None:
    key, value = hard_states(kind, dtype)
    read_key, read_value, _ = read_back(quant, key, value)
    assert read_key.dtype == read_value.dtype == dtype
    exact_key, exact_value = key.double(), value.double()
    assert_as_near(read_key, block_keys(exact_key.numpy(), quant), exact_key, axis=-2)
    assert_as_near(read_value, block_values(exact_value.numpy(), quant), exact_value, axis=-1)


@schemes
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_half_a_step_and_what_a_zero_rounds(quant: KVQuant, kind: str) -> None:
    """And, of the numbers that the codes do not cover, their distance from those."""
    key, value = (states.double() for states in hard_states(kind, torch.float32, seed=1))
    read_key, read_value, _ = read_back(quant, key.float(), value.float())
    key_group = min(quant.key_group, BLOCK_SIZE)
    for read, exact, width, coverage in (
        *(
            (
                read_key[:, first : first + key_group].mT,
                key[:, first : first + key_group].mT,
                quant.key_bits,
                quant.key_coverage,
            )
            for first in range(0, BLOCK_SIZE, key_group)
        ),
        (
            read_value.unflatten(-1, (-1, GROUP)),
            value.unflatten(-1, (-1, GROUP)),
            quant.value_bits,
            quant.value_coverage,
        ),
    ):
        largest = exact.abs().amax(-1, keepdim=True)
        extent = exact.amax(-1, keepdim=True) - exact.amin(-1, keepdim=True)
        bound = max(coverage / (2**width - 1) * 0.51, (1 - coverage) / 2) * extent + largest / 2**9
        assert bool(((read.double() - exact).abs() <= bound).all())


@schemes
def test_infinity_becomes_the_largest_value(quant: KVQuant) -> None:
    key, value = hard_states("random", torch.float32)
    key[0, 5, 3], key[1, 2, 7], value[0, 1, 0], value[1, 15, 31] = math.inf, -math.inf, -math.inf, math.inf
    read_key, read_value, _ = read_back(quant, key, value)
    key_largest, value_largest = (
        LARGEST_STATE * (1 - (1 - coverage) / 2) for coverage in (quant.key_coverage, quant.value_coverage)
    )
    assert float(read_key[0, 5, 3]) == pytest.approx(key_largest, rel=1e-2)
    assert float(read_key[1, 2, 7]) == pytest.approx(-key_largest, rel=1e-2)
    assert float(read_value[0, 1, 0]) == pytest.approx(-value_largest, rel=1e-2)
    assert bool(read_key.isfinite().all())
    assert bool(read_value.isfinite().all())


@schemes
@pytest.mark.parametrize("exponent", [-30, -7, -5, 0, 5, 6, 25])
def test_numbers_of_any_magnitude_are_stored_alike(quant: KVQuant, exponent: int) -> None:
    """Nothing vanishes for being small, nor is cut off for being large: errors scale with the numbers."""
    key, value = hard_states("outlier channels", torch.float32)
    plain = read_back(quant, key, value)
    scaled = read_back(quant, key * 10.0**exponent, value * 10.0**exponent)
    for states, read, expected in zip((key, value), scaled, plain, strict=False):
        error = (read.double() * 10.0**-exponent - states).norm() / states.norm()
        assert float(error) == pytest.approx(float((expected.double() - states).norm() / states.norm()), rel=0.15)


@schemes
@pytest.mark.parametrize("number", [0.0, 1e-7, -3.7, 1e6])
def test_constants_are_stored_to_three_digits(quant: KVQuant, number: int) -> None:
    key, value = (torch.full((HEADS, BLOCK_SIZE, dim), number) for dim in DIMS)
    for read in read_back(quant, key, value)[:2]:
        torch.testing.assert_close(read, torch.full_like(read, number), rtol=1e-3, atol=0)


@schemes
def test_nan_stays_in_its_group(quant: KVQuant) -> None:
    """A group of tokens in a channel of keys, a group of channels in a value: nothing else."""
    key, value = hard_states("random", torch.float32)
    clean_key, clean_value, _ = read_back(quant, key, value)
    key[0, 5, 3], value[1, 2, 9] = math.nan, math.nan
    read_key, read_value, _ = read_back(quant, key, value)
    in_key, in_value = torch.zeros_like(key, dtype=torch.bool), torch.zeros_like(value, dtype=torch.bool)
    in_key[0, slice(8) if quant.key_group == 8 else slice(None), 3], in_value[1, 2, 8:16] = True, True
    for read, clean, is_nan in ((read_key, clean_key, in_key), (read_value, clean_value, in_value)):
        assert torch.equal(read.isnan(), is_nan)
        assert torch.equal(read[~is_nan], clean[~is_nan])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_packed_along_the_channels(bits: int) -> None:
    """Channel `d` and those at `d` plus a whole number of byte rows share a byte, the first in its lowest bits."""
    largest = 2**bits - 1
    codes = torch.randint(0, 2**bits, (HEADS, BLOCK_SIZE, DIMS[0]), generator=torch.Generator().manual_seed(0))
    codes[:, 0], codes[:, 1] = 0, largest  # so that a step is 1 and the lowest number 0
    value = torch.zeros(HEADS, BLOCK_SIZE, DIMS[1])
    _, _, blocks = read_back(KVQuant("int4", key_bits=bits), codes.float(), value)
    num_bytes = DIMS[0] * bits // 8
    assert blocks.key.shape[-1] == num_bytes
    for channel in range(DIMS[0]):
        position, byte = divmod(channel, num_bytes)
        stored = blocks.key[:, ID, :, byte] >> bits * position & largest
        assert torch.equal(stored.long(), codes[..., channel])


@schemes
def test_other_blocks_are_not_touched(quant: KVQuant) -> None:
    blocks = new_blocks(quant)
    before = bits_of(blocks)
    key, value = (torch.randn(HEADS, 2, BLOCK_SIZE, dim) for dim in DIMS)
    blocks.quantize(key, value, torch.tensor([5, 2]))
    untouched = [0, 1, 3, 4]
    for plane, old in zip(bits_of(blocks), before, strict=True):
        assert torch.equal(plane[:, untouched], old[:, untouched])
    alone = read_back(quant, key[:, 1], value[:, 1])
    for part, expected in zip(("key", "value"), alone, strict=False):
        assert torch.equal(
            blocks.read_blocks(part, torch.tensor([2, 5, 2]))[:, [0, 2]], expected[:, None].expand(-1, 2, -1, -1)
        )


@schemes
def test_quantized_from_exact_blocks_or_quantized_at_once_the_codes_are_the_same(quant: KVQuant) -> None:
    key, value = (torch.randn(HEADS, 3, BLOCK_SIZE, dim, generator=torch.Generator().manual_seed(3)) for dim in DIMS)
    at_once = new_blocks(quant)
    at_once.quantize(key, value, torch.tensor([1, 2, 3]))
    one_by_one = MixedBlocks(new_blocks(quant), poisoned_blocks(5, HEADS, BLOCK_SIZE, DIMS, torch.float32, math.nan))
    for plane, states in zip(one_by_one.exact.planes, (key, value), strict=True):
        plane[:, [4, 1, 3]] = states
    quantize_blocks([one_by_one], [(3, 3)])
    quantize_blocks([one_by_one], [(4, 1), (1, 2)])
    for plane, other in zip(bits_of(at_once), bits_of(one_by_one.quantized), strict=True):
        assert torch.equal(plane, other)


@schemes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantized_blocks_hold_what_the_codes_say(quant: KVQuant, dtype: torch.dtype) -> None:
    blocks = MixedBlocks(new_blocks(quant, dtype), poisoned_blocks(4, HEADS, BLOCK_SIZE, DIMS, dtype, math.nan))
    key, value = hard_states("outlier channels", dtype)
    blocks.quantized.quantize(key[:, None], value[:, None], torch.tensor([ID]))
    dequantize_blocks([blocks], [(ID, 3), (ID, 1)])
    for part, plane in zip(("key", "value"), blocks.exact.planes, strict=True):
        codes_say = blocks.read_blocks(part, torch.tensor([ID]))[:, 0]
        assert torch.equal(plane[:, 3], codes_say)
        assert torch.equal(plane[:, 1], codes_say)
        assert bool(plane[:, [0, 2]].isnan().all())


@schemes
def test_copied_blocks_are_the_same_bit_for_bit(quant: KVQuant) -> None:
    blocks = new_blocks(quant)
    key, value = hard_states("random", torch.float32)
    blocks.quantize(key[:, None], value[:, None], torch.tensor([ID]))
    copy_blocks([blocks], [(ID, 1)])
    for plane in blocks.planes:
        assert torch.equal(plane[:, 1], plane[:, ID])


@schemes
def test_codes_do_not_depend_on_how_many_blocks_are_quantized_together(quant: KVQuant) -> None:
    key, value = (torch.randn(HEADS, 5, 64, dim, generator=torch.Generator().manual_seed(9)) for dim in DIMS)
    together, apart = new_blocks(quant, block_size=64), new_blocks(quant, block_size=64)
    together.quantize(key, value, torch.arange(1, 6))
    for number in (3, 0, 4, 1, 2):
        apart.quantize(key[:, number : number + 1], value[:, number : number + 1], torch.tensor([number + 1]))
    for plane, other in zip(bits_of(together), bits_of(apart), strict=True):
        assert torch.equal(plane[:, 1:], other[:, 1:])
