"""The attention kernel of the CPU: takes pieces of work until there are none, in as many threads as call it.

A piece is some keys for the queries of one KV head: with one new token a row, the query heads of a group. They share
each tile of keys, which is read, or decoded, once for all of them, and so are values. The softmax runs along, as in
FlashAttention (Dao et al., arXiv 2205.14135), and whoever finishes the last piece of a unit merges its parts.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numba import carray, njit

from hf_paged_kernels.numba.call import CALL, PIECE_TYPE
from hf_paged_kernels.numba.compiled import FLAGS, Kernel
from hf_paged_kernels.numba.machine import LANES, LINE_BYTES, float_of_bits, pointer, take_number
from hf_paged_kernels.numba.tiles import STRIP, TILE, fetch_strip, floats, locate, strip_of
from hf_paged_kernels.numba.vectors import make_accumulate, make_dots, maximum_of

MINUS_INFINITY = np.float32(-np.inf)
LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)
LINE = LINE_BYTES // 4  # floats of a cache line
PIECE_BYTES = PIECE_TYPE.itemsize
NEXT_PIECE, NEXT_SCRATCH = (CALL.fields[name][1] for name in ("next_piece", "next_scratch"))

# As many vectors as there are registers for beside the sums: 32 of 16 lanes, or 16 of 8.
dots_4, dots_8, dots_any = make_dots(4), make_dots(8), make_dots(None)
WIDE = 4 if LANES == 16 else 2
add_4, add_3, add_2, add_1 = (make_accumulate(rows, WIDE) for rows in (4, 3, 2, 1))
add_4_narrow, add_1_narrow = make_accumulate(4, 1), make_accumulate(1, 1)


@njit(**FLAGS)
def power_of_2(x):
    """2 ** x for x <= 0, to an ulp or two; 0 below -126, where float32 ends, and NaN for NaN.

    The fraction by a polynomial, the whole number as exponent.
    """
    exponent = x if x > np.float32(-126) else np.float32(-126)
    whole = np.floor(exponent + np.float32(0.5))
    y = (exponent - whole) * LN_2
    # exp(y) for |y| <= ln(2) / 2, by its Taylor series.
    power = np.float32(1 / 5040)
    power = power * y + np.float32(1 / 720)
    power = power * y + np.float32(1 / 120)
    power = power * y + np.float32(1 / 24)
    power = power * y + np.float32(1 / 6)
    power = power * y + np.float32(1 / 2)
    power = power * y + np.float32(1)
    power = power * y + np.float32(1)
    power = power * float_of_bits((np.int32(whole) + np.int32(127)) << np.int32(23))
    power = np.float32(0) if x <= np.float32(-126) else power
    return power if x == x else x


@njit(**FLAGS)
def hyperbolic_tangent(x):
    power = power_of_2(np.float32(-2) * LOG2_E * abs(x))
    tangent = (np.float32(1) - power) / (np.float32(1) + power)
    # Where the difference loses digits, the series.
    square = x * x
    series = x * (np.float32(1) + square * (np.float32(-1 / 3) + square * np.float32(2 / 15)))
    return series if abs(x) < np.float32(0.03) else (-tangent if x < 0 else tangent)


@njit(**FLAGS)
def score(queries, keys, key_stride, width, count, scores, num_rows):
    """The products of each of the queries `[num_rows, width]` with `count` keys, into `scores` `[num_rows, TILE]`.

    They are made `LANES` at a time; those from `count` on mean nothing.
    """
    num_vectors = width // LANES
    for start in range(0, count, LANES):
        some_keys = keys + start * key_stride * 4
        for row in range(num_rows):
            query, products = queries + row * width * 4, scores + (row * TILE + start) * 4
            if num_vectors == 4:
                dots_4(query, some_keys, key_stride, num_vectors, products)
            elif num_vectors == 8:
                dots_8(query, some_keys, key_stride, num_vectors, products)
            else:
                dots_any(query, some_keys, key_stride, num_vectors, products)


@njit(**FLAGS)
def add_weighted(weights, values, value_stride, count, out, width, num_rows):
    """Adds to each row of `out` `[num_rows, width]` the `count` values by its weights `[num_rows, TILE]`."""
    stride = np.int64(TILE)
    row = np.int64(0)
    while row < num_rows:
        rows = min(num_rows - row, 4)
        w = weights + row * TILE * 4
        column = np.int64(0)
        while column < width:
            o, v = out + (row * width + column) * 4, values + column * 4
            if column + WIDE * LANES <= width:
                if rows == 4:
                    add_4(w, stride, v, value_stride, count, o, width)
                elif rows == 3:
                    add_3(w, stride, v, value_stride, count, o, width)
                elif rows == 2:
                    add_2(w, stride, v, value_stride, count, o, width)
                else:
                    add_1(w, stride, v, value_stride, count, o, width)
                column += WIDE * LANES
            else:
                if rows == 4:
                    add_4_narrow(w, stride, v, value_stride, count, o, width)
                else:
                    for r in range(rows):
                        add_1_narrow(w + r * TILE * 4, stride, v, value_stride, count, o + r * width * 4, width)
                column += LANES
        row += rows


@njit(**FLAGS)
def state_of(address, num_rows, width):
    """The softmax so far: sums of weighted values `[num_rows * width]`, maxima and totals `[num_rows]`."""
    behind = address + num_rows * width * 4
    return floats(address, num_rows * width), floats(behind, num_rows), floats(behind + num_rows * 4, num_rows)


@njit(**FLAGS)
def hide(call, scores, num_queries, first_query, first, count, row, past):
    """Sets to -inf what a query does not see of a tile. `past`: tokens of the row before the first query."""
    num_rows = call.group * num_queries
    for r in range(num_rows):
        token = past + first_query + r // call.group
        row_scores = floats(scores + r * TILE * 4, TILE)
        if first + count - 1 > token:
            for i in range(max(token + 1 - first, 0), count):
                row_scores[i] = MINUS_INFINITY
        if call.window != 0 and first <= token - call.window:
            for i in range(0, min(token - call.window + 1 - first, count)):
                row_scores[i] = MINUS_INFINITY
    if call.key_mask != 0:
        mask = carray(pointer(call.key_mask + row * call.key_mask_stride + first), (count,), np.uint8)
        for i in range(count):
            if mask[i] == 0:
                for r in range(num_rows):
                    floats(scores + r * TILE * 4, TILE)[i] = MINUS_INFINITY


@njit(**FLAGS)
def add_seen(weights, values, value_stride, count, out, width, num_rows):
    """`add_weighted` without values of weight 0, which may be NaN or infinite: 0 times that is NaN."""
    for row in range(num_rows):
        row_weights, sums = floats(weights + row * TILE * 4, count), floats(out + row * width * 4, width)
        for token in range(count):
            if row_weights[token] != 0:
                numbers = floats(values + token * value_stride * 4, width)
                for i in range(width):
                    sums[i] += row_weights[token] * numbers[i]


@njit(**FLAGS)
def attend_piece(call, piece, scratch, codes):
    """Attention to the keys of a piece: maximum and total of each row, and the sum of weighted values.

    `codes`: as in `strip_of`.
    """
    num_rows = attend_keys(call, piece, scratch, codes, False)
    sums = floats(scratch, num_rows * call.value.width)
    for i in range(len(sums)):
        if sums[i] - sums[i] != 0:  # it may come from what is not seen
            return attend_keys(call, piece, scratch, codes, True)
    return num_rows


@njit(**FLAGS)
def attend_keys(call, piece, scratch, codes, seen_only):
    """`attend_piece`; with `seen_only` values that are not seen may be anything."""
    key, value = call.key, call.value
    row, kv_head, first_query, past = piece.row, piece.kv_head, piece.first_query, piece.past
    last, fresh_from = piece.last, piece.fresh_from
    num_queries = piece.end_query - first_query
    num_rows = num_queries * call.group
    sums, maxima, totals = state_of(scratch, num_rows, value.width)
    # Vectors that do not cross cache lines.
    queries = scratch + -(-num_rows * (value.width + 2) // LINE) * LINE * 4
    scores = queries + num_rows * key.width * 4
    room = scores + num_rows * TILE * 4

    maxima[:] = MINUS_INFINITY
    totals[:] = np.float32(0)
    sums[:] = np.float32(0)
    has_cap = call.softcap != 0
    factor = np.float32(call.scale) if has_cap else np.float32(call.scale) * LOG2_E
    for r in range(num_rows):
        query, head = first_query + r // call.group, kv_head * call.group + r % call.group
        place = row * call.query_batch + head * call.query_head + query * call.query_token
        source = floats(call.query + place * 4, key.dim)
        target = floats(queries + r * key.width * 4, key.width)
        for i in range(key.dim):
            target[i] = source[i] * factor
        for i in range(key.dim, key.width):
            target[i] = np.float32(0)

    first = piece.first
    key_place = locate(call, key, row, kv_head, first, first >= fresh_from, past)
    while first < last:
        if first < fresh_from:
            end = min(last, fresh_from, first + TILE, (first // call.block_size + 1) * call.block_size)
        else:
            end = min(last, first + TILE)
        count = end - first
        value_place = locate(call, value, row, kv_head, first, first >= fresh_from, past)
        for start in range(0, count, STRIP):
            size = min(count - start, STRIP)
            fetch_strip(value_place, start, size)
            keys, key_stride = strip_of(call, key, True, key_place, start, size, room, codes)
            score(queries, keys, key_stride, key.width, size, scores + start * 4, num_rows)
        if has_cap:
            cap = np.float32(call.softcap)
            for r in range(num_rows):
                row_scores = floats(scores + r * TILE * 4, count)
                for i in range(count):
                    row_scores[i] = cap * LOG2_E * hyperbolic_tangent(row_scores[i] / cap)
        if end - 1 > past + first_query or call.window != 0 or call.key_mask != 0:
            hide(call, scores, num_queries, first_query, first, count, row, past)
        for r in range(num_rows):
            row_scores = floats(scores + r * TILE * 4, TILE)
            num_vectors = -(-count // LANES)
            for i in range(count, num_vectors * LANES):
                row_scores[i] = MINUS_INFINITY
            maximum = maximum_of(scores + r * TILE * 4, num_vectors)
            if maximum == MINUS_INFINITY:
                for i in range(count):
                    row_scores[i] = np.float32(0)
                continue
            if maximum <= maxima[r]:
                maximum = maxima[r]
            else:
                shrink = power_of_2(maxima[r] - maximum) if maxima[r] != MINUS_INFINITY else np.float32(0)
                maxima[r] = maximum
                totals[r] *= shrink
                row_sums = floats(scratch + r * value.width * 4, value.width)
                for i in range(value.width):
                    row_sums[i] *= shrink
            total = np.float32(0)
            for i in range(count):
                weight = power_of_2(row_scores[i] - maximum)
                row_scores[i] = weight
                total += weight
            totals[r] += total
        if end < last:
            key_place = locate(call, key, row, kv_head, end, end >= fresh_from, past)
        for start in range(0, count, STRIP):
            size = min(count - start, STRIP)
            if end < last:
                fetch_strip(key_place, start, size)
            values, value_stride = strip_of(call, value, False, value_place, start, size, room, codes)
            if seen_only:
                add_seen(scores + start * 4, values, value_stride, size, scratch, value.width, num_rows)
            else:
                add_weighted(scores + start * 4, values, value_stride, size, scratch, value.width, num_rows)
        first = end
    return num_rows


@njit(**FLAGS)
def merge(call, piece, scratch):
    """Adds up the parts of a unit, whoever did them, into `scratch` as `attend_piece` leaves it."""
    value = call.value
    num_rows = (piece.end_query - piece.first_query) * call.group
    size = num_rows * (2 + value.width)
    sums, maxima, totals = state_of(scratch, num_rows, value.width)
    maxima[:] = MINUS_INFINITY
    totals[:] = np.float32(0)
    sums[:] = np.float32(0)
    for part in range(piece.num_parts):
        address = call.partials + (piece.partial * (2 + value.width) + part * size) * 4
        part_sums, part_maxima, part_totals = state_of(address, num_rows, value.width)
        for r in range(num_rows):
            if part_maxima[r] == MINUS_INFINITY:
                continue
            maximum = max(maxima[r], part_maxima[r])
            own = power_of_2(maxima[r] - maximum) if maxima[r] != MINUS_INFINITY else np.float32(0)
            other = power_of_2(part_maxima[r] - maximum)
            maxima[r] = maximum
            totals[r] = totals[r] * own + part_totals[r] * other
            for i in range(r * value.width, (r + 1) * value.width):
                sums[i] = sums[i] * own + part_sums[i] * other


@njit(**FLAGS)
def finish(call, piece, scratch):
    """Divides by the totals, and writes output and log-sum-exp."""
    value = call.value
    row, kv_head, first_query = piece.row, piece.kv_head, piece.first_query
    num_rows = (piece.end_query - first_query) * call.group
    num_heads = call.num_kv_heads * call.group
    _, maxima, totals = state_of(scratch, num_rows, value.width)
    for r in range(num_rows):
        query, head = first_query + r // call.group, kv_head * call.group + r % call.group
        row_sums = floats(scratch + r * value.width * 4, value.width)
        maximum, total = maxima[r], totals[r]
        shrink = np.float32(1)
        sink = floats(call.sinks, num_heads)[head] * LOG2_E if call.sinks != 0 else MINUS_INFINITY
        if sink != MINUS_INFINITY:
            larger = max(maximum, sink)
            shrink = power_of_2(maximum - larger) if maximum != MINUS_INFINITY else np.float32(0)
            total = total * shrink + power_of_2(sink - larger)
            maximum = larger
        factor = shrink / total if total != 0 else np.float32(0)
        out = floats(call.out + ((row * call.query_length + query) * num_heads + head) * value.dim * 4, value.dim)
        for i in range(value.dim):
            out[i] = row_sums[i] * factor
        if call.lse != 0:
            lse = floats(call.lse + ((row * num_heads + head) * call.query_length + query) * 4, 1)
            lse[0] = maximum * LN_2 + np.log(total) if total != 0 else MINUS_INFINITY


@njit(**FLAGS)
def take_pieces(address, codes):
    """Does pieces of a call, given by the address of its record, until there are none. `codes`: as in `strip_of`."""
    call = carray(pointer(address), (1,), CALL)[0]
    scratch = call.scratch + take_number(address + NEXT_SCRATCH) * call.scratch_bytes
    while True:
        index = take_number(address + NEXT_PIECE)
        if index >= call.num_pieces:
            return
        piece = carray(pointer(call.pieces + index * PIECE_BYTES), (1,), PIECE_TYPE)[0]
        num_rows = attend_piece(call, piece, scratch, codes)
        if piece.num_parts > 1:
            size = num_rows * (2 + call.value.width)
            kept = floats(call.partials + (piece.partial * (2 + call.value.width) + piece.part * size) * 4, size)
            mine = floats(scratch, size)
            for i in range(size):
                kept[i] = mine[i]
            finished = call.finished + piece.unit * 8
            if take_number(finished) + 1 < piece.num_parts:
                continue
            carray(pointer(finished), (1,), np.int64)[0] = 0
            merge(call, piece, scratch)
        finish(call, piece, scratch)


def _make(version: int, codes: int | None) -> Callable[[int], None]:
    def work(address):
        if version >= 0:
            take_pieces(address, codes)

    return work


attend_exact = Kernel("attention to exact blocks", 7, partial(_make, codes=None))
attend_codes = Kernel("attention to quantized blocks", 10, partial(_make, codes=1))
"""`take_pieces` for callers that are not Python. The first one reads no codes, and is compiled sooner."""
