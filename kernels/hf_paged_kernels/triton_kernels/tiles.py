"""Tiles of keys and values: where they lie, which of them may be read, and one step of attention over them."""

import triton
import triton.language as tl

from hf_paged_kernels.triton_kernels.softmax import scaled, updated


@triton.jit
def slots_of_tile(block_table_ptr, first, last, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Where the tokens `first .. first + TILE - 1` of a row lie, as a 64-bit slot and offsets from it `[TILE]`.

    A tile inside one block takes one block id. The wide part is then a scalar, and the offsets stay in 32 bits.
    The table is not read for tokens from `last` on.
    """
    if BLOCK_SIZE % TILE == 0:
        block_id = tl.load(block_table_ptr + first // BLOCK_SIZE).to(tl.int64)
        slot = block_id * BLOCK_SIZE + first % BLOCK_SIZE
        offsets = tl.arange(0, TILE)
    else:
        tokens = first + tl.arange(0, TILE)
        block_ids = tl.load(block_table_ptr + tokens // BLOCK_SIZE, mask=tokens < last, other=0).to(tl.int64)
        slot = tl.zeros([], tl.int64)
        offsets = block_ids * BLOCK_SIZE + tokens % BLOCK_SIZE
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
):
    """The dims `BEGIN .. BEGIN + SIZE - 1` of a tile, `[tile, SIZE]` or transposed; 0 beyond `DIM` and for tokens that
    are not `readable`."""
    dims = BEGIN + tl.arange(0, SIZE)
    new_axis: tl.constexpr = 0 if TRANSPOSED else 1
    pointers = ptr + tl.expand_dims(offsets, new_axis) * stride + tl.expand_dims(dims, 1 - new_axis)
    inside = tl.expand_dims(dims < DIM, 1 - new_axis)
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
def nothing_seen(ROWS: tl.constexpr, VALUE_MAIN: tl.constexpr, VALUE_REST: tl.constexpr):
    """The `state` of `attend_tiles` before the first tile."""
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_MAIN], tl.float32)
    acc_rest = total
    if VALUE_REST > 0:
        acc_rest = tl.zeros([ROWS, VALUE_REST], tl.float32)
    return maximum, total, acc, acc_rest


@triton.jit
def attend_tiles(
    state,  # maximum, total [rows]; acc, acc_rest [rows, VALUE_MAIN / VALUE_REST]
    query,  # [rows, KEY_MAIN]
    query_rest,  # [rows, KEY_REST]
    queries,  # token numbers [rows]
    begin,  # tiles are taken from `begin` ...
    end,  # ... until `end` is reached
    first,  # tokens first .. last - 1 may be read
    last,
    key_ptr,
    value_ptr,
    key_stride,  # elements from token to token
    value_stride,
    block_table_ptr,
    key_mask_ptr,
    scale_log2,
    SHAPE: tl.constexpr,  # KEY_DIM, KEY_MAIN, KEY_REST, VALUE_DIM, VALUE_MAIN, VALUE_REST
    BLOCK_SIZE: tl.constexpr,  # 0: tokens lie one after the other
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Takes the keys of a range into the running softmax, tile by tile, and returns the new `state`."""
    KEY_DIM: tl.constexpr = SHAPE[0]
    KEY_MAIN: tl.constexpr = SHAPE[1]
    KEY_REST: tl.constexpr = SHAPE[2]
    VALUE_DIM: tl.constexpr = SHAPE[3]
    VALUE_MAIN: tl.constexpr = SHAPE[4]
    VALUE_REST: tl.constexpr = SHAPE[5]
    maximum, total, acc, acc_rest = state
    for tile in range(begin, end, TILE):
        keys = tile + tl.arange(0, TILE)
        visible, readable = keys, keys
        if MASKED:
            visible, readable = visible_keys(keys, queries, first, last, key_mask_ptr, WINDOW, HAS_KEY_MASK)
        if BLOCK_SIZE > 0:
            slot, offsets = slots_of_tile(block_table_ptr, tile, last, BLOCK_SIZE, TILE)
        else:
            slot, offsets = tl.zeros([], tl.int64) + tile, tl.arange(0, TILE)
        tile_key_ptr = key_ptr + slot * key_stride
        tile_value_ptr = value_ptr + slot * value_stride

        key = load_states(tile_key_ptr, offsets, key_stride, readable, MASKED, True, 0, KEY_MAIN, KEY_DIM)
        products = tl.dot(query, key, input_precision=PRECISION)
        if KEY_REST > 0:
            key = load_states(tile_key_ptr, offsets, key_stride, readable, MASKED, True, KEY_MAIN, KEY_REST, KEY_DIM)
            products = tl.dot(query_rest, key, products, input_precision=PRECISION)
        scores = scaled(products, scale_log2, SOFTCAP)
        if MASKED:
            scores = tl.where(visible, scores, -float("inf"))
        weights, factor, maximum, total = updated(scores, maximum, total, MASKED)

        value = load_states(tile_value_ptr, offsets, value_stride, readable, MASKED, False, 0, VALUE_MAIN, VALUE_DIM)
        weights = weights.to(value.dtype)
        acc = tl.dot(weights, value, acc * factor[:, None], input_precision=PRECISION)
        if VALUE_REST > 0:
            value = load_states(
                tile_value_ptr, offsets, value_stride, readable, MASKED, False, VALUE_MAIN, VALUE_REST, VALUE_DIM
            )
            acc_rest = tl.dot(weights, value, acc_rest * factor[:, None], input_precision=PRECISION)
    return maximum, total, acc, acc_rest
