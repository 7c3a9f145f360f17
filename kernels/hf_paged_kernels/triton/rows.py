"""The rows of a program, query tokens times heads: their queries, and their results."""

import triton
import triton.language as tl

from hf_paged_kernels.triton.codes import channels_of
from hf_paged_kernels.triton.softmax import finished


@triton.jit
def _load_part(ptr, offsets, present, BEGIN: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, RUNS: tl.constexpr):
    dims, inside = channels_of(BEGIN, SIZE, DIM, RUNS)
    pointers = ptr + offsets[:, None] + dims[None, :]
    return tl.load(pointers, mask=present[:, None] & inside[None, :], other=0.0)


@triton.jit
def load_query(
    ptr,  # [batch, num_heads, query_length, DIM]
    strides,  # (batch, head, token)
    batch,
    heads,
    tokens,
    present,
    SHAPE: tl.constexpr,  # of keys, as in `Format`
):
    """The query of each row in its two parts, `[rows, main]` and `[rows, rest]`; 0 for rows that are not there."""
    offsets = batch * strides[0] + heads.to(tl.int64) * strides[1] + tokens.to(tl.int64) * strides[2]
    query = _load_part(ptr, offsets, present, 0, SHAPE[1], SHAPE[0], SHAPE[3])
    rest = query
    if SHAPE[2] > 0:
        rest = _load_part(ptr, offsets, present, SHAPE[1], SHAPE[2], SHAPE[0], SHAPE[3])
    return query, rest


@triton.jit
def products_with(query, query_rest, ptr, SHAPE: tl.constexpr):
    """The product of each row's query, as `load_query` gives it, with one vector of its width, float32 `[rows]`."""
    dims, inside = channels_of(0, SHAPE[1], SHAPE[0], SHAPE[3])
    vector = tl.load(ptr + dims, mask=inside, other=0.0).to(tl.float32)
    products = tl.sum(query.to(tl.float32) * vector[None, :], 1)
    if SHAPE[2] > 0:
        dims, inside = channels_of(SHAPE[1], SHAPE[2], SHAPE[0], SHAPE[3])
        vector = tl.load(ptr + dims, mask=inside, other=0.0).to(tl.float32)
        products += tl.sum(query_rest.to(tl.float32) * vector[None, :], 1)
    return products


@triton.jit
def _store_part(
    ptr, offsets, values, present, BEGIN: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, RUNS: tl.constexpr
):
    dims, inside = channels_of(BEGIN, SIZE, DIM, RUNS)
    pointers = ptr + offsets[:, None] + dims[None, :]
    tl.store(pointers, values.to(ptr.dtype.element_ty), mask=present[:, None] & inside[None, :])


@triton.jit
def store_results(
    out_ptr,  # [results, DIM]
    lse_ptr,  # float32 [results], log2; None: not wanted
    index,  # result that a row is, [rows]
    state,  # of `attend_tiles`
    present,
    SHAPE: tl.constexpr,  # of values, as in `Format`
):
    """Normalises and stores what the rows have summed."""
    maximum, total, acc, acc_rest = state
    normaliser, lse = finished(maximum, total)
    offsets = index * SHAPE[0]
    _store_part(out_ptr, offsets, acc * normaliser[:, None], present, 0, SHAPE[1], SHAPE[0], SHAPE[3])
    if SHAPE[2] > 0:
        _store_part(out_ptr, offsets, acc_rest * normaliser[:, None], present, SHAPE[1], SHAPE[2], SHAPE[0], SHAPE[3])
    if lse_ptr is not None:
        tl.store(lse_ptr + index, lse, mask=present)
