"""Numbers as the kernels for CPUs read them: every one, and any number of channels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")
tiles = pytest.importorskip("hf_paged_kernels.numba.tiles")
LANES = tiles.LANES

# Less than a vector, whole ones, and ones that the last of is not full.
DIMS = [1, LANES - 1, LANES, LANES + 1, tiles.WIDE * LANES, tiles.WIDE * LANES + 3, 2 * tiles.WIDE * LANES + LANES + 5]


def room_for(count: int, dim: int) -> tuple[torch.Tensor, int]:
    """Memory for `count` rows of `dim` in whole vectors, all NaN."""
    width = -(-dim // LANES) * LANES
    return torch.full((count, width), torch.nan), width


def assert_same_bits(rows: torch.Tensor, expected: torch.Tensor) -> None:
    """`expected` `[count, dim]` bit for bit, save which NaN it is, and nothing but 0 behind."""
    dim = expected.shape[1]
    torch.testing.assert_close(rows[:, :dim], expected, rtol=0, atol=0, equal_nan=True)
    assert (rows[:, :dim].signbit() == expected.signbit())[~expected.isnan()].all()
    assert (rows[:, dim:] == 0).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    ("dtype", "number"), [(torch.float32, 0), (torch.bfloat16, 1), (torch.float16, 2)], ids=lambda x: str(x)
)
def test_floating_point_numbers(dtype: torch.dtype, number: int, dim: int) -> None:
    """Every bfloat16 and float16 there is, from rows that are `dim + 2` apart."""
    patterns = torch.arange(2**16).to(torch.uint16)
    numbers = patterns.view(dtype) if dtype != torch.float32 else patterns.view(torch.bfloat16).float()
    count = len(numbers) // (dim + 2)
    states = numbers[: count * (dim + 2)].view(count, dim + 2)
    rows, width = room_for(count, dim)
    stride = (dim + 2) * dtype.itemsize
    tiles.copy_rows(states.data_ptr(), number, stride, rows.data_ptr(), dim, width, count)
    assert_same_bits(rows, states[:, :dim].float())


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_codes_with_a_scale_for_each_token(dtype: torch.dtype, dim: int, has_offsets: bool) -> None:
    """Every code, with scales of any magnitude."""
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    codes = codes[~codes.float().isnan()]  # none of which is ever written
    scales = torch.tensor([2**-60, 3 * 2**-24, 2**-14, 0.37, 2**90, 0.0, torch.nan]).bfloat16()
    count = len(scales) * -(-len(codes) // dim)
    states = codes.repeat(count * dim // len(codes) + 1)[: count * dim].view(count, dim)
    scales = scales.repeat_interleave(count // len(scales))
    if has_offsets:  # the sign bit says that there is no offset, of a scale of 0 too
        states, scales = states.repeat(2, 1), torch.cat([scales, -scales])
        count *= 2
    offsets = torch.linspace(-300, 5, dim).bfloat16()
    rows, width = room_for(count, dim)
    bits, added = 8 if dtype == torch.int8 else 0, offsets.data_ptr() if has_offsets else 0
    tiles.decode_scaled(states.data_ptr(), scales.data_ptr(), added, bits, rows.data_ptr(), dim, width, count)
    expected = states.float() * scales.float().abs()[:, None]
    if not has_offsets:
        assert_same_bits(rows, expected)
        return
    expected = torch.where(scales.signbit()[:, None], expected, expected + offsets.float())
    torch.testing.assert_close(rows[:, :dim], expected, rtol=2**-23, atol=1e-4, equal_nan=True)
    assert (rows[:, dim:] == 0).all()
