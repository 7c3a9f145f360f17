"""Loops over vectors, as LLVM instructions.

Numba vectorizes simple loops by itself. It does not find the two loops that attention spends its time in, which keep
a block of results in registers: what `make_dots` and `make_accumulate` make.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hf_paged_kernels.numba.machine import FLOAT, HALF, I16, I32, I64, LANES

VECTOR, HALVES, INTEGERS, WORDS, BYTES = (ir.VectorType(kind, LANES) for kind in (FLOAT, HALF, I32, I16, ir.IntType(8)))


def make_dots(num_vectors: int | None) -> Callable:
    """Makes `dots(query, keys, key_stride, num_vectors, out)`, the products of one query with `LANES` keys.

    Each key has a sum of its own, a vector. At the end the sums become one vector of totals, by halves: two vectors of
    partial sums give one with half as many partial sums of each. With a fixed number of vectors, if it is small, the
    query stays in registers. Keys are read one after the other then, as they lie: what a processor fetches ahead.

    Args of `dots`:
        query: address of float32 `[num_vectors * LANES]`.
        keys: address of float32 `[LANES, >= num_vectors * LANES]`.
        key_stride: floats from key to key.
        num_vectors: vectors of a key; what `make_dots` was given, unless that is `None`.
        out: address of float32 `[LANES]`.
    """

    @intrinsic
    def dots(typing_context: Any, query: Any, keys: Any, key_stride: Any, num_vectors_: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            query, keys, key_stride, count, out = args
            starts = [builder.mul(key_stride, I64(lane)) for lane in range(LANES)]
            if num_vectors is None:
                totals = _sums_of_any_width(builder, query, keys, starts, count)
            else:
                vectors = [_load(builder, query, I64(vector * LANES)) for vector in range(num_vectors)]
                totals = []
                for start in starts:
                    total = builder.fmul(vectors[0], _load(builder, keys, start))
                    for vector in range(1, num_vectors):
                        key = _load(builder, keys, builder.add(start, I64(vector * LANES)))
                        total = _fused(builder, vectors[vector], key, total)
                    totals.append(total)
            while len(totals) > 1:
                totals = [_added_by_halves(builder, *pair) for pair in zip(totals[::2], totals[1::2], strict=True)]
            _store(builder, totals[0], out, I64(0))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return dots


def _sums_of_any_width(builder: Any, query: Any, keys: Any, starts: list[Any], count: Any) -> list[Any]:
    """The sums of `dots` for keys of `count` vectors: a vector of the query is loaded once for all keys."""
    sums = [cgutils.alloca_once_value(builder, ir.Constant(VECTOR, [0.0] * LANES)) for _ in starts]
    with cgutils.for_range(builder, count) as loop:
        first = builder.mul(loop.index, I64(LANES))
        query_vector = _load(builder, query, first)
        for start, total in zip(starts, sums, strict=True):
            key = _load(builder, keys, builder.add(start, first))
            builder.store(_fused(builder, query_vector, key, builder.load(total)), total)
    return [builder.load(total) for total in sums]


def make_accumulate(num_rows: int, num_vectors: int) -> Callable:
    """Makes `accumulate(weights, weight_stride, values, value_stride, count, out, out_stride)`.

    It adds to each of `num_rows` rows of `out`, `num_vectors` vectors wide, the sum of `count` values by the row's
    weights. All sums stay in registers meanwhile. Addresses are those of float32, strides are in floats.
    """

    @intrinsic
    def accumulate(
        typing_context: Any,
        weights: Any,
        weight_stride: Any,
        values: Any,
        value_stride: Any,
        count: Any,
        out: Any,
        out_stride: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            weights, weight_stride, values, value_stride, count, out, out_stride = args
            places = [
                (row, builder.add(builder.mul(out_stride, I64(row)), I64(vector * LANES)), vector)
                for row in range(num_rows)
                for vector in range(num_vectors)
            ]
            sums = [cgutils.alloca_once_value(builder, _load(builder, out, place)) for _, place, _ in places]
            with cgutils.for_range(builder, count) as loop:
                start = builder.mul(loop.index, value_stride)
                value = [_load(builder, values, builder.add(start, I64(v * LANES))) for v in range(num_vectors)]
                weight = [
                    _splat(
                        builder,
                        _number(builder, weights, builder.add(builder.mul(weight_stride, I64(row)), loop.index)),
                    )
                    for row in range(num_rows)
                ]
                for (row, _, vector), total in zip(places, sums, strict=True):
                    builder.store(_fused(builder, weight[row], value[vector], builder.load(total)), total)
            for (_, place, _), total in zip(places, sums, strict=True):
                _store(builder, builder.load(total), out, place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return accumulate


def make_unpack(by_channel: bool, num_vectors: int) -> Callable:
    """Makes `unpack(packed, packed_stride, shift, largest, scale, zero, scale_stride, count, out, out_stride)`.

    For each of `count` tokens it takes the codes at one bit position of `num_vectors * LANES` bytes, and stores
    `(code + zero) * scale` as float32. Scale and zero are addresses of bfloat16 and of float16: of one for each of
    these channels, for all tokens, else of one for each token, `scale_stride` apart.
    """

    @intrinsic
    def unpack(
        typing_context: Any,
        packed: Any,
        packed_stride: Any,
        shift: Any,
        largest: Any,
        scale: Any,
        zero: Any,
        scale_stride: Any,
        count: Any,
        out: Any,
        out_stride: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            packed, packed_stride, shift, largest, scale, zero, scale_stride, count, out, out_stride = args
            shifts, mask = _splat(builder, shift), _splat(builder, largest)
            if by_channel:
                factors = []
                for v in range(num_vectors):
                    scales = float_of_bfloats(builder, scale, v)
                    factors.append((scales, builder.fmul(float_of_halves(builder, zero, v), scales)))
            with cgutils.for_range(builder, count) as loop:
                row = builder.add(packed, builder.mul(loop.index, packed_stride))
                target = builder.mul(loop.index, out_stride)
                if not by_channel:
                    place = builder.mul(loop.index, scale_stride)
                    step = _bfloat(builder, scale, place)
                    first = builder.fmul(_half(builder, zero, place), step)
                    factors = [(_splat(builder, step), _splat(builder, first))] * num_vectors
                for vector, (scales, first_numbers) in enumerate(factors):
                    codes = builder.zext(_packed(builder, row, vector, BYTES, 1), INTEGERS)
                    codes = builder.and_(builder.lshr(codes, shifts), mask)
                    # Codes are below 2**31, and signed numbers are converted by a single instruction everywhere.
                    states = _fused(builder, builder.sitofp(codes, VECTOR), scales, first_numbers)
                    _store(builder, states, out, builder.add(target, I64(vector * LANES)))
            return context.get_dummy_value()

        addresses, numbers = [types.int64] * 2, [types.int32] * 2
        return types.void(*addresses, *numbers, *[types.int64] * 6), generate

    return unpack


def make_widen(
    read: Callable[[Any, Any], Any], num_vectors: int, scale_unit: float | None = None, has_offsets: bool = False
) -> Callable:
    """Makes `widen(rows, stride, scales, offsets, count, out, out_stride)`.

    It makes the first `num_vectors * LANES` numbers of each of `count` rows float32.

    Args:
        read: what reads a vector of numbers: `float_of_int8s`, `float_of_e4m3s`, `float_of_bfloats`, `float_of_halves`.
        num_vectors: vectors of a row.
        scale_unit: what a scale has to be multiplied by before numbers are multiplied by it; `None` for no scales.
        has_offsets: whether rows have the same numbers added once they are scaled, save those whose scale has its sign
            bit set, which counts for nothing else.

    Args of `widen`:
        rows: address.
        stride: bytes from row to row.
        scales: address of bfloat16 `[count]`; of no meaning if there are none.
        offsets: address of bfloat16 `[num_vectors * LANES]`; likewise.
        out: address of float32.
        out_stride: floats from row to row.
    """

    @intrinsic
    def widen(
        typing_context: Any, rows: Any, stride: Any, scales: Any, offsets: Any, count: Any, out: Any, out_stride: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            rows, stride, scales, offsets, count, out, out_stride = args
            added = [float_of_bfloats(builder, offsets, vector) for vector in range(num_vectors * has_offsets)]

            def widen_row(row: Any, target: Any, scale: Any, has_offset: bool) -> None:
                for vector in range(num_vectors):
                    numbers = read(builder, row, vector)
                    if has_offset:
                        numbers = _fused(builder, numbers, scale, added[vector])
                    elif scale is not None:
                        numbers = builder.fmul(numbers, scale)
                    _store(builder, numbers, out, builder.add(target, I64(vector * LANES)))

            with cgutils.for_range(builder, count) as loop:
                row, target = builder.add(rows, builder.mul(loop.index, stride)), builder.mul(loop.index, out_stride)
                number = scale = None
                if scale_unit is not None:
                    number = _bfloat(builder, scales, loop.index)
                    scale = _splat(builder, builder.fmul(number, FLOAT(scale_unit)))
                if not has_offsets:
                    widen_row(row, target, scale, False)
                else:
                    # Few tokens are without the offset, so that a branch costs the others less than a mask does.
                    has_sign = builder.icmp_signed("<", builder.bitcast(number, I32), I32(0))
                    with builder.if_else(has_sign, likely=False) as (plain, shifted):
                        with plain:
                            widen_row(row, target, builder.fneg(scale), False)
                        with shifted:
                            widen_row(row, target, scale, True)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return widen


def float_of_int8s(builder: Any, row: Any, vector: int) -> Any:
    """A vector of the whole numbers of a row."""
    return builder.sitofp(builder.sext(_packed(builder, row, vector, BYTES, 1), INTEGERS), VECTOR)


def float_of_e4m3s(builder: Any, row: Any, vector: int) -> Any:
    """A vector of the 8-bit floating-point numbers of a row, divided by 256.

    Read as float16, which has four exponent bits more to the left of the same mantissa, they are that.
    """
    bits = builder.shl(builder.zext(_packed(builder, row, vector, BYTES, 1), WORDS), _constant(WORDS, 8))
    magnitude = builder.lshr(builder.and_(bits, _constant(WORDS, 0x7F00)), _constant(WORDS, 1))
    halves = builder.or_(magnitude, builder.and_(bits, _constant(WORDS, 0x8000)))
    return builder.fpext(builder.bitcast(halves, HALVES), VECTOR)


def float_of_bfloats(builder: Any, row: Any, vector: int) -> Any:
    """A vector of the bfloat16 numbers of a row."""
    bits = builder.zext(_packed(builder, row, vector, WORDS, 2), INTEGERS)
    return builder.bitcast(builder.shl(bits, _constant(INTEGERS, 16)), VECTOR)


def float_of_halves(builder: Any, row: Any, vector: int) -> Any:
    """A vector of the float16 numbers of a row."""
    return builder.fpext(_packed(builder, row, vector, HALVES, 2), VECTOR)


def _packed(builder: Any, row: Any, vector: int, kind: Any, size: int) -> Any:
    """The vector `vector` of a row of numbers of `size` bytes."""
    address = builder.add(row, I64(vector * LANES * size))
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=size)


def _constant(kind: Any, number: int) -> Any:
    return ir.Constant(kind, [number] * LANES)


def _address(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    return builder.inttoptr(builder.add(base, builder.mul(index, I64(4))), kind.as_pointer())


def _load(builder: Any, base: Any, index: Any) -> Any:
    """The vector at the float32 `index` from an address on."""
    return builder.load(_address(builder, base, index, VECTOR), align=4)


def _store(builder: Any, vector: Any, base: Any, index: Any) -> None:
    builder.store(vector, _address(builder, base, index, VECTOR), align=4)


def _number(builder: Any, base: Any, index: Any) -> Any:
    """The float32 `index` from an address on."""
    return builder.load(_address(builder, base, index, FLOAT), align=4)


def _half(builder: Any, base: Any, index: Any) -> Any:
    """The float16 `index` from an address on, as float32."""
    address = builder.add(base, builder.mul(index, I64(2)))
    return builder.fpext(builder.load(builder.inttoptr(address, HALF.as_pointer()), align=2), FLOAT)


def _bfloat(builder: Any, base: Any, index: Any) -> Any:
    """The bfloat16 `index` from an address on, as float32."""
    address = builder.inttoptr(builder.add(base, builder.mul(index, I64(2))), I16.as_pointer())
    bits = builder.zext(builder.load(address, align=2), I32)
    return builder.bitcast(builder.shl(bits, I32(16)), FLOAT)


def _splat(builder: Any, number: Any) -> Any:
    """A number in every lane."""
    nothing = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, number, I32(0)), nothing, _mask([0] * LANES))


def _fused(builder: Any, first: Any, second: Any, summand: Any) -> Any:
    """`first * second + summand`, rounded once if the processor can."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
    return builder.call(function, [first, second, summand])


