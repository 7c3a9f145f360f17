"""Puts the partial results of splits together."""

import triton
import triton.language as tl

from hf_paged_kernels.triton.softmax import finished, with_sink


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    partial_ptr,  # float32 [rows, num_splits, VALUE_DIM], each normalised
    partial_lse_ptr,  # float32 [rows, num_splits], log2; -inf where a split saw nothing
    sinks_ptr,  # [num_heads]; None
    out_ptr,  # [rows, VALUE_DIM]
    lse_ptr,  # float32 [rows], log2; None: not wanted
    num_splits,
    NUM_HEADS: tl.constexpr,  # row % NUM_HEADS is the head
    SPLITS: tl.constexpr,  # num_splits up to a power of two
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # VALUE_DIM up to a power of two
):
    """The union of disjoint key sets by their log-sum-exp, all splits of a row at once. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, WIDTH)
    lse = tl.load(partial_lse_ptr + row * num_splits + splits, mask=splits < num_splits, other=-float("inf"))
    maximum = tl.max(lse, 0)
    total = 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row % NUM_HEADS)
        _, maximum, total = with_sink(sink, maximum, total)
    safe_maximum = tl.where(maximum == -float("inf"), 0.0, maximum)
    weights = tl.exp2(lse - safe_maximum)
    normaliser, merged = finished(safe_maximum, total + tl.sum(weights, 0))
    inside = (splits < num_splits)[:, None] & (dims < VALUE_DIM)[None, :]
    # What a split that saw nothing has in its place may be anything.
    inside = inside & (lse != -float("inf"))[:, None]
    parts = tl.load(
        partial_ptr + (row * num_splits + splits)[:, None] * VALUE_DIM + dims[None, :], mask=inside, other=0.0
    )
    out = tl.sum(parts * weights[:, None], 0) * normaliser
    tl.store(out_ptr + row * VALUE_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < VALUE_DIM)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, merged)
