"""The machine as LLVM sees it: widths, reinterpreted bits, and memory at an address. Numba has no words for these."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types, version_info
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

FLOAT, HALF = ir.FloatType(), ir.HalfType()
I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
if version_info.short < (0, 62):
    # The LLVM of older ones finds no instructions for some of what is asked for here, and ends the process.
    raise ImportError(f"the kernels for CPUs need Numba 0.62 or newer, not {version_info.string}")
_TRIPLE, _, _FEATURES = cpu_target.target_context.codegen().magic_tuple()
if _TRIPLE.startswith(("x86_64", "i686")) and "+f16c" not in _FEATURES:
    # LLVM would call a function that nothing provides, and end the process.
    raise ImportError("the kernels for CPUs need a processor that converts float16 (F16C, since 2012)")
LANES = 16 if "+avx512f" in _FEATURES else 8
"""Floats in a vector, by the processor that Numba compiles for. LLVM takes several registers where one holds fewer."""
LINE_BYTES = 64
"""Of a line of the caches between processor and memory."""


def _make_conversion(source: Any, target: Any, convert: Callable[[Any, Any], Any]) -> Callable:
    """Makes a function of one number that is one or two instructions."""

    @intrinsic
    def conversion(typing_context: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return convert(builder, args[0])

        return target(source), generate

    return conversion


float_of_bits = _make_conversion(types.int32, types.float32, lambda builder, bits: builder.bitcast(bits, FLOAT))
"""The float32 whose bits are those of an int32."""
bits_of_float = _make_conversion(types.float32, types.int32, lambda builder, number: builder.bitcast(number, I32))
"""The bits of a float32 as int32."""
float_of_half = _make_conversion(
    types.uint16, types.float32, lambda builder, bits: builder.fpext(builder.bitcast(bits, HALF), FLOAT)
)
"""The float32 that a float16, given by its bits as uint16, stands for."""
pointer = _make_conversion(
    types.int64, types.voidptr, lambda builder, address: builder.inttoptr(address, cgutils.voidptr_t)
)
"""An address as what `numba.carray` takes."""


@intrinsic
def take_number(typing_context: Any, address: Any) -> Any:
    """The int64 at an address, which is 1 more for the next thread that asks."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", counter, I64(1), "seq_cst")

    return types.int64(types.int64), generate


@intrinsic
def fetch_ahead(typing_context: Any, address: Any, num_bytes: Any) -> Any:
    """Asks for memory from an address on, which is going to be read soon, without waiting for it; for none if
    `num_bytes` is not positive."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, num_bytes = args
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        is_read, into_every_cache, is_data = I32(0), I32(3), I32(1)
        with cgutils.for_range_slice(builder, I64(0), num_bytes, I64(LINE_BYTES)) as (offset, _):
            place = builder.inttoptr(builder.add(address, offset), cgutils.voidptr_t)
            builder.call(function, [place, is_read, into_every_cache, is_data])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