@intrinsic
def maximum_of(typing_context: Any, numbers: Any, num_vectors: Any) -> Any:
    """The largest of float32 `[num_vectors * LANES]` at an address, at least one vector; NaN if there is one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers, count = args
        largest = cgutils.alloca_once_value(builder, _load(builder, numbers, I64(0)))
        kind = ir.FunctionType(VECTOR, [VECTOR] * 2)
        larger = cgutils.get_or_insert_function(builder.module, kind, f"llvm.maximum.v{LANES}f32")
        with cgutils.for_range(builder, count) as loop:
            vector = _load(builder, numbers, builder.mul(loop.index, I64(LANES)))
            builder.store(builder.call(larger, [builder.load(largest), vector]), largest)
        kind = ir.FunctionType(FLOAT, [VECTOR])
        over_lanes = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmaximum.v{LANES}f32")
        return builder.call(over_lanes, [builder.load(largest)])

    return types.float32(types.int64, types.int64), generate


def _added_by_halves(builder: Any, first: Any, second: Any) -> Any:
    """The sums of neighbouring lanes: those of `first` in the lower half, those of `second` in the upper one."""
    evens, odds = (_mask(range(start, 2 * LANES, 2)) for start in (0, 1))
    return builder.fadd(builder.shuffle_vector(first, second, evens), builder.shuffle_vector(first, second, odds))


def _mask(lanes: Any) -> Any:
    return ir.Constant(ir.VectorType(I32, LANES), [I32(lane) for lane in lanes])
