"""Tiles of keys and values: where they lie, which of them may be read, and one step of attention over them."""

import triton
import triton.language as tl

from hf_paged_kernels.triton.codes import channels_of, grouped_keys, grouped_values, operand
from hf_paged_kernels.triton.rows import products_with
from hf_paged_kernels.triton.softmax import scaled, updated


@triton.jit
def block_ids_of_tile(block_table_ptr, first, last, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block ids of the tokens `first .. first + TILE - 1` of a row: one if a tile lies inside a block, else
    `[TILE]`. The table is not read for tokens from `last` on."""
    if BLOCK_SIZE % TILE == 0:
        block_ids = tl.load(block_table_ptr + first // BLOCK_SIZE, mask=first < last, other=0)
    else:
        tokens = first + tl.arange(0, TILE)
        block_ids = tl.load(block_table_ptr + tokens // BLOCK_SIZE, mask=tokens < last, other=0)
    return block_ids


@triton.jit
def slots_of_tile(block_ids, first, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Where the tokens `first .. first + TILE - 1` of a row lie, as a 64-bit slot and offsets from it `[TILE]`.

    Inside one block the wide part is a scalar, and the offsets stay in 32 bits.
    """
    wide_ids = block_ids.to(tl.int64)
    if BLOCK_SIZE % TILE == 0:
        slot = wide_ids * BLOCK_SIZE + first % BLOCK_SIZE
        offsets = tl.arange(0, TILE)
    else:
        slot = tl.zeros([], tl.int64)
        offsets = wide_ids * BLOCK_SIZE + (first + tl.arange(0, TILE)) % BLOCK_SIZE
    return slot, offsets


@triton.jit
def visible_keys(keys, queries, first, last, key_mask_ptr, WINDOW: tl.constexpr, HAS_KEY_MASK: tl.constexpr):
    """What each query sees of a tile, bool `[rows, tile]`, and which keys may be read at all, bool `[tile]`.

    Args:
        keys: token numbers `[tile]`
        queries: token numbers `[rows]`
        first, last: the keys `first .. last - 1` may be read.
        key_mask_ptr: a byte for each token; 0 hides it.
    """
    readable = (keys >= first) & (keys < last)
    visible = readable[None, :] & (keys[None, :] <= queries[:, None])
    if WINDOW > 0:
        visible = visible & (keys[None, :] > queries[:, None] - WINDOW)
    if HAS_KEY_MASK:
        allowed = tl.load(key_mask_ptr + keys, mask=readable, other=0)
        visible = visible & (allowed[None, :] != 0)
    return visible, readable


@triton.jit
def load_states(
    ptr,
    offsets,
    stride,
    readable,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BEGIN: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    RUNS: tl.constexpr,
):
    """The channels at the positions `BEGIN .. BEGIN + SIZE - 1` of a tile, `[tile, SIZE]` or transposed; 0 where there
    are none and for tokens that are not `readable`."""
    channels, inside = channels_of(BEGIN, SIZE, DIM, RUNS)
    new_axis: tl.constexpr = 0 if TRANSPOSED else 1
    pointers = ptr + tl.expand_dims(offsets, new_axis) * stride + tl.expand_dims(channels, 1 - new_axis)
    inside = tl.expand_dims(inside, 1 - new_axis)
    if MASKED and BEGIN + SIZE > DIM:
        states = tl.load(pointers, mask=tl.expand_dims(readable, new_axis) & inside, other=0.0)
    elif MASKED:
        states = tl.load(pointers, mask=tl.expand_dims(readable, new_axis), other=0.0)
    elif BEGIN + SIZE > DIM:
        states = tl.load(pointers, mask=inside, other=0.0)
    else:
        states = tl.load(pointers)
    return states


@triton.jit
def load_value(
    ptr,
    slot,  # where the tile begins, and the tokens of it from there [tile]
    offsets,
    stride,
    scales,
    readable,
    DTYPE: tl.constexpr,
    BEGIN: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A part of the values of a tile as an operand, `[tile, SIZE]`; arguments as in `attend_tiles`, `load_states`."""
    tile_ptr = ptr + slot * stride
    if FORMAT[0] == "grouped":
        CODES: tl.constexpr = VALUE[3] * ptr.dtype.element_ty.primitive_bitwidth // 8
        codes = load_states(
            tile_ptr, offsets, stride, readable, MASKED, False, 0, SIZE // CODES, VALUE[0] // CODES, 1
        )  # fmt: skip
        first_scale = slot * (VALUE[0] // FORMAT[4])
        value = grouped_values(
            codes, scales[2] + first_scale, scales[3] + first_scale, offsets, readable,
            DTYPE, TILE, FORMAT[4], FORMAT[2], VALUE[0], SIZE,
        )  # fmt: skip
    else:
        value = load_states(tile_ptr, offsets, stride, readable, MASKED, False, BEGIN, SIZE, VALUE[0], VALUE[3])
        value = operand(value, DTYPE, FORMAT)
    return value


@triton.jit
def finite_part(value):
    """Values `[tile, dims]` with 0 for NaN and infinity, and a number to add to each token's scores, `[tile]`: NaN if
    its value has such a number, else 0.

    A product makes NaN of a weight of 0 times NaN. So NaN reaches the rows that see the token by its score.
    """
    # NaN and infinity are the numbers whose exponent has all bits set.
    if value.dtype == tl.float32:
        exponent = value.to(tl.int32, bitcast=True) & 0x7F800000
        is_other = exponent == 0x7F800000
    elif value.dtype == tl.bfloat16:
        exponent = value.to(tl.int16, bitcast=True) & 0x7F80
        is_other = exponent == 0x7F80
    else:
        exponent = value.to(tl.int16, bitcast=True) & 0x7C00
        is_other = exponent == 0x7C00
    has_others = tl.max(is_other.to(tl.int32), 1) > 0
    return tl.where(is_other, 0.0, value), tl.where(has_others, float("nan"), 0.0)


@triton.jit
def load_scale(ptr, offsets, readable, MASKED: tl.constexpr):
    """The scale of each token of a tile, float32 `[tile]`; 0 for tokens that are not `readable`."""
    scale = tl.load(ptr + offsets, mask=readable, other=0.0) if MASKED else tl.load(ptr + offsets)
    return scale.to(tl.float32)


@triton.jit
def nothing_seen(ROWS: tl.constexpr, VALUE: tl.constexpr):
    """The `state` of `attend_tiles` before the first tile."""
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE[1]], tl.float32)
    acc_rest = total
    if VALUE[2] > 0:
        acc_rest = tl.zeros([ROWS, VALUE[2]], tl.float32)
    return maximum, total, acc, acc_rest


@triton.jit
def attend_tiles(
    state,  # maximum, total [rows]; acc, acc_rest [rows, main and rest of a value]
    query,  # [rows, main of a key]
    query_rest,  # [rows, rest of a key]
    queries,  # token numbers [rows]
    begin,  # tiles are taken from `begin`, a multiple of TILE ...
    end,  # ... until `end` is reached ...
    gap_begin,  # ... save those from `gap_begin` to `gap_end`, multiples of TILE or both the same
    gap_end,
    first,  # tokens first .. last - 1 may be read
    last,
    key_ptr,
    value_ptr,
    key_stride,  # elements from token to token
    value_stride,
    scales,  # of "int8" and "fp8" those of keys and values, and offsets of keys; of "grouped" scales and zeros of both
    block_table_ptr,
    key_mask_ptr,
    scale_log2,
    KEY: tl.constexpr,  # shape of keys, of values, and what stands in the blocks, as in `Format`
    VALUE: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # 0: tokens lie one after the other
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    MASKED: tl.constexpr,
    DIFFERING: tl.constexpr,  # queries may see different ones of the tokens that may be read
):
    """Takes the keys of a range into the running softmax, tile by tile, and returns the new `state`.

    What a query does not see does not reach it, NaN included: tokens that no query sees are not read, and where
    queries see different ones, NaN and infinity are kept out of the product, see `finite_part`.
    """
    KEY_DIM: tl.constexpr = KEY[0]
    KEY_MAIN: tl.constexpr = KEY[1]
    KEY_REST: tl.constexpr = KEY[2]
    KEY_RUNS: tl.constexpr = KEY[3]
    VALUE_MAIN: tl.constexpr = VALUE[1]
    VALUE_REST: tl.constexpr = VALUE[2]
    IS_GROUPED: tl.constexpr = FORMAT[0] == "grouped"
    IS_SCALED: tl.constexpr = FORMAT[0] == "int8" or FORMAT[0] == "fp8"
    DTYPE: tl.constexpr = query.dtype
    GUARDED: tl.constexpr = MASKED and DIFFERING and not IS_SCALED
    maximum, total, acc, acc_rest = state
    # Block ids are loaded a tile ahead: loads whose addresses wait for a load of the same round are not overlapped.
    block_ids = 0
    gap = gap_end - gap_begin
    if BLOCK_SIZE > 0:
        next_tile = tl.where(begin < gap_begin, begin, begin + gap)
        block_ids = block_ids_of_tile(block_table_ptr, next_tile, tl.minimum(end, last), BLOCK_SIZE, TILE)
    for position in range(begin, end - gap, TILE):
        tile = tl.where(position < gap_begin, position, position + gap)
        keys = tile + tl.arange(0, TILE)
        visible, readable = keys, keys
        if MASKED:
            visible, readable = visible_keys(keys, queries, first, last, key_mask_ptr, WINDOW, HAS_KEY_MASK)
        block_id = block_ids  # of codes in groups and of keys with offsets, whose tiles lie inside a block
        if BLOCK_SIZE > 0:
            slot, offsets = slots_of_tile(block_ids, tile, BLOCK_SIZE, TILE)
            next_tile = tl.where(position + TILE < gap_begin, tile + TILE, position + TILE + gap)
            block_ids = block_ids_of_tile(block_table_ptr, next_tile, tl.minimum(end, last), BLOCK_SIZE, TILE)
        else:
            slot, offsets = tl.zeros([], tl.int64) + tile, tl.arange(0, TILE)
        tile_key_ptr = key_ptr + slot * key_stride
        if GUARDED:
            value = load_value(
                value_ptr, slot, offsets, value_stride, scales, readable,
                DTYPE, 0, VALUE_MAIN, VALUE, FORMAT, TILE, MASKED,
            )  # fmt: skip
            value, poison = finite_part(value)
            if VALUE_REST > 0:
                value_rest = load_value(
                    value_ptr, slot, offsets, value_stride, scales, readable,
                    DTYPE, VALUE_MAIN, VALUE_REST, VALUE, FORMAT, TILE, MASKED,
                )  # fmt: skip
                value_rest, poison_of_rest = finite_part(value_rest)
                poison = poison + poison_of_rest
        if IS_GROUPED:
            KEY_CODES: tl.constexpr = KEY_RUNS * key_ptr.dtype.element_ty.primitive_bitwidth // 8
            codes = load_states(
                tile_key_ptr, offsets, key_stride, readable, MASKED, False,
                0, KEY_MAIN // KEY_CODES, KEY_DIM // KEY_CODES, 1,
            )  # fmt: skip
            first_scale = block_id.to(tl.int64) * (BLOCK_SIZE // FORMAT[3] * KEY_DIM)
            key = grouped_keys(
                codes, scales[0] + first_scale, scales[1] + first_scale, tile % BLOCK_SIZE,
                DTYPE, TILE, FORMAT[3], FORMAT[1], KEY_DIM, KEY_MAIN,
            )  # fmt: skip
        else:
            key = load_states(
                tile_key_ptr, offsets, key_stride, readable, MASKED, True, 0, KEY_MAIN, KEY_DIM, KEY_RUNS
            )  # fmt: skip
            key = operand(key, DTYPE, FORMAT)
        products = tl.dot(query, key, input_precision="ieee")
        if KEY_REST > 0:
            key = load_states(
                tile_key_ptr, offsets, key_stride, readable, MASKED, True, KEY_MAIN, KEY_REST, KEY_DIM, KEY_RUNS
            )  # fmt: skip
            products = tl.dot(query_rest, operand(key, DTYPE, FORMAT), products, input_precision="ieee")
        if IS_SCALED:
            key_scale = load_scale(scales[0] + slot, offsets, readable, MASKED)
            factor = (tl.abs(key_scale) * (scale_log2 * FORMAT[1]))[None, :]
            if FORMAT[2]:
                offset_ptr = scales[2] + block_id.to(tl.int64) * KEY_DIM
                shift = products_with(query, query_rest, offset_ptr, KEY) * scale_log2
                # A sign bit says that the key is without the offset: of 0 too, which no comparison of numbers finds.
                is_plain = key_scale.to(tl.int32, bitcast=True) < 0
                scores = scaled(products, factor, SOFTCAP, tl.where(is_plain[None, :], 0.0, shift[:, None]))
            else:
                scores = scaled(products, factor, SOFTCAP)
        else:
            scores = scaled(products, scale_log2, SOFTCAP)
        if GUARDED:
            scores = scores + poison[None, :]
        if MASKED:
            scores = tl.where(visible, scores, -float("inf"))
        weights, factor, maximum, total = updated(scores, maximum, total, MASKED)

        if IS_SCALED:
            value_scale = load_scale(scales[1] + slot, offsets, readable, MASKED)
            weights = weights * (value_scale * FORMAT[1])[None, :]
            if MASKED and DIFFERING:  # where NaN is, the scale of its token says so
                weights = tl.where(visible, weights, 0.0)
        weights = weights.to(DTYPE)
        if not GUARDED:
            value = load_value(
                value_ptr, slot, offsets, value_stride, scales, readable,
                DTYPE, 0, VALUE_MAIN, VALUE, FORMAT, TILE, MASKED,
            )  # fmt: skip
        acc = tl.dot(weights, value, acc * factor[:, None], input_precision="ieee")
        if VALUE_REST > 0:
            if not GUARDED:
                value_rest = load_value(
                    value_ptr, slot, offsets, value_stride, scales, readable,
                    DTYPE, VALUE_MAIN, VALUE_REST, VALUE, FORMAT, TILE, MASKED,
                )  # fmt: skip
            acc_rest = tl.dot(weights, value_rest, acc_rest * factor[:, None], input_precision="ieee")
    return maximum, total, acc, acc_rest
