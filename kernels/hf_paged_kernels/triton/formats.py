"""What stands in blocks, as kernels are told it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from hf_paged_kernels.formats.blocks import KVBlocks
from hf_paged_kernels.formats.grouped import MixedBlocks
from hf_paged_kernels.formats.scaled import ScaledBlocks
from hf_paged_kernels.step import StepMetadata, upload

# What the numbers that 8-bit codes stand for are divided by to be operands: products of weights, scales and this
# neither overflow nor vanish in float16.
SCALED = {torch.int8: ("int8", 64.0), torch.float8_e4m3fn: ("fp8", 256.0)}


@dataclass(frozen=True)
class Format:
    """The format of blocks.

    Attributes:
        key, value: their width, the power of two in it and the rest that kernels take it as, and the runs of channels
            that it consists of (see `codes`).
        constants: `("raw",)`, `("int8", unit, whether keys have offsets)`, `("fp8", ...)`, or `("grouped", bits of a
            key, bits of a value, tokens of a group of keys, channels of a group of values)`.
        dtype: of queries, and of new keys and values.
    """

    key: tuple[int, int, int, int]
    value: tuple[int, int, int, int]
    constants: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """The larger of key and value width."""
        return max(self.key[0], self.value[0])

    @property
    def bits(self) -> int:
        """Of an element, as the launch table has it."""
        if self.constants[0] == "raw" or self.dtype == torch.float32:
            return self.dtype.itemsize * 8
        return max(self.constants[1:3]) if self.is_grouped else 8

    @property
    def is_grouped(self) -> bool:
        return self.constants[0] == "grouped"

    @property
    def has_block_planes(self) -> bool:
        """Whether a tile has to lie inside a block, as something about its keys is said once for the block."""
        return self.is_grouped or (self.constants[0] in ("int8", "fp8") and self.constants[2])


def format_of(blocks: KVBlocks | ScaledBlocks | MixedBlocks) -> Format:
    dims = blocks.dims
    if isinstance(blocks, MixedBlocks):
        quantized = blocks.quantized
        key_group = quantized.block_size // quantized.key_scale.shape[2]
        value_group = dims[1] // quantized.value_scale.shape[3]
        return Format(
            _padded_runs(dims[0], 8 // quantized.key_bits),
            _padded_runs(dims[1], 8 // quantized.value_bits),
            ("grouped", quantized.key_bits, quantized.value_bits, key_group, value_group),
            quantized.dtype,
        )
    if isinstance(blocks, ScaledBlocks):
        constants = (*SCALED[blocks.code_dtype], blocks.key_offset is not None)
        return Format(*map(_parts, dims), constants, blocks.dtype)
    return Format(*map(_parts, dims), ("raw",), blocks.key.dtype)


@dataclass(frozen=True, eq=False)
class Planes:
    """The tensors of blocks, in the places that the attention kernel has for them.

    Attributes:
        key, value: by slot.
        codes: what there is besides; `None` for nothing.
        num_slots: of `key` and `value`.
        num_quantized_slots: of codes in groups.
    """

    key: torch.Tensor
    value: torch.Tensor
    codes: tuple[torch.Tensor, ...] | None
    num_slots: int
    num_quantized_slots: int


def planes_of(blocks: KVBlocks | ScaledBlocks | MixedBlocks) -> Planes:
    num_slots = blocks.num_blocks * blocks.block_size
    if isinstance(blocks, ScaledBlocks):
        key, value = blocks.key.view(torch.uint8), blocks.value.view(torch.uint8)
        return Planes(key, value, blocks.planes[2:], num_slots, 0)
    if isinstance(blocks, MixedBlocks):
        exact, (key, value, *scales) = blocks.exact, blocks.quantized.planes
        return Planes(
            exact.key,
            exact.value,
            (_words(key), _words(value), *scales),
            exact.num_blocks * exact.block_size,
            num_slots,
        )
    return Planes(blocks.key, blocks.value, None, num_slots, 0)


@dataclass(frozen=True, eq=False)
class Tables:
    """The part of a step that the attention kernel reads, on the device, all int32.

    Attributes:
        table: `[batch, max_blocks]`, of the blocks in the model's dtype or of 8-bit codes.
        seq_lens: `[batch]`
        quantized_table: `[batch, max_blocks]`, of codes in groups; `None` if there are none.
        quantized_ranges: `[batch, 2]`, the first token that a row reads as codes in groups, and the one after the last.
    """

    table: torch.Tensor
    seq_lens: torch.Tensor
    quantized_table: torch.Tensor | None = None
    quantized_ranges: torch.Tensor | None = None


def tables_of(step: StepMetadata, device: torch.device, *, is_grouped: bool) -> Tables:
    """The tables of a step, uploaded at most once."""
    if not is_grouped:
        on_device = step.on(device)
        return Tables(on_device.block_table, on_device.seq_lens)
    return step.memo(("tables of codes", device), lambda: _tables_of_codes(step, device))


def _tables_of_codes(step: StepMetadata, device: torch.device) -> Tables:
    exact_table, size = step.exact.block_table, step.block_size
    is_there = np.arange(exact_table.shape[1])[None] * size < step.seq_lens[:, None]
    # A row reads one run of blocks as codes; before and after it there are exact ones.
    is_quantized = (exact_table < 0) & (step.block_table > 0) & is_there
    first, last = is_quantized.argmax(1), is_quantized.shape[1] - is_quantized[:, ::-1].argmax(1)
    ranges = np.stack([first, np.where(is_quantized.any(1), last, first)], axis=1) * size
    if (np.diff(ranges)[:, 0] != is_quantized.sum(1) * size).any():
        raise ValueError("a row reads exact blocks between blocks of codes: kernels read one run of codes a row")
    arrays = (exact_table, step.seq_lens, step.block_table, ranges.astype(np.int32))
    return Tables(*upload(arrays, device))


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Bytes of codes in the widest words that a token is a whole number of."""
    word_bytes = largest_power_of_2(codes.shape[-1] | 4)
    return codes.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[word_bytes])


def largest_power_of_2(number: int) -> int:
    """The largest power of two that divides a number."""
    return number & -number


def _parts(dim: int) -> tuple[int, int, int, int]:
    """A width as the largest power of two in it, at least 16, and what is left, at least 16 if anything.

    A dot product needs 16 elements at least; what stands beyond the width is masked.
    """
    main = max(16, 1 << (dim.bit_length() - 1))
    rest = dim - main
    return (dim, main, 0, 1) if rest <= 0 else (dim, main, max(16, triton.next_power_of_2(rest)), 1)


def _padded_runs(dim: int, runs: int) -> tuple[int, int, int, int]:
    return dim, max(16, runs * triton.next_power_of_2(dim // runs)), 0, runs
