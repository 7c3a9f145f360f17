"""Tiles of keys or values as float32: read where they lie if they are, else decoded into memory of the thread."""

from collections.abc import Callable

import numpy as np
from numba import carray, njit

from hf_paged_kernels.cpu_kernels.compiled import FLAGS
from hf_paged_kernels.cpu_kernels.vectors import (
    LANES,
    float_of_bfloats,
    float_of_bits,
    float_of_e4m3s,
    float_of_half,
    float_of_halves,
    float_of_int8s,
    make_unpack,
    make_widen,
    pointer,
)

TILE = 64
"""Tokens that are attended to at a time, at most."""

WIDE = 4
"""Vectors of a token that are decoded at a time, of those there are."""

unpack_by_channel, unpack_by_token = make_unpack(by_channel=True), make_unpack(by_channel=False)


@njit(**FLAGS)
def floats(address, count):
    return carray(pointer(address), (count,), np.float32)


@njit(**FLAGS)
def locate(call, part, row, kv_head, token):
    """Where a token of a row is stored: its address, and its slot among codes, -1 for an exact one."""
    size = call.block_size
    block, offset = token // size, token % size
    place = row * call.max_blocks + block
    num_exact, hot_block = call.num_blocks, np.int64(-1)
    if call.hot_table != 0:
        num_exact = call.num_hot_blocks
        hot_block = np.int64(carray(pointer(call.hot_table), (place + 1,), np.int32)[place])
    block_id = np.int64(carray(pointer(call.table), (place + 1,), np.int32)[place])
    if part.codes == 0 or hot_block >= 0:
        exact_block = hot_block if hot_block >= 0 else block_id
        slot = (kv_head * num_exact + exact_block) * size + offset
        return part.exact + slot * part.dim * bytes_of(part.dtype), np.int64(-1)
    slot = (kv_head * call.num_blocks + block_id) * size + offset
    token_bytes = part.dim if part.zero == 0 else part.dim * part.bits // 8
    return part.codes + slot * token_bytes, slot


