"""Stores the keys and values of new tokens in their slots, and quantizes them on the way: one call a layer."""

from array import array
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import torch
from numba import carray, njit

from hf_paged_kernels.formats import scaled
from hf_paged_kernels.formats.blocks import Blocks, KVBlocks
from hf_paged_kernels.formats.grouped import MixedBlocks
from hf_paged_kernels.formats.scaled import ScaledBlocks
from hf_paged_kernels.modes import ordinary_tensors
from hf_paged_kernels.numba import threads
from hf_paged_kernels.numba.call import DTYPES
from hf_paged_kernels.numba.checks import check_new
from hf_paged_kernels.numba.compiled import EXACT_FLAGS, Kernel
from hf_paged_kernels.numba.machine import bits_of_float, float_of_bits, pointer, take_number
from hf_paged_kernels.numba.operands import address_of, operand
from hf_paged_kernels.numba.tiles import bfloat_at, bytes_of, copy_rows, float_of_e4m3, floats
from hf_paged_kernels.numba.workspace import Workspaces
from hf_paged_kernels.step import StepMetadata
from hf_paged_kernels.torch.write import quantize_new_blocks

TOKENS = 64
"""That a thread takes at a time."""
MAX_DIM = 1024
"""Channels of what is quantized, at most."""
# Multiplications and the like below which other threads cost more than they do.
WORTH_THREADS = 1 << 16

_PART = (
    "source",  # [batch, num_kv_heads, query_length, dim] in a dtype of `DTYPES`
    "batch_stride",
    "head_stride",
    "token_stride",
    "dtype",
    "dim",
    "target",  # numbers in that dtype, or 8-bit codes [num_kv_heads, num_slots, dim]
    "scale",  # bfloat16 [num_kv_heads, num_slots] of codes; 0 for none
    "offset",  # bfloat16 [num_kv_heads, num_blocks, dim] of codes; 0 for none
)
_PART_TYPE = np.dtype([(name, np.int64) for name in _PART])
_CALL = (
    "next_item",
    "next_scratch",
    "scratch",  # SCRATCH_BYTES for each thread
)
_STEP = (
    "slots",  # int32 [batch, query_length], -1 for tokens that are not stored
    "batch",
    "query_length",
)
_LAYER = (
    "num_kv_heads",
    "num_slots",
    "block_size",
    "bits",  # of codes; 0: e4m3
    "factors",  # float32 [num_factors]: what e4m3 tries the smallest scale times of
    "num_factors",
)
WRITE_CALL = np.dtype(
    [(name, np.int64) for name in (*_CALL, *_STEP, *_LAYER)] + [("key", _PART_TYPE), ("value", _PART_TYPE)], align=True
)
NEXT_ITEM, NEXT_SCRATCH = (WRITE_CALL.fields[name][1] for name in ("next_item", "next_scratch"))
SCRATCH_BYTES = 9 * MAX_DIM  # a token and an offset as float32, and codes
LARGEST_STATE = np.float32(scaled.LARGEST_STATE)
OUTLIER_FACTOR = np.float32(scaled.OUTLIER_FACTOR)
MEDIAN_SHIFT = np.int32(scaled.MEDIAN_SHIFT)
MEDIAN_BITS = 31 - scaled.MEDIAN_SHIFT
LARGEST_OFFSET_EXPONENT = np.int32(scaled.LARGEST_OFFSET_EXPONENT)
with ordinary_tensors():
    _FACTORS = scaled.scale_factors(torch.device("cpu"))
_DTYPE_PAIRS = frozenset(product(DTYPES, repeat=2))


@njit(**EXACT_FLAGS)
def store_tokens(call, part, row, kv_head, first, last, numbers, offsets, best, codes):
    """Stores the new tokens `first .. last - 1` of a row.

    Args:
        numbers, offsets, best: memory for a token, for an offset, and for codes.
        codes: `None` leaves out of the machine code what makes codes.
    """
    current_block = np.int64(-1)  # whose offset is in `offsets`
    has_offset = False
    slots = carray(pointer(call.slots), (call.batch * call.query_length,), np.int32)
    for token in range(first, last):
        slot = np.int64(slots[row * call.query_length + token])
        if slot < 0:
            continue
        offset = row * part.batch_stride + kv_head * part.head_stride + token * part.token_stride
        place = kv_head * call.num_slots + slot
        if part.scale == 0:
            copy_bits(part.source, offset, part.target, place * part.dim, part.dim, part.dtype)
            continue
        if codes is None:
            continue
        size = bytes_of(part.dtype)
        copy_rows(part.source + offset * size, part.dtype, part.dim * size, numbers, part.dim, part.dim, 1)
        sign = np.uint16(0)
        if part.offset != 0:
            block = slot // call.block_size
            if block != current_block:
                has_offset = load_offset(call, part, row, kv_head, token, slot, offsets)
                current_block = block
            if has_offset:
                sign = take_offset(numbers, offsets, part.dim)
        codes_of_token = part.target + place * part.dim
        scales = carray(pointer(part.scale), (place + 1,), np.uint16)
        scale = quantize(numbers, codes_of_token, best, part.dim, call.bits, call.factors, call.num_factors)
        scales[place] = scale | sign


