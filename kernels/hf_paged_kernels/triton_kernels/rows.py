"""The rows of a program, query tokens times heads: their queries, and their results."""

import triton
import triton.language as tl

from hf_paged_kernels.triton_kernels.softmax import finished


@triton.jit
def _load_part(ptr, offsets, present, BEGIN: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr):
    dims = BEGIN + tl.arange(0, SIZE)
    pointers = ptr + offsets[:, None] + dims[None, :]
    return tl.load(pointers, mask=present[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def load_query(
    ptr,  # [batch, num_heads, query_length, DIM]
    strides,  # (batch, head, token)
    batch,
    heads,
    tokens,
    present,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
):
    """The query of each row in its two parts, `[rows, MAIN]` and `[rows, REST]`; 0 for rows that are not there."""
    offsets = batch * strides[0] + heads * strides[1] + tokens * strides[2]
    query = _load_part(ptr, offsets, present, 0, MAIN, DIM)
    rest = query
    if REST > 0:
        rest = _load_part(ptr, offsets, present, MAIN, REST, DIM)
    return query, rest


@triton.jit
def _store_part(ptr, offsets, values, present, BEGIN: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr):
    dims = BEGIN + tl.arange(0, SIZE)
    pointers = ptr + offsets[:, None] + dims[None, :]
    tl.store(pointers, values.to(ptr.dtype.element_ty), mask=present[:, None] & (dims < DIM)[None, :])


@triton.jit
def store_results(
    out_ptr,  # [results, DIM]
    lse_ptr,  # float32 [results], log2; None: not wanted
    index,  # result that a row is, [rows]
    state,  # of `attend_tiles`
    present,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
):
    """Normalises and stores what the rows have summed."""
    maximum, total, acc, acc_rest = state
    normaliser, lse = finished(maximum, total)
    _store_part(out_ptr, index * DIM, acc * normaliser[:, None], present, 0, MAIN, DIM)
    if REST > 0:
        _store_part(out_ptr, index * DIM, acc_rest * normaliser[:, None], present, MAIN, REST, DIM)
    if lse_ptr is not None:
        tl.store(lse_ptr + index, lse, mask=present)