@njit(**FLAGS)
def tile_of(call, part, is_key, row, kv_head, first, count, is_fresh, past, room):
    """The tokens `first .. first + count - 1` of a row, which lie in one block or are all new.

    Args:
        call: record, see `CALL`.
        part: what the record says about keys or about values.
        past: tokens of the row before its new ones.
        room: address of memory for `part.scale_floats` floats and `TILE + LANES` times `width`.

    Returns:
        Address of float32 `[count, >= width]`, and the floats from token to token. `LANES` tokens at a time may be
        read, though those from `count` on mean nothing.
    """
    dim, width = part.dim, part.width
    target = room + part.scale_floats * 4
    if is_fresh:
        index = row * part.fresh_batch + kv_head * part.fresh_head + (first - past) * part.fresh_token
        address = part.fresh + index * bytes_of(part.dtype)
        copy_rows(address, part.dtype, part.fresh_token, target, dim, width, count)
        return target, width
    address, slot = locate(call, part, row, kv_head, first)
    size, offset = call.block_size, first % call.block_size
    if slot < 0:
        if part.dtype == 0 and dim == width and offset + -(-count // LANES) * LANES <= size:
            return address, dim
        copy_rows(address, part.dtype, dim, target, dim, width, count)
    elif part.zero == 0:
        decode_scaled(address, part.scale + slot * 2, part.bits, target, dim, width, count)
    elif is_key:
        groups = slot // size * (size // part.group) * dim * 2
        decode_keys(address, part.scale + groups, part.zero + groups, part.bits, part.group, offset, room, target, dim,
                    width, count)  # fmt: skip
    else:
        groups = slot * (dim // part.group) * 2
        decode_values(address, part.scale + groups, part.zero + groups, part.bits, part.group, room, target, dim, width,
                      count)  # fmt: skip
    return target, width


@njit(**FLAGS)
def bytes_of(dtype):
    return np.int64(4) if dtype == 0 else np.int64(2)


def _make_rows(read: Callable, item_bytes: int, scale_unit: float | None = None) -> Callable:
    """Makes `rows(source, stride, scales, dim, count, out, out_stride)`, as `make_widen` does for whole vectors.

    `dim` is any number from `LANES` on.
    """
    widen_many, widen_one = (make_widen(read, num_vectors, scale_unit) for num_vectors in (WIDE, 1))

    @njit(**FLAGS)
    def rows(source, stride, scales, dim, count, out, out_stride):
        channel = np.int64(0)
        while channel < dim:
            if channel + WIDE * LANES <= dim:
                widen_many(source + channel * item_bytes, stride, scales, count, out + channel * 4, out_stride)
                channel += WIDE * LANES
            else:
                # The last vector may begin among numbers that the one before it has had.
                place = min(channel, dim - LANES)
                widen_one(source + place * item_bytes, stride, scales, count, out + place * 4, out_stride)
                channel += LANES

    return rows


rows_of_bfloats, rows_of_halves = _make_rows(float_of_bfloats, 2), _make_rows(float_of_halves, 2)
rows_of_int8s, rows_of_e4m3s = _make_rows(float_of_int8s, 1, 1.0), _make_rows(float_of_e4m3s, 1, 256.0)


@njit(**FLAGS)
def copy_rows(source, dtype, stride, target, dim, width, count):
    """Rows of floating-point numbers as float32."""
    nothing = np.int64(0)
    if dtype == 0 or dim < LANES:
        for token in range(count):
            copy_numbers(source, dtype, token * stride, target + token * width * 4, dim)
    elif dtype == 1:
        rows_of_bfloats(source, stride * 2, nothing, dim, count, target, width)
    else:
        rows_of_halves(source, stride * 2, nothing, dim, count, target, width)
    clear(target, dim, width, count)


@njit(**FLAGS)
def copy_numbers(source, dtype, place, target, dim):
    """The `dim` numbers from `place` on, one by one."""
    out = floats(target, dim)
    if dtype == 0:
        states = floats(source + place * 4, dim)
        for i in range(dim):
            out[i] = states[i]
    else:
        bits = carray(pointer(source + place * 2), (dim,), np.uint16)
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
def decode_scaled(codes, scales, bits, target, dim, width, count):
    """8-bit codes with a scale for each token, see `hf_paged_kernels.scaled`."""
    if dim < LANES:
        for token in range(count):
            decode_codes(codes + token * dim, scales + token * 2, bits, target + token * width * 4, dim)
    elif bits == 8:
        rows_of_int8s(codes, dim, scales, dim, count, target, width)
    else:
        rows_of_e4m3s(codes, dim, scales, dim, count, target, width)
    clear(target, dim, width, count)


@njit(**FLAGS)
def decode_codes(codes, scale, bits, target, dim):
    """The `dim` codes of a token, one by one."""
    wide = float_of_half(carray(pointer(scale), (1,), np.uint16)[0])
    patterns, out = carray(pointer(codes), (dim,), np.uint8), floats(target, dim)
    for i in range(dim):
        out[i] = (np.float32(np.int8(patterns[i])) if bits == 8 else float_of_e4m3(patterns[i])) * wide


@njit(**FLAGS)
def decode_keys(codes, scales, zeros, bits, group, offset, room, target, dim, width, count):
    """Codes with scale and zero for each channel of a group of tokens, see `hf_paged_kernels.grouped`.

    Args:
        offset: place of the first token in its block.
        room: address of memory for `2 * width` floats.
    """
    run = dim * bits // 8
    first = np.int64(0)
    while first < count:
        place = (offset + first) // group
        tokens = min((place + 1) * group - offset, count) - first
        widen(scales + place * dim * 2, dim, room)
        widen(zeros + place * dim * 2, dim, room + width * 4)
        packed, out = codes + first * run, target + first * width * 4
        for channel in range(0, dim, run):
            shift, scale, zero = channel // run * bits, room + channel * 4, room + (width + channel) * 4
            unpack_run(True, packed, run, shift, bits, scale, zero, 1, run, tokens, out + channel * 4, width)
        first += tokens
    clear(target, dim, width, count)


@njit(**FLAGS)
def decode_values(codes, scales, zeros, bits, group, room, target, dim, width, count):
    """Codes with scale and zero for each token and group of channels, see `hf_paged_kernels.grouped`.

    Args:
        room: address of memory for `2 * count * dim / group` floats.
    """
    run = dim * bits // 8
    # Channels that share a group and lie in neighbouring bytes.
    step, other = group, run
    while other:
        step, other = other, step % other
    num_groups = dim // group
    wide_zeros = room + count * num_groups * 4
    widen(scales, count * num_groups, room)
    widen(zeros, count * num_groups, wide_zeros)
    for channel in range(0, dim, step):
        packed, shift, place = codes + channel % run, channel // run * bits, channel // group * 4
        scale, zero, out = room + place, wide_zeros + place, target + channel * 4
        unpack_run(False, packed, run, shift, bits, scale, zero, num_groups, step, count, out, width)
    clear(target, dim, width, count)


@njit(**FLAGS)
def unpack_run(by_channel, packed, packed_stride, shift, bits, scale, zero, scale_stride, size, count, out, out_stride):
    """Decodes `size` channels of `count` tokens, see `make_unpack`."""
    first_bit, largest = np.int32(shift), np.int32((1 << bits) - 1)
    channel = np.int64(0)
    while channel + LANES <= size:
        codes, target = packed + channel, out + channel * 4
        if by_channel:
            unpack_by_channel(codes, packed_stride, first_bit, largest, scale + channel * 4, zero + channel * 4,
                              scale_stride, count, target, out_stride)  # fmt: skip
        else:
            unpack_by_token(codes, packed_stride, first_bit, largest, scale, zero, scale_stride, count, target,
                            out_stride)  # fmt: skip
        channel += LANES
    if channel < size:
        for token in range(count):
            codes = carray(pointer(packed + token * packed_stride), (size,), np.uint8)
            states = floats(out + token * out_stride * 4, size)
            for i in range(channel, size):
                place = i if by_channel else token * scale_stride
                code = np.float32(np.int32(codes[i]) >> first_bit & largest)
                states[i] = code * floats(scale, place + 1)[place] + floats(zero, place + 1)[place]


@njit(**FLAGS)
def widen(source, count, target):
    """Makes `count` float16 numbers float32."""
    halves, wide = carray(pointer(source), (count,), np.uint16), floats(target, count)
    for i in range(count):
        wide[i] = float_of_half(halves[i])


@njit(**FLAGS)
def clear(rows, dim, width, count):
    """Puts 0 behind the `dim` numbers of each row."""
    for token in range(count):
        row = floats(rows + token * width * 4, width)
        for i in range(dim, width):
            row[i] = np.float32(0)
