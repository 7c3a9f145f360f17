"""Attention in plain PyTorch: every shape, length, window and feature against the definition, on hostile memory."""

import math
from dataclasses import replace

import pytest
import torch
from hf_paged_kernels import dense_attention, paged_attention
from hf_paged_kernels.torch import reference

from tests.kernels import oracle
from tests.kernels.cases import (
    BLOCK_SIZES,
    DIMS,
    FEATURES,
    HEADS,
    LENGTHS,
    QUERY_LENGTHS,
    WINDOWS,
    Case,
    attend,
    check,
    lay_out,
    matrix,
    random_rows,
)
from tests.support.combinations import combined

pytestmark = pytest.mark.usefixtures("in_plain_pytorch")


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("query_length", [1, 2, 9])
def test_head_ratios(heads, query_length):
    check(Case(heads=heads, query_length=query_length, lengths=(21, 34)), torch.float64)


@combined(dims=DIMS, lengths=[(20, 20), (20, 33)], query_length=[1, 9])
def test_key_and_value_widths(dims, lengths, query_length):
    check(Case(dims=dims, heads=(3, 1), lengths=lengths, query_length=query_length))


@combined(block_size=BLOCK_SIZES, beyond=[-1, 0, 1], query_length=[1, 33], shorter=[0, 1, 5])
def test_lengths_around_a_block_edge(block_size, beyond, query_length, shorter):
    length = 2 * block_size + beyond
    check(Case(block_size=block_size, lengths=(length, length - shorter), query_length=query_length))


@combined(lengths=LENGTHS, query_length=QUERY_LENGTHS, window=WINDOWS, new_from_blocks=[False, True])
def test_windows_and_rows_of_any_length(lengths, query_length, window, new_from_blocks):
    check(Case(lengths=lengths, query_length=query_length, window=window, new_from_blocks=new_from_blocks))


@combined(features=FEATURES, lengths=[(34, 34), (40, 17, 3), (8, 5), (0, 0)], query_length=[1, 8, 9], window=[None, 10])
def test_softcap_sinks_and_holes(features, lengths, query_length, window):
    case = Case(lengths=lengths, query_length=query_length, window=window, heads=(6, 2), **features)
    check(case, torch.float64)
    check(replace(case, new_from_blocks=True), torch.float64)


