"""Keys that several rows of a batch share are read once for all of them: beams, samples, a common system prompt.

Rows whose tables begin with the same blocks hold the same tokens there. A first pass attends to that run with the
queries of all these rows in one tile, a second one to what each row has of its own, and the two are merged by their
log-sum-exp. Also known as cascade attention (FlashInfer) and Hydragen (Juravsky et al.).

    rows     0: [ a b c d | e ]      first pass:   queries of 0 1 2 on a b c d     (a b c d read once, not 3 times)
             1: [ a b c d | f ]      second pass:  0 on e, 1 on f, 2 on g h
             2: [ a b c d | g h ]
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from hf_paged_kernels.step import StepMetadata, upload
from hf_paged_kernels.triton.rows import load_query, store_results
from hf_paged_kernels.triton.tiles import attend_tiles, nothing_seen

# A second pass costs a launch, and partial results that are written and read again. It has to save as many tokens as
# are read in that time: about 5 us at 2 TB/s, for one KV head of 128 in 16 bits some 20,000, and a quarter of all that
# is read. Computed, not timed on a card.
MIN_SAVED_TOKENS = 20_000
MIN_SAVED_PART = 0.25


@dataclass(frozen=True, eq=False)
class SharedRuns:
    """The leading runs of a step that several rows share.

    Attributes:
        tile_rows: int32 `[tiles, sequences]`, the rows that a program takes together; -1 for none.
        tile_lengths: int32 `[tiles]`, tokens of their shared run, a multiple of the block size.
        first_tokens: int32 `[batch]`, the first token of each row that is left to the second pass.
    """

    tile_rows: np.ndarray
    tile_lengths: np.ndarray
    first_tokens: np.ndarray

    def on(self, device: torch.device) -> list[torch.Tensor]:
        """The three on `device`, by one upload."""
        return upload((self.tile_rows, self.tile_lengths, self.first_tokens), device)


def find_shared_runs(
    step: StepMetadata, sequences: int, num_kv_heads: int, *, min_saved_tokens: int = MIN_SAVED_TOKENS
) -> SharedRuns | None:
    """The shared runs of a step, if reading them once saves enough.

    Args:
        step: the forward pass.
        sequences: rows that one program can take together.
        num_kv_heads: KV heads of the layer, each of which saves the tokens.
        min_saved_tokens: tokens times KV heads that have to be saved.
    """
    if step.batch == 1:
        return None
    table, size = step.block_table, step.block_size
    first_blocks, group_of_row, group_sizes = np.unique(table[:, 0], return_inverse=True, return_counts=True)
    is_shared = (first_blocks != 0) & (group_sizes > 1)
    if not is_shared.any():
        return None
    full_blocks = step.past_lens // size
    first_tokens = np.zeros(step.batch, dtype=np.int32)
    tiles: list[tuple[np.ndarray, int]] = []
    saved = 0
    for group in np.flatnonzero(is_shared):
        rows = np.flatnonzero(group_of_row == group)
        width = int(full_blocks[rows].min())
        differs = (table[rows, :width] != table[rows[0], :width]).any(axis=0)
        length = (int(differs.argmax()) if differs.any() else width) * size
        num_tiles = -(-len(rows) // sequences)
        if length == 0 or num_tiles == len(rows):
            continue
        saved += length * (len(rows) - num_tiles)
        first_tokens[rows] = length
        tiles += [(rows[start : start + sequences], length) for start in range(0, len(rows), sequences)]
    if not tiles or saved * num_kv_heads < min_saved_tokens or saved < MIN_SAVED_PART * int(step.seq_lens.sum()):
        return None
    tile_rows = np.full((len(tiles), sequences), -1, dtype=np.int32)
    for tile, (rows, _) in zip(tile_rows, tiles, strict=True):
        tile[: len(rows)] = rows
    return SharedRuns(tile_rows, np.array([length for _, length in tiles], dtype=np.int32), first_tokens)


@triton.jit(do_not_specialize=["table_width", "query_length", "split_length", "num_splits", "all_splits"])
def attend_shared_kernel(
    query_ptr,  # [batch, num_heads, query_length, KEY_DIM]
    key_ptr,  # [num_kv_heads, num_slots, KEY_DIM]
    value_ptr,  # [num_kv_heads, num_slots, VALUE_DIM]
    block_table_ptr,  # int32 [batch, table_width]
    tile_rows_ptr,  # int32 [tiles, SEQUENCES]; -1: none
    tile_lengths_ptr,  # int32 [tiles]
    partial_ptr,  # float32 [batch, query_length, num_heads, all_splits, VALUE_DIM]
    partial_lse_ptr,  # float32 [batch, query_length, num_heads, all_splits]
    scale_log2,
    num_slots,
    table_width,
    query_length,
    split_length,
    num_splits,
    all_splits,
    query_strides,  # (batch, head, token)
    KEY: tl.constexpr,  # shape of keys, of values, and what stands in the blocks, as in `Format`
    VALUE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attention of several sequences to the run that they share. Grid: tiles * splits | KV heads."""
    tile = tl.program_id(0) // num_splits
    split = tl.program_id(0) % num_splits
    kv_head = tl.program_id(1)

    row = tl.arange(0, ROWS)
    queries_each = query_length * GROUP
    sequence = row // queries_each
    batch = tl.load(tile_rows_ptr + tile * SEQUENCES + sequence, mask=sequence < SEQUENCES, other=-1)
    present = batch >= 0
    batch = tl.where(present, batch, 0).to(tl.int64)
    query = row % queries_each // GROUP
    head = kv_head * GROUP + row % GROUP
    length = tl.load(tile_lengths_ptr + tile)
    begin = split * split_length
    end = tl.minimum(begin + split_length, length)

    q, q_rest = load_query(query_ptr, query_strides, batch, head, query, present, KEY)
    state = nothing_seen(ROWS, VALUE)

    head_slots = kv_head.to(tl.int64) * num_slots
    key_base = key_ptr + head_slots * KEY[0]
    value_base = value_ptr + head_slots * VALUE[0]
    table = block_table_ptr + tl.load(tile_rows_ptr + tile * SEQUENCES) * table_width
    interior_end = end // TILE * TILE
    everyone_sees = length + query  # the run lies before every query
    state = attend_tiles(
        state, q, q_rest, everyone_sees, begin, interior_end, interior_end, interior_end, 0, length,
        key_base, value_base, KEY[0], VALUE[0], (), table, None, scale_log2,
        KEY, VALUE, FORMAT, BLOCK_SIZE, TILE, 0, SOFTCAP, False, False, False,
    )  # fmt: skip
    tail = tl.maximum(begin, interior_end)
    state = attend_tiles(
        state, q, q_rest, everyone_sees, tail, end, tail, tail, 0, length,
        key_base, value_base, KEY[0], VALUE[0], (), table, None, scale_log2,
        KEY, VALUE, FORMAT, BLOCK_SIZE, TILE, 0, SOFTCAP, False, True, False,
    )  # fmt: skip

    index = ((batch * query_length + query) * (tl.num_programs(1) * GROUP) + head) * all_splits + split
    store_results(partial_ptr, partial_lse_ptr, index, state, present, VALUE)