@njit(**EXACT_FLAGS)
def take_offset(numbers, offsets, dim):
    """Subtracts an offset from the numbers of a token unless that makes the largest magnitude larger, and returns the
    sign bit of the token's scale, as `hf_paged_kernels.formats.scaled.without_offset`."""
    states, added = floats(numbers, dim), floats(offsets, dim)
    # As bits magnitudes have the order of the numbers, and NaN is the largest.
    largest = largest_shifted = np.int32(0)
    for i in range(dim):
        largest = max(largest, bits_of_float(states[i]) & np.int32(0x7FFFFFFF))
        largest_shifted = max(largest_shifted, bits_of_float(states[i] - added[i]) & np.int32(0x7FFFFFFF))
    if float_of_bits(largest) < float_of_bits(largest_shifted):
        return np.uint16(0x8000)
    for i in range(dim):
        states[i] -= added[i]
    return np.uint16(0)


@njit(**EXACT_FLAGS)
def load_offset(call, part, row, kv_head, token, slot, offsets):
    """Puts the offset of the block that a new token belongs in at `offsets`, float32, and into the block if the token
    is its first.

    Where the first token of the block is also new, the offset is made from it: its thread may not have stored it yet.

    Returns:
        Whether the offset is more than zeros.
    """
    dim, block, in_block = part.dim, slot // call.block_size, slot % call.block_size
    added = floats(offsets, dim)
    stored = part.offset + (kv_head * (call.num_slots // call.block_size) + block) * dim * 2
    first_token = token - in_block
    if first_token < 0:
        for i in range(dim):
            added[i] = bfloat_at(stored, i)
        return has_numbers(added, dim)
    place = row * part.batch_stride + kv_head * part.head_stride + first_token * part.token_stride
    size = bytes_of(part.dtype)
    copy_rows(part.source + place * size, part.dtype, dim * size, offsets, dim, dim, 1)
    keep_outlying(added, dim)
    if in_block == 0:
        bits = carray(pointer(stored), (dim,), np.uint16)
        for i in range(dim):
            bits[i] = np.uint16(bits_of_float(added[i]) >> np.int32(16))
    return has_numbers(added, dim)


@njit(**EXACT_FLAGS)
def has_numbers(states, dim):
    """Whether some of the numbers are not zero."""
    found = False
    for i in range(dim):
        found |= states[i] != 0
    return found


@njit(**EXACT_FLAGS)
def keep_outlying(states, dim):
    """Replaces the numbers of a token by what `hf_paged_kernels.formats.scaled.outlying` keeps of them."""
    # The median, bit by bit: as many as come before it in their order are smaller.
    median = np.int32(0)
    for bit in range(MEDIAN_BITS - 1, -1, -1):
        candidate = median | np.int32(1 << bit)
        smaller = 0
        for i in range(dim):
            smaller += (bits_of_float(states[i]) & np.int32(0x7FFFFFFF)) >> MEDIAN_SHIFT < candidate
        if smaller <= (dim - 1) // 2:
            median = candidate
    threshold = OUTLIER_FACTOR * float_of_bits(median << MEDIAN_SHIFT)
    for i in range(dim):
        bits = bits_of_float(states[i])
        exponent = bits >> np.int32(23) & np.int32(0xFF)
        stands_out = abs(states[i]) >= threshold and exponent < LARGEST_OFFSET_EXPONENT
        rounded = (bits + np.int32(0x8000)) & np.int32(-0x10000)
        states[i] = float_of_bits(rounded) if stands_out else np.float32(0)


@njit(**EXACT_FLAGS)
def copy_bits(source, source_offset, target, target_offset, dim, dtype):
    if dtype == 0:
        old = carray(pointer(source + source_offset * 4), (dim,), np.uint32)
        new = carray(pointer(target + target_offset * 4), (dim,), np.uint32)
        for i in range(dim):
            new[i] = old[i]
    else:
        old_half = carray(pointer(source + source_offset * 2), (dim,), np.uint16)
        new_half = carray(pointer(target + target_offset * 2), (dim,), np.uint16)
        for i in range(dim):
            new_half[i] = old_half[i]


@njit(**EXACT_FLAGS)
def quantize(numbers, codes, best, dim, bits, factors, num_factors):
    """Writes the codes of a token and returns the bits of its scale.

    As `formats.scaled.quantized`, bit for bit. Of two scales of fp8 whose errors differ by rounding only, another may
    win.
    """
    states = floats(numbers, dim)
    largest = np.float32(0)
    has_nan = False
    for i in range(dim):
        states[i] = in_range(states[i], LARGEST_STATE) if states[i] == states[i] else states[i]
        largest = max(largest, abs(states[i]))
        has_nan |= states[i] != states[i]
    if has_nan:
        largest = np.float32(np.nan)
    out = carray(pointer(codes), (dim,), np.uint8)
    if bits == 8:
        scale = rounded_scale(largest / np.float32(127))
        wide = float_of_scale(scale)
        for i in range(dim):
            out[i] = np.uint8(np.int32(np.rint(in_range(states[i] / wide, np.float32(127)))))
        return scale
    smallest = largest / np.float32(448)
    scale = e4m3_codes(states, smallest, out, dim)
    error = squared_error(states, out, scale, dim)
    tried = carray(pointer(best), (dim,), np.uint8)
    steps = floats(factors, num_factors)
    for step in range(1, num_factors):
        other = e4m3_codes(states, smallest * steps[step], tried, dim)
        other_error = squared_error(states, tried, other, dim)
        if other_error < error:
            error, scale = other_error, other
            for i in range(dim):
                out[i] = tried[i]
    return scale


@njit(**EXACT_FLAGS)
def rounded_scale(scale):
    """The bits of the bfloat16 nearest to a float32 that is not negative, of two equally near ones the even."""
    bits = bits_of_float(scale)
    odd = bits >> np.int32(16) & np.int32(1)
    return np.uint16((bits + np.int32(0x7FFF) + odd) >> np.int32(16) if scale == scale else np.int32(0x7FC0))


@njit(**EXACT_FLAGS)
def float_of_scale(bits):
    return float_of_bits(np.int32(bits) << np.int32(16))


@njit(**EXACT_FLAGS)
def in_range(number, largest):
    """The number in `-largest .. largest`, 0 for NaN."""
    return max(min(number, largest), -largest) if number == number else np.float32(0)


@njit(**EXACT_FLAGS)
def e4m3_codes(states, scale, out, dim):
    """The nearest codes, of two equally near ones the even, under a rounded scale, whose bits are returned."""
    rounded = rounded_scale(scale)
    wide = float_of_scale(rounded)
    for i in range(dim):
        number = in_range(states[i] / wide, np.float32(448))
        bits = bits_of_float(number)
        magnitude = bits & np.int32(0x7FFFFFFF)
        # The exponent with e4m3's bias, and 3 bits of mantissa.
        odd = magnitude >> np.int32(20) & np.int32(1)
        normal = ((magnitude + np.int32(0x7FFFF) + odd) >> np.int32(20)) - np.int32(120 << 3)
        subnormal = np.int32(np.rint(abs(number) * np.float32(2.0**9)))
        code = subnormal if abs(number) < np.float32(2.0**-6) else normal
        out[i] = np.uint8(code | (bits >> np.int32(24) & np.int32(0x80)))
    return rounded


@njit(**EXACT_FLAGS)
def squared_error(states, codes, scale, dim):
    wide = float_of_scale(scale)
    total = np.float32(0)
    for i in range(dim):
        error = float_of_e4m3(codes[i]) * wide - states[i]
        total += error * error
    return total


@njit(**EXACT_FLAGS)
def take_tokens(address, codes):
    """Stores tokens of a call, given by the address of its record, until there are none left.

    `codes`: as in `store_tokens`.
    """
    call = carray(pointer(address), (1,), WRITE_CALL)[0]
    numbers = call.scratch + take_number(address + NEXT_SCRATCH) * SCRATCH_BYTES
    offsets, best = numbers + 4 * MAX_DIM, numbers + 8 * MAX_DIM
    chunks = -(-call.query_length // TOKENS)
    while True:
        item = take_number(address + NEXT_ITEM)
        if item >= call.batch * call.num_kv_heads * chunks:
            return
        chunk, head = item % chunks, item // chunks
        row, kv_head = head // call.num_kv_heads, head % call.num_kv_heads
        first, last = chunk * TOKENS, min((chunk + 1) * TOKENS, call.query_length)
        store_tokens(call, call.key, row, kv_head, first, last, numbers, offsets, best, codes)
        store_tokens(call, call.value, row, kv_head, first, last, numbers, offsets, best, codes)


def _make(version: int, codes: int | None) -> Callable[[int], None]:
    def work(address):
        if version >= 0:
            take_tokens(address, codes)

    return work


store_exact = Kernel("storing tokens exactly", 2, partial(_make, codes=None))
store_codes = Kernel("storing tokens as 8-bit codes", 3, partial(_make, codes=1))
"""`take_tokens` for callers that are not Python."""


def can_write(blocks: Blocks, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel stores keys and values like these in such blocks."""
    return (key.dtype, value.dtype) in blocks.memo(can_write, lambda: _writable_dtypes(blocks))


def write_kv(blocks: Blocks, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
    """As `hf_paged_kernels.write_kv`."""
    if isinstance(blocks, MixedBlocks):
        write_kv(blocks.exact, key, value, step.exact)
        # Once in the life of a block, so that plain PyTorch does.
        quantize_new_blocks(blocks, key, value, step)
        return
    check_new(key, value, blocks, step)
    num_threads = torch.get_num_threads()
    _slots, step_fields, workspaces = step.memo((write_kv, num_threads), lambda: _prepare(step, num_threads))
    layer_fields = blocks.memo(write_kv, lambda: _layer_fields(blocks))
    key, key_fields = operand(key)
    value, value_fields = operand(value)
    scratch = key_scale = value_scale = key_offset = None
    if isinstance(blocks, ScaledBlocks):
        scratch, key_scale, value_scale = workspaces.take(), blocks.key_scale, blocks.value_scale
        key_offset = blocks.key_offset
    record = array(
        "q",
        (
            *(0, 0),
            address_of(scratch),
            *step_fields,
            *layer_fields,
            *key_fields,
            DTYPES[key.dtype],
            key.shape[3],
            blocks.key.data_ptr(),
            address_of(key_scale),
            address_of(key_offset),
            *value_fields,
            DTYPES[value.dtype],
            value.shape[3],
            blocks.value.data_ptr(),
            address_of(value_scale),
            0,
        ),
    )
    work_size = key.numel() + value.numel()
    if scratch is not None and blocks.code_dtype != torch.int8:
        work_size *= 2 * scaled.FP8_SCALES
    kernel = store_exact if scratch is None else store_codes
    threads.run(kernel.address, record.buffer_info()[0], num_threads if work_size > WORTH_THREADS else 1)
    if scratch is not None:
        workspaces.give_back(scratch)


def _writable_dtypes(blocks: Blocks) -> frozenset[tuple[torch.dtype, torch.dtype]]:
    """Dtypes of keys and of values that the kernel stores in such blocks."""
    exact = blocks.exact if isinstance(blocks, MixedBlocks) else blocks
    if isinstance(exact, KVBlocks):
        pairs, kernel = frozenset({(exact.key.dtype, exact.value.dtype)} & _DTYPE_PAIRS), store_exact
    else:
        is_taken = isinstance(exact, ScaledBlocks) and max(exact.dims) <= MAX_DIM
        pairs, kernel = _DTYPE_PAIRS if is_taken else frozenset(), store_codes
    return pairs if pairs and kernel.problem is None else frozenset()


def _prepare(step: StepMetadata, num_threads: int) -> tuple[np.ndarray, tuple[int, ...], Workspaces[torch.Tensor]]:
    """What all layers have in common in a step: slots, the fields `_STEP` of the record, and memory for calls."""
    slots = np.ascontiguousarray(step.slots, dtype=np.int32)
    size = num_threads * SCRATCH_BYTES
    workspaces = Workspaces(lambda: torch.empty(size, dtype=torch.uint8, device="cpu"))
    return slots, (slots.ctypes.data, step.batch, step.query_length), workspaces


def _layer_fields(blocks: KVBlocks | ScaledBlocks) -> tuple[int, ...]:
    """The fields `_LAYER` of the record."""
    bits = 8 if not isinstance(blocks, ScaledBlocks) or blocks.code_dtype == torch.int8 else 0
    num_slots = blocks.num_blocks * blocks.block_size
    return blocks.num_kv_heads, num_slots, blocks.block_size, bits, _FACTORS.data_ptr(), len(_FACTORS)
