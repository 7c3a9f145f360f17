"""Attention of the new tokens to the tokens of their rows: past ones in blocks, new ones in blocks or fresh.

One kernel serves decoding (few queries, the keys split over many programs) and extending (many queries, past keys in
blocks, fresh keys beside them). A program takes a tile of rows, query tokens times the heads of one group, so that
each key is read once for all of them.

    grid   query tiles * splits | KV heads | batch       rows of a program, 3 heads a group: q0h0 q0h1 q0h2 q1h0 ..

    keys   | before the window |  window's edge  |   seen by all queries   |  diagonal, tail  |
             not read             masked tiles      tiles without a mask      masked tiles

Splits divide what the program sees, not the sequence, so that a window over a long sequence keeps all of them busy.

Where a row reads some of its blocks as codes in groups, these are one run of blocks and have a loop of their own. All
tiles have a mask then: beside turning codes into operands it costs nothing.
"""

import triton
import triton.language as tl

from hf_paged_kernels.triton.rows import load_query, store_results
from hf_paged_kernels.triton.softmax import with_sink
from hf_paged_kernels.triton.tiles import attend_tiles, nothing_seen


@triton.jit(do_not_specialize=["table_width", "mask_width", "query_length", "split_length", "num_splits", "all_splits"])
def attend_kernel(
    query_ptr,  # [batch, num_heads, query_length, KEY_DIM]
    key_ptr,  # [num_kv_heads, num_slots, KEY_DIM], in the model's dtype or of 8-bit codes
    value_ptr,  # [num_kv_heads, num_slots, VALUE_DIM]
    codes,  # besides: `None`, scales of 8-bit codes and offsets of keys, or all planes of `GroupedBlocks`
    new_key_ptr,  # [batch, num_kv_heads, query_length, KEY_DIM]; None: the new tokens are in the blocks
    new_value_ptr,  # [batch, num_kv_heads, query_length, VALUE_DIM]
    block_table_ptr,  # int32 [batch, table_width]
    seq_lens_ptr,  # int32 [batch]
    quantized_table_ptr,  # int32 [batch, table_width], where blocks are read as codes in groups; None: nowhere
    quantized_ranges_ptr,  # int32 [batch, 2], first token that is so read, and the one after the last
    first_tokens_ptr,  # int32 [batch], tokens that are left to another pass; None
    key_mask_ptr,  # uint8 [batch, mask_width]; None
    sinks_ptr,  # [num_heads]; None
    out_ptr,  # [batch, query_length, num_heads, VALUE_DIM], or of partials [.., all_splits, VALUE_DIM]
    lse_ptr,  # float32 [batch, query_length, num_heads], or of partials [.., all_splits]; in log2. None: not wanted
    scale_log2,
    num_slots,
    num_quantized_slots,
    table_width,
    mask_width,
    query_length,
    split_length,  # tokens a split, a multiple of TILE
    num_splits,  # splits of this launch
    all_splits,  # partials of a row in `out_ptr`; those of another pass come first
    query_strides,  # (batch, head, token)
    new_key_strides,
    new_value_strides,
    KEY: tl.constexpr,  # shape of keys, of values, and what stands in the blocks, as in `Format`
    VALUE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a KV head
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0.0: none
    IS_PARTIAL: tl.constexpr,  # partial results are to be merged
    ONE_QUERY: tl.constexpr,  # query_length is 1
):
    RAW: tl.constexpr = ("raw",)
    IS_GROUPED: tl.constexpr = FORMAT[0] == "grouped"
    QUERIES: tl.constexpr = ROWS // GROUP
    HAS_NEW: tl.constexpr = new_key_ptr is not None
    HAS_KEY_MASK: tl.constexpr = key_mask_ptr is not None
    # One query sees all from `first` to `last`.
    DIFFERING: tl.constexpr = HAS_KEY_MASK or not ONE_QUERY
    split = tl.program_id(0) % num_splits
    # The last query tiles have the most keys, so they start first.
    query_tile = tl.num_programs(0) // num_splits - 1 - tl.program_id(0) // num_splits
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)

    row = tl.arange(0, ROWS)
    first_query = query_tile * QUERIES
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    present = (row < QUERIES * GROUP) & (query < query_length)
    seq_len = tl.load(seq_lens_ptr + batch)
    shift = seq_len - query_length  # from a query to its token; negative where the row has leading padding
    first_seen_token = tl.load(first_tokens_ptr + batch) if first_tokens_ptr is not None else 0

    first_position = first_query + shift
    last_position = tl.minimum(first_query + QUERIES, query_length) - 1 + shift
    window_of_first = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    window_of_last = tl.maximum(last_position - WINDOW + 1, 0) if WINDOW > 0 else 0

    # Keys in blocks: first .. last - 1, of which all queries see those of the interior.
    first = tl.maximum(window_of_first, first_seen_token)
    last = tl.maximum(shift if HAS_NEW else last_position + 1, 0)
    interior_begin = tl.cdiv(tl.maximum(window_of_last, first), TILE) * TILE
    interior_end = tl.minimum(tl.maximum(first_position + 1, 0), last) // TILE * TILE
    if HAS_KEY_MASK:
        interior_end = 0
    interior_end = tl.maximum(interior_end, interior_begin)
    begin = first // TILE * TILE + split * split_length
    end = tl.minimum(begin + split_length, last)

    wide_batch = batch.to(tl.int64)
    q, q_rest = load_query(query_ptr, query_strides, wide_batch, head, query, present, KEY)
    state = nothing_seen(ROWS, VALUE)

    wide_kv_head = kv_head.to(tl.int64)
    head_slots = wide_kv_head * num_slots
    table = block_table_ptr + wide_batch * table_width
    mask = key_mask_ptr
    if HAS_KEY_MASK:
        mask = key_mask_ptr + wide_batch * mask_width
    position = query + shift

    # Without codes in groups the gap is the interior, which is seen by all queries, and needs no mask.
    gap_begin, gap_end = interior_begin, interior_end
    if IS_GROUPED:
        gap_begin, gap_end = tl.load(quantized_ranges_ptr + 2 * batch), tl.load(quantized_ranges_ptr + 2 * batch + 1)
        quantized_first, quantized_last = tl.maximum(first, gap_begin), tl.minimum(last, gap_end)
    gap_begin = tl.minimum(tl.maximum(begin, gap_begin), end)
    gap_end = tl.minimum(tl.maximum(begin, gap_end), end)
    if IS_GROUPED:
        KEY_WORDS: tl.constexpr = KEY[0] // KEY[3] * 8 // codes[0].dtype.element_ty.primitive_bitwidth
        VALUE_WORDS: tl.constexpr = VALUE[0] // VALUE[3] * 8 // codes[1].dtype.element_ty.primitive_bitwidth
        quantized_slots = wide_kv_head * num_quantized_slots
        quantized_table = quantized_table_ptr + wide_batch * table_width
        state = attend_tiles(
            state, q, q_rest, position, gap_begin, gap_end, gap_end, gap_end, quantized_first, quantized_last,
            codes[0] + quantized_slots * KEY_WORDS, codes[1] + quantized_slots * VALUE_WORDS, KEY_WORDS, VALUE_WORDS,
            (
                codes[2] + quantized_slots // FORMAT[3] * KEY[0],
                codes[3] + quantized_slots // FORMAT[3] * KEY[0],
                codes[4] + quantized_slots * (VALUE[0] // FORMAT[4]),
                codes[5] + quantized_slots * (VALUE[0] // FORMAT[4]),
            ),
            quantized_table, mask, scale_log2,
            KEY, VALUE, FORMAT, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, HAS_KEY_MASK, True, DIFFERING,
        )  # fmt: skip
    IN_BLOCKS: tl.constexpr = RAW if IS_GROUPED else FORMAT
    scales = ()
    if FORMAT[0] == "int8" or FORMAT[0] == "fp8":
        scales = (codes[0] + head_slots, codes[1] + head_slots)
        if FORMAT[2]:
            scales = (codes[0] + head_slots, codes[1] + head_slots, codes[2] + head_slots // BLOCK_SIZE * KEY[0])
    key_base = key_ptr + head_slots * KEY[0]
    value_base = value_ptr + head_slots * VALUE[0]
    state = attend_tiles(
        state, q, q_rest, position, begin, end, gap_begin, gap_end, first, last,
        key_base, value_base, KEY[0], VALUE[0], scales, table, mask, scale_log2,
        KEY, VALUE, IN_BLOCKS, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, HAS_KEY_MASK, True, DIFFERING,
    )  # fmt: skip
    if not HAS_KEY_MASK and not IS_GROUPED:
        state = attend_tiles(
            state, q, q_rest, position, gap_begin, gap_end, gap_end, gap_end, first, last,
            key_base, value_base, KEY[0], VALUE[0], scales, table, mask, scale_log2,
            KEY, VALUE, IN_BLOCKS, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, HAS_KEY_MASK, False, DIFFERING,
        )  # fmt: skip

    if HAS_NEW:
        # Fresh keys in the numbering of queries; the last split takes them.
        first = tl.maximum(tl.maximum(-shift, 0), window_of_first - shift)
        last = tl.minimum(first_query + QUERIES, query_length)
        interior_begin = tl.cdiv(tl.maximum(first, window_of_last - shift), TILE) * TILE
        interior_end = tl.maximum((first_query + 1) // TILE * TILE, interior_begin)
        if HAS_KEY_MASK:
            interior_begin = 0
            interior_end = 0
        begin = first // TILE * TILE
        end = tl.where(split == num_splits - 1, last, begin)
        interior_begin = tl.minimum(tl.maximum(begin, interior_begin), end)
        interior_end = tl.minimum(tl.maximum(begin, interior_end), end)
        key_base = new_key_ptr + wide_batch * new_key_strides[0] + wide_kv_head * new_key_strides[1]
        value_base = new_value_ptr + wide_batch * new_value_strides[0] + wide_kv_head * new_value_strides[1]
        if HAS_KEY_MASK:
            mask = mask + shift
        state = attend_tiles(
            state, q, q_rest, query, begin, end, interior_begin, interior_end, first, last,
            key_base, value_base, new_key_strides[2], new_value_strides[2], (), table, mask, scale_log2,
            KEY, VALUE, RAW, 0, TILE, WINDOW, SOFTCAP, HAS_KEY_MASK, True, DIFFERING,
        )  # fmt: skip
        if not HAS_KEY_MASK:
            state = attend_tiles(
                state, q, q_rest, query, interior_begin, interior_end, interior_end, interior_end, first, last,
                key_base, value_base, new_key_strides[2], new_value_strides[2], (), table, mask, scale_log2,
                KEY, VALUE, RAW, 0, TILE, WINDOW, SOFTCAP, HAS_KEY_MASK, False, DIFFERING,
            )  # fmt: skip

    if sinks_ptr is not None and not IS_PARTIAL:
        maximum, total, acc, acc_rest = state
        factor, maximum, total = with_sink(tl.load(sinks_ptr + head, mask=present, other=0.0), maximum, total)
        acc = acc * factor[:, None]
        if VALUE[2] > 0:
            acc_rest = acc_rest * factor[:, None]
        state = maximum, total, acc, acc_rest
    index = (wide_batch * query_length + query) * (tl.num_programs(1) * GROUP) + head
    if IS_PARTIAL:
        index = index * all_splits + (all_splits - num_splits) + split
    store_results(out_ptr, lse_ptr, index, state, present, VALUE)