@pytest.mark.parametrize("query_length", [1, 9])
@pytest.mark.parametrize("lengths", [(32,), (40,), (48, 48), (48, 33)], ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_blocks_that_follow_each_other_are_read_in_place(query_length, lengths, window):
    case = Case(query_length=query_length, lengths=lengths, window=window, ids_in_order=True)
    check(case)
    check(replace(case, new_from_blocks=True))


@pytest.mark.parametrize("lengths", [(40, 40), (40, 21)], ids=str)
@pytest.mark.parametrize("features", FEATURES[1:], ids=str)
def test_many_queries_are_taken_in_tiles(monkeypatch, lengths, features):
    """The bound of the score matrix cuts the queries into tiles of 1, 3 and 33; the last tile may be smaller."""
    for tile in (1, 3, 32):
        monkeypatch.setattr(reference, "MAX_SCORES", tile * len(lengths) * 2 * 64)
        check(Case(lengths=lengths, query_length=33, window=30, **features), torch.float64)


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("lengths", [(40,), (40, 40), (40, 17, 0)], ids=str)
def test_decode_is_the_same_however_threads_share_the_work(monkeypatch, threads, lengths):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for heads in HEADS[:5]:
        check(Case(heads=heads, lengths=lengths, window=20))


@combined(
    dtype=[torch.bfloat16, torch.float16],
    features=[{}, {"softcap": 1.5, "sinks": True, "holes": True}],
    lengths=[(9, 4), (40, 40), (40, 17)],
    query_length=[1, 9],
)
def test_16_bit_error_is_two_roundings_of_the_largest_value(dtype, features, lengths, query_length):
    case = Case(lengths=lengths, query_length=query_length, heads=(6, 2), dims=(64, 64), **features)
    largest = max(float(row.value.abs().max()) for row in random_rows(case, dtype, torch.Generator().manual_seed(0)))
    for out, lse, expected_out, expected_lse in attend(case, dtype):
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        assert float((out.double() - expected_out).abs().max()) <= 2 * torch.finfo(dtype).eps * largest
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [*LENGTHS, (16, 16), (40, 40), (0, 1, 48)], ids=str)
@pytest.mark.parametrize("query_length", QUERY_LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
def test_whole_matrix(lengths, query_length, window):
    """Every feature and both sources of the new tokens; heads, widths and block sizes take turns."""
    for case in matrix(lengths, query_length, window):
        check(case, torch.float64)


@pytest.mark.parametrize("lengths", [(40, 40), (40, 17), (0, 5)], ids=str)
@pytest.mark.parametrize("query_length", [1, 9])
@pytest.mark.parametrize("sinks", [False, True])
def test_partial_results_merge_by_log_sum_exp(lengths, query_length, sinks):
    """Attention to two disjoint sets of keys, merged, is attention to all; sinks take part in one of the two."""
    case = Case(lengths=lengths, query_length=query_length)
    generator = torch.Generator().manual_seed(0)
    rows = random_rows(case, torch.float64, generator)
    query = torch.randn(len(rows), 2, query_length, 16, dtype=torch.float64, generator=generator)
    logits = torch.randn(2, dtype=torch.float64, generator=generator) if sinks else None
    chosen = torch.rand(len(rows), max(lengths), generator=generator) < 0.5
    blocks, step = lay_out(replace(case, new_from_blocks=True), rows, math.nan)

    def attend_to(key_mask: torch.Tensor | None, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return paged_attention(query, blocks, step, scale=0.3, sinks=sinks, key_mask=key_mask, return_lse=True)

    merged = oracle.merge([attend_to(chosen, logits), attend_to(~chosen, None)])
    torch.testing.assert_close(merged, attend_to(None, logits), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (24, 8)], ids=str)
@pytest.mark.parametrize("new_tokens", [1, 5])
def test_dense_attention(features, dims, new_tokens):
    """Keys in no blocks, and the weights: those of the oracle are its outputs for values that are unit vectors."""
    case = Case(lengths=(12, 12), query_length=new_tokens, heads=(6, 2), dims=dims, **features)
    generator = torch.Generator().manual_seed(0)
    rows = random_rows(case, torch.float64, generator)
    query = torch.randn(2, 6, new_tokens, dims[0], dtype=torch.float64, generator=generator)
    options = {
        "scale": 0.5,
        "softcap": case.softcap,
        "sinks": torch.randn(6, generator=generator) if case.sinks else None,
    }
    key_mask = torch.rand(2, 12, generator=generator) < 0.6 if case.holes else torch.ones(2, 12, dtype=torch.bool)
    key_mask[0] &= not case.holes  # one row that sees nothing
    visible = torch.ones(new_tokens, 12, dtype=torch.bool).tril(12 - new_tokens) & key_mask[:, None, None]

    key, value = (torch.stack(states) for states in zip(*rows, strict=True))
    out, weights = dense_attention(query, key, value, visible=visible, **options)

    expected_out, _ = oracle.attention(query, rows, key_mask=key_mask, **options)
    units = [oracle.Row(row.key, torch.eye(12).expand(2, 12, 12)) for row in rows]
    expected_weights, _ = oracle.attention(query, units, key_mask=key_mask, **options)
    torch.testing.assert_close(out, expected_out, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(weights, expected_weights, atol=1e-12, rtol=1e-12)


def test_dense_attention_adds_a_bias_and_drops_weights():
    query, key, value = (torch.randn(2, 4, 3, 16, dtype=torch.float64) for _ in range(3))
    slopes = torch.randn(1, 4, 3, 3, dtype=torch.float64)
    out, weights = dense_attention(query, key, value, scale=0.25, bias=slopes)
    expected = (query @ key.mT * 0.25 + slopes).softmax(-1)
    torch.testing.assert_close(weights, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(out, expected @ value, atol=1e-12, rtol=1e-12)

    torch.manual_seed(0)
    out, weights = dense_attention(query, key, value, scale=0.25, dropout=0.5)
    expected = (query @ key.mT * 0.25).softmax(-1)
    is_dropped = weights == 0
    assert 0 < int(is_dropped.sum()) < weights.numel()
    torch.testing.assert_close(weights, (2 * expected).masked_fill(is_dropped, 0), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(out, weights @ value, atol=1e-12, rtol=1e-12)
