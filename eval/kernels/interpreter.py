"""Makes Triton's interpreter round as a GPU does where 16-bit numbers are concerned.

The interpreter of Triton 3.9 holds bfloat16 as raw 16-bit integers: it multiplies those in `tl.dot`, and cuts off what
float32 has more instead of rounding it.
"""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def round_as_a_gpu() -> None:
    """Replaces the operations that the kernels use on bfloat16, for the rest of the process."""
    if getattr(InterpreterBuilder, "rounds_as_a_gpu", False):
        return
    dot, cast, float_cast = (
        InterpreterBuilder.create_dot,
        InterpreterBuilder.cast_impl,
        InterpreterBuilder.create_fp_to_fp,
    )

    def create_dot(self, a, b, accumulator, *options):
        return dot(self, _widened(a), _widened(b), accumulator, *options)

    def cast_impl(self, source, target):
        converted = _converted(source, target)
        return cast(self, source, target) if converted is None else converted

    def create_fp_to_fp(self, source, target, *options):
        converted = _converted(source, target)
        return float_cast(self, source, target, *options) if converted is None else converted

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.rounds_as_a_gpu = True


def _widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _converted(source: TensorHandle, target: tl.dtype) -> TensorHandle | None:
    kinds = (source.dtype.scalar, target.scalar)
    if tl.bfloat16 not in kinds or kinds[0] == kinds[1]:
        return None
    if kinds[1] != tl.bfloat16:
        values = _widened(source).data
        return TensorHandle(values.astype({tl.float16: np.float16, tl.float32: np.float32}[kinds[1]]), kinds[1])
    bits = np.ascontiguousarray(source.data, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = np.where(np.isnan(source.data), (bits >> 16) | 0x40, rounded)
    return TensorHandle(rounded.astype(np.uint16).reshape(source.data.shape), tl.bfloat16)
