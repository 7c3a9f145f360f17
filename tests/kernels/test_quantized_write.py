"""Kernels quantize what they store bit for bit as plain PyTorch does."""

from __future__ import annotations

import math

import pytest
import torch
from hf_paged_kernels import ScaledBlocks, write_kv

from tests.kernels.definition import hard_inputs
from tests.kernels.device import on_device
from tests.kernels.torch.test_write import step_with
from tests.support.combinations import combined

BACKENDS = {"triton": "triton", "cpu": "numba"}
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:divide by zero:RuntimeWarning")
@combined(quick=1, code_dtype=CODES, dtype=DTYPES, dim=[16, 80])
@pytest.mark.parametrize("backend", BACKENDS)
def test_written_codes_are_the_same_bit_for_bit(
    backend: str, code_dtype: torch.dtype, dtype: torch.dtype, dim: int
) -> None:
    pytest.importorskip(BACKENDS[backend])
    generator = torch.Generator().manual_seed(0)
    tokens = [states.reshape(-1, dim) for states in hard_inputs((1, 24, dim), generator).values()]
    halves = torch.arange(-127.0, 128.0).repeat(2)[: 6 * dim].view(-1, dim) + 0.5
    strange = torch.randn(4, dim, generator=generator)
    strange[0, 3], strange[1, 5], strange[2, 0], strange[3] = math.nan, math.inf, -math.inf, -0.0
    states = torch.cat([*tokens, halves, halves / 64, strange]).to(dtype)
    count = len(states)
    key = states.view(1, 1, count, dim)
    slots = torch.randperm(count + 20, generator=generator)[:count]
    num_blocks = -(-(count + 20) // 16)
    step = step_with([slots.tolist()], 16)
    written = []
    for writer in ("reference", backend):
        planes = [torch.full((1, num_blocks, 16, dim), 90, dtype=torch.int8) for _ in range(2)]
        scales = [torch.full((1, num_blocks, 16), 5.0, dtype=torch.bfloat16) for _ in range(2)]
        blocks = ScaledBlocks(*planes, *scales, code_dtype, dtype)
        on_device(write_kv)(blocks, key, key.flip(2), step, backend=writer)
        written.append(blocks)
    for plane, expected in zip(written[1].planes, written[0].planes, strict=True):
        torch.testing.assert_close(plane, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:divide by zero:RuntimeWarning")
@combined(quick=1, code_dtype=CODES, dtype=DTYPES, dim=[4, 16, 80])
@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_are_the_same_bit_for_bit(backend: str, code_dtype: torch.dtype, dtype: torch.dtype, dim: int) -> None:
    """Rows that begin with padding, at the begin of a block and in the middle of one, in two passes: blocks whose first
    key is new, in the same pass and in one before."""
    pytest.importorskip(BACKENDS[backend])
    heads, num_blocks, lengths = 2, 40, (150, 3, 0)
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(3, heads, 150, dim, generator=generator)
    key[..., 1::7] += 100.0
    key[:, 1, ::32, 0], key[0, 0, 96, 2], key[0, 1, 112, 1] = 50.0, math.nan, math.inf
    key[0, :, 35:40] = 0.0  # whose scales are 0, with the sign bit of keys without the offset
    key[0, :, 49:64, 1::7] -= 100.0
    key[0, 0, 50, 0], key[0, 0, 51, 0] = math.nan, -math.inf
    key = key.to(dtype)
    tables = torch.randperm(num_blocks - 1, generator=generator)[:30].view(3, 10) + 1
    tokens = torch.arange(150)
    slots = torch.stack([table[tokens // 16] * 16 + tokens % 16 for table in tables])
    for row, length in enumerate(lengths):
        slots[row] = torch.cat([torch.full((150 - length,), -1), slots[row, :length]])
    written = []
    for writer in ("reference", backend):
        shape = (heads, num_blocks, 16)
        planes = [torch.full((*shape, dim), 90, dtype=torch.int8) for _ in range(2)]
        scales = [torch.full(shape, 5.0, dtype=torch.bfloat16) for _ in range(2)]
        offset = torch.full((heads, num_blocks, dim), math.nan, dtype=torch.bfloat16)
        blocks = ScaledBlocks(*planes, *scales, code_dtype, dtype, offset)
        for columns in (slice(0, 70), slice(70, 71), slice(71, 150)):
            states = key[:, :, columns]
            write_kv(blocks, states, states.flip(1), step_with(slots[:, columns].tolist(), 16), backend=writer)
        written.append(blocks)
    assert bool((written[0].key_offset == 100).any())
    signs = [blocks.key_scale.signbit() & ~blocks.key_scale.isnan() for blocks in written]
    assert torch.equal(*signs)
    assert bool((signs[0] & (written[0].key_scale == 0)).any())
    assert not bool(written[1].value_scale.signbit().any())
    for plane, expected in zip(written[1].planes, written[0].planes, strict=True):
        torch.testing.assert_close(plane, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("code_dtype", CODES.values(), ids=CODES)
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_a_first_key_that_alone_stands_out_costs_the_others_of_its_block_nothing(
    backend: str, code_dtype: torch.dtype
) -> None:
    """As an attention sink does: they are read as closely as without offsets, and so is the first key."""
    pytest.importorskip(BACKENDS.get(backend, "torch"))
    count, dim = 128, 64
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(1, 2, count, dim, generator=generator)
    key[:, :, ::64, 3] += 30.0
    step = step_with([list(range(64, 64 + count))], 64)
    errors = []
    for has_offset in (True, False):
        blocks = ScaledBlocks(
            *(torch.zeros(2, 3, 64, dim, dtype=torch.int8) for _ in range(2)),
            *(torch.zeros(2, 3, 64, dtype=torch.bfloat16) for _ in range(2)),
            code_dtype,
            torch.float32,
            torch.zeros(2, 3, dim, dtype=torch.bfloat16) if has_offset else None,
        )
        on_device(write_kv)(blocks, key, key, step, backend=backend)
        read = blocks.read_blocks("key", torch.tensor([1, 2])).view(2, count, dim)
        squares = (read - key[0]).square().view(2, 2, 64, dim)
        errors.append((squares[:, :, 1:].mean(), squares[:, :, 0].mean()))
    (others, first), (others_without, first_without) = errors
    assert others <= 1.01 * others_without
    assert first <= first_without
