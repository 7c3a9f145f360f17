"""The calls of `cases`, over quantized blocks: the same rows in codes, and what they read as."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from hf_paged_kernels import Blocks, KVBlocks, MixedBlocks, ScaledBlocks, StepMetadata, TokenIndex, gather_tokens

from hf_paged_cache.codecs import Geometry, KVQuant, make_codec
from tests.kernels import oracle
from tests.kernels.cases import TOLERANCE, Attention, Case, lay_out, new_states, paged_attention, random_rows
from tests.kernels.hostile import poison_planes, poisoned_blocks

CODECS: dict[str, str | KVQuant] = {
    "int8": "int8",
    "fp8": "fp8",
    "int4": KVQuant("int4", value_group=8),
    "k4v2": KVQuant("k4v2", value_group=8),
    "kivi2": KVQuant("kivi2", value_group=8),
}


def quantized(
    case: Case, rows: list[oracle.Row], kv: str | KVQuant, poison: float = math.nan
) -> tuple[Blocks, StepMetadata, list[oracle.Row]]:
    """The rows in blocks, the step, and the rows as attention has to read them.

    Of codecs that quantize whole blocks about half of the full blocks are codes, at random; all others are exact.
    """
    exact, step = lay_out(case, rows, poison)
    blocks = make_codec(kv).allocate(
        Geometry.of(*(plane.transpose(0, 1) for plane in exact.planes)), *exact.planes[0].shape[2:0:-1]
    )
    poison_planes(blocks)
    if isinstance(blocks, ScaledBlocks):
        stored = step.slots_of(np.arange(step.max_seq_len)[None])
        index = TokenIndex.from_slots(stored, exact)
        for part, states in (("key", exact.key), ("value", exact.value)):
            blocks.write(part, gather_tokens(states, index), index)
        return blocks, step, _as_read(case, rows, blocks, step.block_table)
    in_exact_blocks = poisoned_blocks(
        exact.num_blocks, exact.num_kv_heads, case.block_size, case.dims, exact.key.dtype, poison
    )
    random = np.random.default_rng(case.seed)
    exact_ids = iter(random.permutation(exact.num_blocks).tolist())
    exact_table, codes_table = np.full_like(step.block_table, -1), np.zeros_like(step.block_table)
    for (row, block), block_id in np.ndenumerate(step.block_table):
        if not block_id:
            continue
        end = case.lengths[row] if case.new_from_blocks else case.past_lens[row]
        if (block + 1) * case.block_size <= end and random.random() < 0.5:
            codes_table[row, block] = block_id
            blocks.quantize(exact.key[:, [block_id]], exact.value[:, [block_id]], torch.tensor([int(block_id)]))
        else:
            exact_table[row, block] = next(exact_ids)
            for plane, source in zip(in_exact_blocks.planes, exact.planes, strict=True):
                plane[:, exact_table[row, block]] = source[:, block_id]
    with_exact = StepMetadata(
        block_table=step.block_table,
        exact_table=exact_table,
        seq_lens=step.seq_lens,
        padding=step.padding,
        slots=step.slots,
        num_columns=step.num_columns,
        block_size=step.block_size,
        new_tokens_stored=step.new_tokens_stored,
    )
    return MixedBlocks(blocks, in_exact_blocks), with_exact, _as_read(case, rows, blocks, codes_table)


def _as_read(case: Case, rows: list[oracle.Row], blocks: Blocks, codes_table: np.ndarray) -> list[oracle.Row]:
    """The rows with what their codes say in the place of what was quantized; new tokens stay exact."""
    read = []
    for b, row in enumerate(rows):
        states = oracle.Row(row.key.clone(), row.value.clone())
        for block in codes_table[b].nonzero()[0].tolist():
            first = block * case.block_size
            last = min(first + case.block_size, row.length if case.new_from_blocks else case.past_lens[b])
            for part, tokens in zip(("key", "value"), states, strict=True):
                dense = blocks.read_blocks(part, torch.tensor([codes_table[b, block]]))[:, 0]
                tokens[:, first:last] = dense[:, : max(last - first, 0)]
        read.append(states)
    return read


def attend_quantized(
    case: Case, kv: str | KVQuant, dtype: torch.dtype, attention: Attention = paged_attention
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Output and log-sum-exp of `attention`, then those of the oracle; the output also as it is without the latter."""
    generator = torch.Generator().manual_seed(case.seed)
    rows = random_rows(case, dtype, generator)
    if kv in ("int8", "fp8") and dtype == torch.float32:  # 16 bits hold too little beside a large offset
        for row in rows:
            row.key[..., 1::8] += 12.0
            row.key[:, 2::3, 1::8] -= 12.0  # keys that are without the offset of their block
    query = torch.randn(len(rows), case.query_length, case.heads[0], case.dims[0], generator=generator)
    query = query.to(dtype).transpose(1, 2)
    options = {
        "scale": 2 * case.dims[0] ** -0.5,
        "window": case.window,
        "softcap": case.softcap,
        "sinks": torch.randn(case.heads[0], generator=generator).to(dtype) if case.sinks else None,
        "key_mask": torch.rand(len(rows), max(case.lengths), generator=generator) < 0.6 if case.holes else None,
    }
    blocks, step, as_read = quantized(case, rows, kv)
    expected = oracle.attention(query, as_read, **options)
    new_kv = None if case.new_from_blocks else new_states(case, rows)
    out, lse = attention(query, blocks, step, **options, new_kv=new_kv, return_lse=True)
    yield out, lse, *expected
    yield attention(query, blocks, step, **options, new_kv=new_kv), lse, *expected


def check_quantized(
    case: Case, kv: str | KVQuant, dtype: torch.dtype = torch.float32, attention: Attention = paged_attention
) -> None:
    """Fails unless `attention` is that over what the codes say."""
    tolerance = TOLERANCE[dtype]
    for out, lse, expected_out, expected_lse in attend_quantized(case, kv, dtype, attention):
        assert out.dtype == lse.dtype == dtype
        torch.testing.assert_close(out.double(), expected_out, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse.double(), expected_lse, atol=tolerance, rtol=tolerance)


def exact_copy(blocks: Blocks, step: StepMetadata, rows: list[oracle.Row]) -> KVBlocks:
    """Blocks with the same ids that hold these rows unchanged."""
    dims = (rows[0].key.shape[-1], rows[0].value.shape[-1])
    copy = poisoned_blocks(blocks.num_blocks, blocks.num_kv_heads, step.block_size, dims, rows[0].key.dtype, math.nan)
    for b, row in enumerate(rows):
        for token in range(row.length):
            block, offset = divmod(token, step.block_size)
            for plane, states in zip(copy.planes, row, strict=True):
                plane[:, step.block_table[b, block], offset] = states[:, token]
    return copy
