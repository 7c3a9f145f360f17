"""Strips of keys or values as float32: read where they lie if they are, else decoded into memory of the thread."""

from collections.abc import Callable

import numpy as np
from numba import carray, njit

from hf_paged_kernels.numba.compiled import FLAGS
from hf_paged_kernels.numba.machine import LANES, fetch_ahead, float_of_bits, float_of_half, pointer
from hf_paged_kernels.numba.vectors import (
    float_of_bfloats,
    float_of_e4m3s,
    float_of_halves,
    float_of_int8s,
    make_unpack,
    make_widen,
)

TILE = 64
"""Tokens whose scores are made into weights at a time, at most."""

STRIP = 16
"""Tokens of a tile that are read at a time, at most. Whole vectors of scores."""

WIDE = 4
"""Vectors of a token that are decoded at a time, of those there are."""

pairs_by_channel, ones_by_channel = (make_unpack(by_channel=True, num_vectors=count) for count in (2, 1))
pairs_by_token, ones_by_token = (make_unpack(by_channel=False, num_vectors=count) for count in (2, 1))


@njit(**FLAGS)
def floats(address, count):
    return carray(pointer(address), (count,), np.float32)


@njit(**FLAGS)
def locate(call, part, row, kv_head, token, is_fresh, past):
    """Where a token of a row is.

    Args:
        call: record, see `CALL`.
        part: what the record says about keys or about values.
        is_fresh: whether it is one of the new ones that are not in blocks.
        past: tokens of the row before its new ones.

    Returns:
        Its address, the bytes from there to the next token, its slot among codes, -1 for an exact one, how many tokens
        from it on are in its block, 0 for a fresh one, and the address of the offset of its block, 0 for none.
    """
    if is_fresh:
        index = row * part.fresh_batch + kv_head * part.fresh_head + (token - past) * part.fresh_token
        stride = part.fresh_token * bytes_of(part.dtype)
        return part.fresh + index * bytes_of(part.dtype), stride, np.int64(-1), np.int64(0), np.int64(0)
    size = call.block_size
    block, offset = token // size, token % size
    place = row * call.max_blocks + block
    num_exact, exact_block = call.num_blocks, np.int64(-1)
    if call.exact_table != 0:
        num_exact = call.num_exact_blocks
        exact_block = np.int64(carray(pointer(call.exact_table), (place + 1,), np.int32)[place])
    block_id = np.int64(carray(pointer(call.table), (place + 1,), np.int32)[place])
    if part.codes == 0 or exact_block >= 0:
        exact_block = exact_block if exact_block >= 0 else block_id
        stride = part.dim * bytes_of(part.dtype)
        slot = (kv_head * num_exact + exact_block) * size + offset
        return part.exact + slot * stride, stride, np.int64(-1), size - offset, np.int64(0)
    stride = part.dim if part.zero == 0 else part.dim * part.bits // 8
    head_block = kv_head * call.num_blocks + block_id
    slot = head_block * size + offset
    added = part.offset + head_block * part.dim * 2 if part.offset != 0 else np.int64(0)
    return part.codes + slot * stride, stride, slot, size - offset, added


@njit(**FLAGS)
def fetch_strip(place, start, count):
    """Asks for `count` tokens from the `start`-th on at a place, as `locate` gives it, if they are in its block."""
    address, stride, _, in_block, added = place
    fetch_ahead(address + start * stride, min(count, in_block - start) * stride)
    if start == 0 and added != 0:
        fetch_ahead(added, 2 * stride)  # a code is a byte


