"""Rows that share the beginning of their tables: one read for all of them, and the result of reading each alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import hf_paged_kernels
import numpy as np
import pytest
import torch
from hf_paged_kernels import KVBlocks, StepMetadata

from tests.kernels import oracle
from tests.kernels.device import on_device
from tests.kernels.hostile import poisoned_blocks
from tests.support.combinations import combined, later

pytest.importorskip("triton")
from hf_paged_kernels.triton import plan, shared
from hf_paged_kernels.triton.shared import find_shared_runs

HEADS = (6, 2)
paged_attention = on_device(hf_paged_kernels.paged_attention)


@pytest.fixture
def always_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches would not be worth it."""
    monkeypatch.setattr(plan, "find_shared_runs", lambda *call: find_shared_runs(*call, min_saved_tokens=1))
    monkeypatch.setattr(shared, "MIN_SAVED_PART", 0.0)


def batch(
    groups: Sequence[tuple[int, Sequence[int]]], block_size: int, dims: tuple[int, int], query_length: int = 1
) -> tuple[KVBlocks, StepMetadata, list[oracle.Row]]:
    """Groups of rows: `(blocks that all of the group share, [tokens each row has of its own, ...])`."""
    generator = torch.Generator().manual_seed(0)
    tails = [tail for _, group in groups for tail in group]
    width = max(blocks + -(-tail // block_size) for blocks, group in groups for tail in group)
    num_blocks = 1 + sum(blocks + sum(-(-tail // block_size) for tail in group) for blocks, group in groups)
    ids = iter(np.random.default_rng(0).permutation(np.arange(1, num_blocks)).tolist())
    blocks = poisoned_blocks(num_blocks, HEADS[1], block_size, dims, torch.float32, math.nan)
    table = np.zeros((len(tails), width), dtype=np.int32)
    rows, lengths = [], []
    for shared_blocks, group in groups:
        run = [next(ids) for _ in range(shared_blocks)]
        for tail in group:
            own = [next(ids) for _ in range(-(-tail // block_size))]
            length = shared_blocks * block_size + tail
            table[len(rows), : len(run + own)] = run + own
            parts = []
            for plane, dim in zip(blocks.planes, dims, strict=True):
                for position, block_id in enumerate(run + own):
                    count = min(block_size, length - position * block_size)
                    if plane[:, block_id, :count].isnan().any():
                        plane[:, block_id, :count] = torch.randn(HEADS[1], count, dim, generator=generator)
                parts.append(torch.cat([plane[:, block_id] for block_id in run + own], dim=1)[:, :length])
            rows.append(oracle.Row(*parts))
            lengths.append(length)
    seq_lens = np.array(lengths, dtype=np.int32)
    step = StepMetadata(
        block_table=table,
        seq_lens=seq_lens,
        padding=seq_lens.max() - seq_lens,
        slots=np.zeros((len(rows), query_length), dtype=np.int32),
        num_columns=int(seq_lens.max()),
        block_size=block_size,
        new_tokens_stored=True,
    )
    return blocks, step, rows


GROUPS = {
    "four beams": [(3, [5, 7, 1, 16])],
    "more rows than a program takes": [(2, [3] * 12)],
    "two prompts of different lengths": [(1, [2, 30]), (3, [4, 4, 4])],
    "a row that shares nothing": [(0, [40]), (2, [1, 9]), (0, [3])],
}


@pytest.mark.usefixtures("always_shared")
@combined(
    quick=1,
    groups=GROUPS,
    query_length=[2, *later(1)],
    shape=[(16, (48, 24)), *later((64, (80, 80)))],
    has_features=[True, *later(False)],
)
def test_sharing_has_no_influence(groups, query_length, shape, has_features) -> None:
    block_size, dims = shape
    groups = [(blocks, [tail + query_length for tail in tails]) for blocks, tails in groups]
    blocks, step, rows = batch(groups, block_size, dims, query_length)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(len(rows), HEADS[0], query_length, dims[0], generator=generator)
    features = {"softcap": 2.0, "sinks": torch.randn(HEADS[0], generator=generator)}
    options = {"scale": 0.3, **(features if has_features else {})}
    out, lse = paged_attention(query, blocks, step, **options, return_lse=True, backend="triton")
    expected_out, expected_lse = oracle.attention(query, rows, **options)
    torch.testing.assert_close(out.double(), expected_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("always_shared")
def test_shared_runs_are_split_where_a_card_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "processors", lambda device: 32)
    monkeypatch.setattr(plan, "MIN_SPLIT_LENGTH", 16)
    blocks, step, rows = batch([(5, [5, 70, 1]), (0, [90])], 16, (16, 16))
    query = torch.randn(len(rows), HEADS[0], 1, 16, generator=torch.Generator().manual_seed(1))
    out = paged_attention(query, blocks, step, scale=0.3, backend="triton")
    torch.testing.assert_close(out.double(), oracle.attention(query, rows, scale=0.3)[0], atol=1e-5, rtol=1e-5)


def test_a_run_is_shared_when_that_saves_enough() -> None:
    def runs(shared_blocks: int, num_rows: int, tail: int, **options: int) -> shared.SharedRuns | None:
        _, step, _ = batch([(shared_blocks, [tail] * num_rows)], 16, (16, 16))
        return find_shared_runs(step, 8, 2, **options)

    assert runs(40, 4, 10) is None  # 2 KV heads times 3 * 640 tokens
    found = runs(40, 4, 10, min_saved_tokens=3000)
    assert found.first_tokens.tolist() == [640] * 4
    assert found.tile_rows.tolist() == [[0, 1, 2, 3, -1, -1, -1, -1]]
    assert runs(1, 2, 100, min_saved_tokens=1) is None  # saves 16 of 232 tokens
    assert runs(40, 1, 10, min_saved_tokens=1) is None


def test_rows_share_what_lies_in_full_blocks_before_the_new_tokens() -> None:
    """A table row is shared up to the first block that differs, or that some row still writes to."""
    _, step, _ = batch([(3, [16, 20])], 16, (16, 16))
    step.block_table[1, 3] = step.block_table[0, 3]
    found = find_shared_runs(step, 8, 2, min_saved_tokens=1)
    assert found.first_tokens.tolist() == [48, 48]  # the fourth block is the same, but row 0 has only now filled it


@pytest.mark.usefixtures("always_shared")
def test_fresh_keys_beside_a_shared_run() -> None:
    blocks, step, rows = batch([(2, [3, 5])], 16, (16, 16), query_length=2)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, HEADS[0], 2, 16, generator=generator)
    new = [torch.stack([states[:, -2:] for states in part]) for part in zip(*rows, strict=True)]
    for plane in blocks.planes:  # what is fresh is not read from the blocks
        for row, length in enumerate(step.seq_lens.tolist()):
            for token in (length - 2, length - 1):
                plane[:, step.block_table[row, token // 16], token % 16] = 1e30
    out = paged_attention(query, blocks, step, scale=0.3, new_kv=tuple(new), backend="triton")
    torch.testing.assert_close(out.double(), oracle.attention(query, rows, scale=0.3)[0], atol=1e-5, rtol=1e-5)


def test_a_batch_that_shares_nothing_is_seen_at_once() -> None:
    _, step, _ = batch([(0, [40]), (0, [40])], 16, (16, 16))
    assert find_shared_runs(step, 8, 2, min_saved_tokens=0) is None
