"""Puts the partial results of splits together."""

import triton
import triton.language as tl

from hf_paged_kernels.triton_kernels.softmax import finished, with_sink


@triton.jit
def merge_kernel(
    partial_ptr,  # float32 [rows, NUM_SPLITS, VALUE_DIM], each normalised
    partial_lse_ptr,  # float32 [rows, NUM_SPLITS], log2; -inf where a split saw nothing
    sinks_ptr,  # [num_heads]; None
    out_ptr,  # [rows, VALUE_DIM]
    lse_ptr,  # float32 [rows], log2; None: not wanted
    NUM_HEADS: tl.constexpr,  # row % NUM_HEADS is the head
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,  # NUM_SPLITS up to a power of two
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # VALUE_DIM up to a power of two
):
    """The union of disjoint key sets by their log-sum-exp, all splits of a row at once. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, WIDTH)
    lse = tl.load(partial_lse_ptr + row * NUM_SPLITS + splits, mask=splits < NUM_SPLITS, other=-float("inf"))
    maximum = tl.max(lse, 0)
    total = 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row % NUM_HEADS)
        _, maximum, total = with_sink(sink, maximum, total)
    safe_maximum = tl.where(maximum == -float("inf"), 0.0, maximum)
    weights = tl.exp2(lse - safe_maximum)
    normaliser, merged = finished(safe_maximum, total + tl.sum(weights, 0))
    inside = (splits < NUM_SPLITS)[:, None] & (dims < VALUE_DIM)[None, :]
    # What a split that saw nothing has in its place may be anything.
    inside = inside & (lse > -float("inf"))[:, None]
    parts = tl.load(
        partial_ptr + (row * NUM_SPLITS + splits)[:, None] * VALUE_DIM + dims[None, :], mask=inside, other=0.0
    )
    out = tl.sum(parts * weights[:, None], 0) * normaliser
    tl.store(out_ptr + row * VALUE_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < VALUE_DIM)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, merged)