@njit(**FLAGS)
def strip_of(call, part, is_key, place, start, count, room, codes):
    """The `count` tokens from the `start`-th on at a place, as `locate` gives it, all in one block or all fresh.

    Args:
        call: record, see `CALL`.
        part: what the record says about keys or about values.
        room: address of memory for `STRIP * width` floats.
        codes: `None` leaves out of the machine code what reads codes.

    Returns:
        Address of float32 `[count, >= width]`, and the floats from token to token. `LANES` tokens at a time may be
        read, though those from `count` on mean nothing.
    """
    dim, width = part.dim, part.width
    address, stride, slot, in_block, added = place
    address, slot = address + start * stride, slot + start if slot >= 0 else slot
    if slot < 0:
        if part.dtype == 0 and dim == width and start + -(-count // LANES) * LANES <= in_block:
            return address, dim
        copy_rows(address, part.dtype, stride, room, dim, width, count)
    elif codes is None:
        return room, width
    elif part.zero == 0:
        decode_scaled(address, part.scale + slot * 2, added, part.bits, room, dim, width, count)
    elif is_key:
        size, offset = call.block_size, call.block_size - in_block + start
        groups = slot // size * (size // part.group) * dim * 2
        decode_keys(address, part.scale + groups, part.zero + groups, part.bits, part.group, offset, room, dim, width,
                    count)  # fmt: skip
    else:
        groups = slot * (dim // part.group) * 2
        decode_values(address, part.scale + groups, part.zero + groups, part.bits, part.group, room, dim, width, count)
    return room, width


@njit(**FLAGS)
def bytes_of(dtype):
    return np.int64(4) if dtype == 0 else np.int64(2)


def _make_rows(read: Callable, item_bytes: int, scale_unit: float | None = None, has_offsets: bool = False) -> Callable:
    """Makes `rows(source, stride, scales, offsets, dim, count, out, out_stride)`, as `make_widen` does for whole
    vectors.

    `dim` is any number from `LANES` on.
    """
    widen_many, widen_one = (make_widen(read, num_vectors, scale_unit, has_offsets) for num_vectors in (WIDE, 1))

    @njit(**FLAGS)
    def rows(source, stride, scales, offsets, dim, count, out, out_stride):
        channel = np.int64(0)
        while channel < dim:
            if channel + WIDE * LANES <= dim:
                codes, added, target = source + channel * item_bytes, offsets + channel * 2, out + channel * 4
                widen_many(codes, stride, scales, added, count, target, out_stride)
                channel += WIDE * LANES
            else:
                # The last vector may begin among numbers that the one before it has had.
                place = min(channel, dim - LANES)
                codes, added, target = source + place * item_bytes, offsets + place * 2, out + place * 4
                widen_one(codes, stride, scales, added, count, target, out_stride)
                channel += LANES

    return rows


rows_of_bfloats, rows_of_halves = _make_rows(float_of_bfloats, 2), _make_rows(float_of_halves, 2)
rows_of_int8s, rows_of_e4m3s = _make_rows(float_of_int8s, 1, 1.0), _make_rows(float_of_e4m3s, 1, 256.0)
int8s_with_offsets, e4m3s_with_offsets = (
    _make_rows(read, 1, unit, has_offsets=True) for read, unit in ((float_of_int8s, 1.0), (float_of_e4m3s, 256.0))
)


@njit(**FLAGS)
def copy_rows(source, dtype, stride, target, dim, width, count):
    """Rows of floating-point numbers, `stride` bytes apart, as float32."""
    nothing = np.int64(0)
    if dtype == 0 or dim < LANES:
        for token in range(count):
            copy_numbers(source + token * stride, dtype, target + token * width * 4, dim)
    elif dtype == 1:
        rows_of_bfloats(source, stride, nothing, nothing, dim, count, target, width)
    else:
        rows_of_halves(source, stride, nothing, nothing, dim, count, target, width)
    clear(target, dim, width, count)


@njit(**FLAGS)
def copy_numbers(source, dtype, target, dim):
    """`dim` numbers, one by one."""
    out = floats(target, dim)
    if dtype == 0:
        states = floats(source, dim)
        for i in range(dim):
            out[i] = states[i]
    else:
        bits = carray(pointer(source), (dim,), np.uint16)
        for i in range(dim):
            out[i] = float_of_bits(np.int32(bits[i]) << np.int32(16)) if dtype == 1 else float_of_half(bits[i])


@njit(**FLAGS)
def float_of_e4m3(code):
    """What a byte stands for as 8-bit floating point."""
    magnitude = np.int32(code) & np.int32(0x7F)
    # Exponent and mantissa in float32's place, with its bias; below the smallest exponent there is only mantissa.
    normal = float_of_bits((magnitude << np.int32(20)) + np.int32(120 << 23))
    number = normal if magnitude >= 8 else np.float32(magnitude) * np.float32(2.0**-9)
    return -number if code & 0x80 else number


@njit(**FLAGS)
def decode_scaled(codes, scales, offsets, bits, target, dim, width, count):
    """8-bit codes with a scale for each token, and an offset for each channel unless the address of those is 0 or the
    scale has its sign bit set, see `hf_paged_kernels.formats.scaled`."""
    if dim < LANES:
        for token in range(count):
            decode_codes(codes + token * dim, scales + token * 2, offsets, bits, target + token * width * 4, dim)
    elif bits == 8 and offsets != 0:
        int8s_with_offsets(codes, dim, scales, offsets, dim, count, target, width)
    elif bits == 8:
        rows_of_int8s(codes, dim, scales, offsets, dim, count, target, width)
    elif offsets != 0:
        e4m3s_with_offsets(codes, dim, scales, offsets, dim, count, target, width)
    else:
        rows_of_e4m3s(codes, dim, scales, offsets, dim, count, target, width)
    clear(target, dim, width, count)


@njit(**FLAGS)
def decode_codes(codes, scale, offsets, bits, target, dim):
    """The `dim` codes of a token, one by one."""
    bits_of_scale = np.int32(carray(pointer(scale), (1,), np.uint16)[0])
    is_plain = bits_of_scale >= 0x8000
    wide = float_of_bits((bits_of_scale & np.int32(0x7FFF)) << np.int32(16))
    patterns, out = carray(pointer(codes), (dim,), np.uint8), floats(target, dim)
    for i in range(dim):
        out[i] = (np.float32(np.int8(patterns[i])) if bits == 8 else float_of_e4m3(patterns[i])) * wide
    if offsets != 0 and not is_plain:
        for i in range(dim):
            out[i] += bfloat_at(offsets, i)


@njit(**FLAGS)
def decode_keys(codes, scales, zeros, bits, group, offset, target, dim, width, count):
    """Codes with scale and zero for each channel of a group of tokens, see `hf_paged_kernels.formats.grouped`.

    Args:
        offset: place of the first token in its block.
    """
    run = dim * bits // 8
    first = np.int64(0)
    while first < count:
        place = (offset + first) // group
        tokens = min((place + 1) * group - offset, count) - first
        packed, out = codes + first * run, target + first * width * 4
        for channel in range(0, dim, run):
            shift, of_channel = channel // run * bits, (place * dim + channel) * 2
            scale, zero = scales + of_channel, zeros + of_channel
            unpack_run(True, packed, run, shift, bits, scale, zero, 1, run, tokens, out + channel * 4, width)
        first += tokens
    clear(target, dim, width, count)


@njit(**FLAGS)
def decode_values(codes, scales, zeros, bits, group, target, dim, width, count):
    """Codes with scale and zero for each token and group of channels, see `hf_paged_kernels.formats.grouped`."""
    run = dim * bits // 8
    # Channels that share a group and lie in neighbouring bytes.
    step, other = group, run
    while other:
        step, other = other, step % other
    num_groups = dim // group
    for channel in range(0, dim, step):
        packed, shift, place = codes + channel % run, channel // run * bits, channel // group * 2
        scale, zero, out = scales + place, zeros + place, target + channel * 4
        unpack_run(False, packed, run, shift, bits, scale, zero, num_groups, step, count, out, width)
    clear(target, dim, width, count)


@njit(**FLAGS)
def unpack_run(by_channel, packed, packed_stride, shift, bits, scale, zero, scale_stride, size, count, out, out_stride):
    """Decodes `size` channels of `count` tokens, see `make_unpack`."""
    first_bit, largest = np.int32(shift), np.int32((1 << bits) - 1)
    channel = np.int64(0)
    while channel + LANES <= size:
        codes, target = packed + channel, out + channel * 4
        is_pair = channel + 2 * LANES <= size
        if by_channel:
            scales, zeros = scale + channel * 2, zero + channel * 2
            if is_pair:
                pairs_by_channel(codes, packed_stride, first_bit, largest, scales, zeros, 1, count, target, out_stride)
            else:
                ones_by_channel(codes, packed_stride, first_bit, largest, scales, zeros, 1, count, target, out_stride)
        elif is_pair:
            pairs_by_token(codes, packed_stride, first_bit, largest, scale, zero, scale_stride, count, target,
                           out_stride)  # fmt: skip
        else:
            ones_by_token(codes, packed_stride, first_bit, largest, scale, zero, scale_stride, count, target,
                          out_stride)  # fmt: skip
        channel += 2 * LANES if is_pair else LANES
    if channel < size:
        for token in range(count):
            codes = carray(pointer(packed + token * packed_stride), (size,), np.uint8)
            states = floats(out + token * out_stride * 4, size)
            for i in range(channel, size):
                place = i if by_channel else token * scale_stride
                code = np.float32(np.int32(codes[i]) >> first_bit & largest)
                states[i] = (code + half_at(zero, place)) * bfloat_at(scale, place)


@njit(**FLAGS)
def half_at(address, index):
    """The float16 `index` from an address on, as float32."""
    return float_of_half(carray(pointer(address), (index + 1,), np.uint16)[index])


@njit(**FLAGS)
def bfloat_at(address, index):
    """The bfloat16 `index` from an address on, as float32."""
    bits = carray(pointer(address), (index + 1,), np.uint16)[index]
    return float_of_bits(np.int32(bits) << np.int32(16))


@njit(**FLAGS)
def clear(rows, dim, width, count):
    """Puts 0 behind the `dim` numbers of each row."""
    for token in range(count):
        row = floats(rows + token * width * 4, width)
        for i in range(dim, width):
            row[i] = np.float32(0)
