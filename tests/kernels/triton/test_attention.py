"""The Triton kernels against the definition, interpreted where there is no GPU.

The interpreter takes its time by the operation. So the quick run has few shapes, the slow one has pairs of values, and
the full products are evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from hf_paged_kernels import KVBlocks, StepMetadata, paged_attention

from tests.kernels.cases import (
    BLOCK_SIZES,
    DIMS,
    FEATURES,
    HEADS,
    LENGTHS,
    Case,
    attend,
    lay_out,
    matrix,
    new_states,
    random_rows,
)
from tests.kernels.cases import (
    check as check_each_way,
)
from tests.kernels.device import ON_CARD, on_device
from tests.kernels.hostile import poisoned_blocks
from tests.support.combinations import Later, combined, later

triton_kernels = pytest.importorskip("hf_paged_kernels.triton")
plan = pytest.importorskip("hf_paged_kernels.triton.plan")
check = partial(check_each_way, each_way=ON_CARD)


def attention(*inputs: torch.Tensor | KVBlocks | StepMetadata, num_splits: int | None = None, **options: object):
    """The Triton kernels, with as many splits as they choose, or with `num_splits`."""
    if num_splits is None:
        return on_device(paged_attention)(*inputs, **options, backend="triton")
    return on_device(triton_kernels.paged_attention)(*inputs, **options, num_splits=num_splits)


def mostly_later(values: Sequence[object], *chosen: object) -> list[object]:
    """All `values`, of which those that are not `chosen` run with the slow tests."""
    return [value if value in chosen else Later(value) for value in values]


@combined(quick=1, heads=mostly_later(HEADS, (4, 4), (7, 1), (9, 3), (64, 1)), query_length=[1, *later(9)])
def test_head_ratios(heads, query_length):
    check(Case(heads=heads, query_length=query_length, lengths=(21, 34)), attention=attention)


@combined(
    quick=1,
    dims=mostly_later([*DIMS, (112, 112), (512, 512)], (40, 40), (96, 96), (192, 128), (16, 48), (512, 512)),
    query_length=[9, *later(1)],
)
def test_key_and_value_widths(dims, query_length):
    check(Case(dims=dims, heads=(3, 1), lengths=(20, 33), query_length=query_length), attention=attention)


@combined(
    quick=1,
    slow=2,
    block_size=mostly_later(BLOCK_SIZES, 16, 64, 24),
    beyond=[0, 1, *later(-1)],
    query_length=[1, *later(33)],
)
def test_lengths_around_a_block_edge(block_size, beyond, query_length):
    length = min(2 * block_size, 128) + beyond
    case = Case(block_size=block_size, lengths=(length, length - 5), query_length=query_length)
    check(case, attention=attention)


@combined(
    quick=1,
    slow=2,
    num_splits=[3, *later(1, 2, 64)],
    lengths=[(40, 0, 3, 130), *later((137, 64))],
    window=[40, *later(None)],
)
def test_splits_have_no_influence(num_splits, lengths, window):
    """More splits than there are tiles, and splits that see nothing, included."""
    case = Case(lengths=lengths, query_length=2, window=window, sinks=True, block_size=32, heads=(6, 2))
    check(case, attention=partial(attention, num_splits=num_splits))


@combined(
    slow=2,
    lengths=mostly_later(LENGTHS, (1,), (33, 64), (0, 20)),
    query_length=[1, 9],
    window=[17, *later(None, 1)],
    new_from_blocks=[False, True],
)
def test_windows_and_rows_of_any_length(lengths, query_length, window, new_from_blocks):
    case = Case(lengths=lengths, query_length=query_length, window=window, new_from_blocks=new_from_blocks)
    check(case, attention=partial(attention, num_splits=2))


@combined(
    quick=1,
    slow=2,
    features=mostly_later(FEATURES, *FEATURES[1:4], FEATURES[-1]),
    lengths=[(40, 17, 3), *later((0, 0))],
    query_length=[1, 9],
    num_splits=[2, *later(1)],
)
def test_softcap_sinks_and_holes(features, lengths, query_length, num_splits):
    case = Case(lengths=lengths, query_length=query_length, window=10, heads=(6, 2), **features)
    check(case, attention=partial(attention, num_splits=num_splits))


@combined(slow=2, dtype=[torch.bfloat16, torch.float16], query_length=[1, 9], num_splits=[2, *later(1)])
def test_16_bit_error_is_a_few_roundings_of_the_largest_value(dtype, query_length, num_splits):
    case = Case(lengths=(40, 17), query_length=query_length, heads=(6, 2), dims=(64, 64), sinks=True)
    largest = max(float(row.value.abs().max()) for row in random_rows(case, dtype, torch.Generator().manual_seed(0)))
    run = partial(attention, num_splits=num_splits)
    for out, lse, expected_out, expected_lse in attend(case, dtype, run, each_way=ON_CARD):
        assert out.dtype == dtype
        assert float((out.double() - expected_out).abs().max()) <= 2 * torch.finfo(dtype).eps * largest
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.evidence
@pytest.mark.parametrize("lengths", [(5, 40, 33), (0, 20)], ids=str)
@pytest.mark.parametrize("query_length", [1, 33])
@pytest.mark.parametrize("window", [None, 17])
def test_features_together(lengths, query_length, window):
    """Every feature and both sources of the new tokens; heads, widths and block sizes take turns."""
    for case in matrix(lengths, query_length, window):
        check(case, attention=attention)


@pytest.mark.parametrize("query_length", [1, 9])
@pytest.mark.parametrize("block_size", [16, 64])
def test_entries_of_the_table_behind_a_row_are_not_read(query_length, block_size):
    case = Case(lengths=(40, 70), query_length=query_length, block_size=block_size, new_from_blocks=True)
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    query = torch.randn(2, 2, query_length, 16, generator=torch.Generator().manual_seed(1))
    blocks, step = lay_out(case, rows, math.nan)
    expected = attention(query, blocks, step, scale=0.3)
    beyond = np.full((2, 3), 2**30, dtype=np.int32)
    step.block_table = np.concatenate([step.block_table, beyond], axis=1)
    step.block_table[0, -(-40 // block_size) :] = 2**30
    step._memo.clear()
    assert torch.equal(attention(query, blocks, step, scale=0.3), expected)


@pytest.mark.slow
@pytest.mark.parametrize("query_length", [1, 9])
def test_offsets_beyond_32_bits(query_length):
    """A pool whose second head begins behind 2**31 elements, of which hardly any is ever touched."""
    case = Case(lengths=(40, 17), query_length=query_length, heads=(4, 2), block_size=64)
    rows = random_rows(case, torch.float16, torch.Generator().manual_seed(0))
    query = torch.randn(2, 4, query_length, 16, generator=torch.Generator().manual_seed(1)).half()
    small, step = lay_out(case, rows, 0.0)
    expected = attention(query, small, step, scale=0.3, new_kv=new_states(case, rows))
    num_blocks = 2**31 // (64 * 16) + 8
    wide = KVBlocks(*(torch.empty(2, num_blocks, 64, 16, dtype=torch.float16) for _ in range(2)))
    shift = num_blocks - small.num_blocks
    for plane, source in zip(wide.planes, small.planes, strict=True):
        plane[:, shift:] = source
    step.block_table = np.where(step.block_table > 0, step.block_table + shift, 0).astype(np.int32)
    step._memo.clear()
    assert torch.equal(attention(query, wide, step, scale=0.3, new_kv=new_states(case, rows)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("far", ["query", "key", "value"])
def test_heads_of_new_tokens_that_lie_far_apart(far):
    """Views whose last head begins behind 2**31 elements."""

    def spread(states: torch.Tensor, is_far: bool) -> torch.Tensor:
        if not is_far:
            return states
        _, heads, tokens, dim = states.shape
        stride = 2**30 + 64
        memory = torch.empty((heads - 1) * stride + tokens * dim, dtype=states.dtype)
        return memory.as_strided(states.shape, (heads * stride, stride, dim, 1)).copy_(states)

    case = Case(lengths=(40,), query_length=9, heads=(3, 3))
    rows = random_rows(case, torch.float16, torch.Generator().manual_seed(0))
    query = torch.randn(1, 3, 9, 16, generator=torch.Generator().manual_seed(1)).half()
    key, value = new_states(case, rows)
    blocks, step = lay_out(case, rows, 0.0)
    expected = attention(query, blocks, step, scale=0.3, new_kv=(key, value))
    new_kv = (spread(key, far == "key"), spread(value, far == "value"))
    assert torch.equal(attention(spread(query, far == "query"), blocks, step, scale=0.3, new_kv=new_kv), expected)


def a_call(lengths: tuple[int, ...] = (40, 17)) -> tuple[torch.Tensor, KVBlocks, StepMetadata]:
    case = Case(lengths=lengths, heads=(4, 2), new_from_blocks=True)
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    query = torch.randn(len(lengths), 4, 1, 16, generator=torch.Generator().manual_seed(1))
    return query, *lay_out(case, rows, 0.0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("num_splits", [1, 2, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(num_splits, value):
    query, blocks, step = a_call()
    blocks.key[:, step.block_table[0, 0], 3] = value
    expected = paged_attention(query, blocks, step, scale=0.3, backend="reference").isnan()
    assert expected.any()
    assert torch.equal(attention(query, blocks, step, scale=0.3, num_splits=num_splits).isnan(), expected)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_sinks_may_be_any_view(num_splits):
    query, blocks, step = a_call()
    for sinks in (torch.tensor([1.0, 9.0, -2.0, 9.0, 0.5, 9.0, 3.0, 9.0])[::2], torch.ones(1).expand(4)):
        expected = paged_attention(query, blocks, step, scale=0.3, sinks=sinks, backend="reference")
        out = attention(query, blocks, step, scale=0.3, sinks=sinks, num_splits=num_splits)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_sinks_that_take_nothing_of_rows_that_see_nothing(num_splits):
    query, blocks, step = a_call((40, 0))
    sinks = torch.full((4,), -math.inf)
    expected = paged_attention(query, blocks, step, scale=0.3, sinks=sinks, backend="reference")
    out = attention(query, blocks, step, scale=0.3, sinks=sinks, num_splits=num_splits)
    torch.testing.assert_close(out, expected)


@combined(new_from_blocks=[False, *later(True)], window=[40, *later(None)])
def test_a_prompt_in_chunks_is_split_where_a_card_has_room(monkeypatch, new_from_blocks, window):
    monkeypatch.setattr(plan, "processors", lambda device: 32)
    monkeypatch.setattr(plan, "MIN_SPLIT_LENGTH", 16)
    case = Case(lengths=(130, 40), query_length=9, heads=(6, 2), window=window, new_from_blocks=new_from_blocks)
    check(case, attention=attention)


def test_groups_that_do_not_fit_in_a_program_are_refused():
    def reason(heads: int, dim: int) -> str | None:
        blocks = poisoned_blocks(2, 1, 16, (dim, dim), torch.float16, 0.0)
        return triton_kernels.unsupported_reason(torch.empty(1, heads, 1, dim, dtype=torch.float16), blocks)

    assert reason(71, 64) is None
    assert reason(64, 256) is None
    assert "64 query heads a KV head with a head_dim of 512" in reason(64, 512)
    assert "a head_dim of 576" in reason(1, 576)
