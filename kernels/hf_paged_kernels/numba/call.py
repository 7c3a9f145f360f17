"""What a call of the attention kernel is told: one record of 8-byte fields, in memory that its threads share.

The fields come in sections, in the order in which `attention.py` fills them: what is the same for all layers of a step
is put together once a step. Addresses are those of C-contiguous arrays.
"""

from functools import lru_cache
from struct import pack, unpack

import numpy as np
import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Of keys and values that are no codes, as kernels are told them."""

# Counters, from which threads take what they do next.
COUNTERS = ("next_piece", "next_scratch")

# The same for all layers of a step.
STEP = (
    "pieces",  # int64 [num_pieces, len(PIECE)]
    "num_pieces",
    "query_length",
    "table",  # int32 [batch, max_blocks], of codes, or of exact blocks where there are no codes
    "exact_table",  # int32 [batch, max_blocks], -1 where a row reads codes; 0 if there is none
    "max_blocks",
    "key_mask",  # bool [batch, max_seq_len]; 0 for none
    "key_mask_stride",
    "window",  # 0 for none
    "num_kv_heads",
    "group",  # query heads a KV head
    "block_size",
)

# Memory of a call, the same for many one after the other.
WORKSPACE = (
    "scratch",
    "scratch_bytes",  # of one thread
    "partials",  # float32 [num_partial_rows, 2 + value width]: see `attend.py`
    "finished",  # int64 [num_units], pieces of a unit that are done; 0 before a call and after it
)

# Of a layer and a call.
LAYER = (
    "num_blocks",
    "num_exact_blocks",
    "sinks",  # float32 [num_heads]; 0 for none
    "query",  # float32 [batch, num_heads, query_length, key dim]
    "query_batch",  # strides
    "query_head",
    "query_token",
    "out",  # float32 [batch, query_length, num_heads, value dim]
    "lse",  # float32 [batch, num_heads, query_length]; 0: not wanted
)
FLOATS = ("scale", "softcap")  # float64; softcap 0 for none

# Of keys, then of values.
PART = (
    "exact",  # in the dtype of the model; 0 if there are none
    "codes",  # 0 if there are none
    "scale",
    "zero",  # 0: codes have a scale for each token
    "offset",  # of each channel of a block, added to what codes with a scale for each token say; 0 for none
    "fresh",  # new tokens that are not in blocks
    "fresh_batch",  # strides
    "fresh_head",
    "fresh_token",
    "dim",
    "width",  # `dim` in whole vectors
    "dtype",  # of exact and fresh ones, see `DTYPES`
    "bits",  # of a code; 0: e4m3
    "group",  # of codes that have scale and zero for several tokens or channels
)

_PART_TYPE = np.dtype([(name, np.int64) for name in PART])
CALL = np.dtype(
    [(name, np.int64) for name in (*COUNTERS, *STEP, *WORKSPACE, *LAYER)]
    + [(name, np.float64) for name in FLOATS]
    + [("key", _PART_TYPE), ("value", _PART_TYPE)],
    align=True,
)

PIECE = (
    "row",
    "kv_head",
    "first_query",
    "end_query",
    "first",  # keys first .. last - 1
    "last",
    "fresh_from",  # tokens from here on are not in blocks
    "unit",  # which pieces belong together: those for the same queries
    "partial",  # where the parts of the unit begin in `partials`, in rows
    "num_parts",
    "past",  # tokens of the row before its first query, negative if it begins with padding
    "part",  # place among the parts of the unit
)
"""Columns of a piece of work: some keys for some queries of a row and the heads of a group."""
PIECE_TYPE = np.dtype([(name, np.int64) for name in PIECE])


@lru_cache(maxsize=1024)
def bits_of(number: float) -> int:
    """A float64 as the integer of the same bits."""
    return unpack("q", pack("d", number))[0]
