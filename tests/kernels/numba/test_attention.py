"""The kernels for CPUs against the definition: every shape, length, window and feature, on hostile memory."""

from __future__ import annotations

import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hf_paged_kernels import paged_attention

from hf_paged_cache import KVQuant
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
    new_states,
    random_rows,
)
from tests.kernels.quantized_cases import CODECS, attend_quantized, check_quantized, quantized
from tests.support.combinations import combined

pytest.importorskip("numba")
plan = pytest.importorskip("hf_paged_kernels.numba.plan")

attention = partial(paged_attention, backend="cpu")
codecs = pytest.mark.parametrize("kv", CODECS.values(), ids=CODECS)


@pytest.fixture(
    params=[2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3))],
    ids="{} threads".format,
    autouse=True,
)
def num_threads(request: pytest.FixtureRequest) -> Any:
    """Alone, and with others, among which even short contexts are divided."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_PIECE", 8)
    monkeypatch.setattr(plan, "WORTH_THREADS", 0)


@pytest.mark.parametrize("heads", [*HEADS, (71, 1)], ids=str)
@pytest.mark.parametrize("query_length", [1, 2, 9])
def test_head_ratios(heads: tuple[int, int], query_length: int) -> None:
    check(Case(heads=heads, query_length=query_length, lengths=(21, 34)), attention=attention)


@combined(dims=[*DIMS, (5, 3), (512, 512)], dtype=[torch.float32, torch.bfloat16], query_length=[1, 9])
def test_key_and_value_widths(dims: tuple[int, int], dtype: torch.dtype, query_length: int) -> None:
    case = Case(dims=dims, heads=(3, 1), lengths=(20, 33), query_length=query_length)
    if dtype == torch.float32:
        check(case, attention=attention)
        return
    for out, _, expected, _ in attend(case, dtype, attention):
        torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


@combined(block_size=[*BLOCK_SIZES, 3, 1], beyond=[-1, 0, 1], query_length=[1, 33])
def test_lengths_around_a_block_edge(block_size: int, beyond: int, query_length: int) -> None:
    length = 2 * block_size + beyond
    case = Case(block_size=block_size, lengths=(length, max(length - 5, 0)), query_length=query_length)
    check(case, attention=attention)
    check(replace(case, new_from_blocks=True), attention=attention)


@combined(lengths=LENGTHS, query_length=QUERY_LENGTHS, window=WINDOWS, new_from_blocks=[False, True])
def test_windows_and_rows_of_any_length(
    lengths: tuple[int, ...], query_length: int, window: int | None, new_from_blocks: bool
) -> None:
    case = Case(lengths=lengths, query_length=query_length, window=window, new_from_blocks=new_from_blocks)
    check(case, attention=attention)


@combined(
    features=FEATURES, lengths=[(34, 34), (140, 17, 3), (8, 5), (0, 0)], query_length=[1, 8, 9], window=[None, 10]
)
def test_softcap_sinks_and_holes(
    features: dict[str, Any], lengths: tuple[int, ...], query_length: int, window: int | None
) -> None:
    case = Case(lengths=lengths, query_length=query_length, window=window, heads=(6, 2), **features)
    check(case, attention=attention)
    check(replace(case, new_from_blocks=True), attention=attention)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("query_length", QUERY_LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
def test_features_together(lengths: tuple[int, ...], query_length: int, window: int | None) -> None:
    """Every feature and both sources of the new tokens; heads, widths and block sizes take turns."""
    for case in matrix(lengths, query_length, window):
        check(case, attention=attention)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("query_length", [1, 9])
def test_16_bit_error_is_one_rounding_of_the_largest_value(dtype: torch.dtype, query_length: int) -> None:
    """Everything but the result is computed in 32 bits."""
    case = Case(lengths=(140, 17), query_length=query_length, heads=(6, 2), dims=(64, 64), sinks=True)
    largest = max(float(row.value.abs().max()) for row in random_rows(case, dtype, torch.Generator().manual_seed(0)))
    for out, lse, expected_out, expected_lse in attend(case, dtype, attention):
        assert out.dtype == dtype
        assert float((out.double() - expected_out).abs().max()) <= torch.finfo(dtype).eps * largest
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


@codecs
@pytest.mark.parametrize("query_length", [1, 9])
@pytest.mark.parametrize("new_from_blocks", [False, True])
def test_codes_of_every_width(kv: str | KVQuant, query_length: int, new_from_blocks: bool) -> None:
    case = Case(
        lengths=(201, 70, 3), heads=(6, 2), dims=(64, 64), query_length=query_length, new_from_blocks=new_from_blocks
    )
    check_quantized(case, kv, attention=attention)
    check_quantized(replace(case, block_size=64, window=40, holes=True, sinks=True), kv, attention=attention)


@codecs
@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (128, 128), (16, 48), (192, 128)], ids=str)
def test_codes_of_any_number_of_channels(kv: str | KVQuant, dims: tuple[int, int]) -> None:
    check_quantized(Case(lengths=(70, 33), heads=(3, 1), dims=dims, query_length=2), kv, attention=attention)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("key_group", "value_group"), [(16, 64), (64, 16), (8, 8)])
def test_groups_of_any_size(bits: int, key_group: int, value_group: int) -> None:
    kv = KVQuant("int4", bits, bits, key_group, value_group)
    check_quantized(Case(lengths=(200, 150), dims=(64, 64), block_size=64), kv, attention=attention)


@pytest.mark.parametrize("kv", ["raw", "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_codes_beside_16_bit_tokens(kv: str, dtype: torch.dtype) -> None:
    case = Case(lengths=(140, 70), heads=(6, 2), dims=(64, 64), query_length=2)
    cases = attend(case, dtype, attention) if kv == "raw" else attend_quantized(case, kv, dtype, attention)
    for out, lse, expected_out, expected_lse in cases:
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected_out, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_scales_of_any_size(kv: str, size: float) -> None:
    case = Case(lengths=(140,), heads=(2, 1), dims=(16, 16), new_from_blocks=True)
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    blocks, step, _ = quantized(case, [type(row)(*(states * size for states in row)) for row in rows], kv)
    query = torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(1))
    expected = paged_attention(query, blocks, step, scale=1 / size, backend="reference")
    torch.testing.assert_close(attention(query, blocks, step, scale=1 / size), expected, atol=1e-5 * size, rtol=1e-5)


def test_queries_far_from_each_other_in_size() -> None:
    """Scores of thousands, where the exponential of a difference is 0 or 1."""
    case = Case(lengths=(70,), heads=(2, 1), dims=(16, 16))
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    blocks, step = lay_out(replace(case, new_from_blocks=True), rows, 0.0)
    query = 1e4 * torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(1))
    expected = paged_attention(query, blocks, step, scale=1.0, backend="reference")
    torch.testing.assert_close(attention(query, blocks, step, scale=1.0), expected)


def test_new_tokens_may_be_of_another_dtype_than_the_blocks() -> None:
    case = Case(lengths=(70,), heads=(2, 1), dims=(16, 16), query_length=3)
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    query = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(1))
    for kv in ("raw", "int8", "int4"):
        blocks, step = lay_out(case, rows, 0.0) if kv == "raw" else quantized(case, rows, kv)[:2]
        new_kv = tuple(states.bfloat16() for states in new_states(case, rows))
        wide_kv = tuple(states.float() for states in new_kv)
        expected = paged_attention(query, blocks, step, scale=0.3, new_kv=wide_kv, backend="reference")
        torch.testing.assert_close(attention(query, blocks, step, scale=0.3, new_kv=new_kv), expected)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_has_no_influence(default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    try:
        check(Case(lengths=(140, 3), query_length=9, heads=(6, 2), sinks=True), attention=attention)
    finally:
        torch.set_default_dtype(torch.float32)


def one_token() -> tuple[torch.Tensor, Any, Any]:
    case = Case(lengths=(70,), heads=(2, 1), dims=(16, 16), new_from_blocks=True)
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    return torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(1)), *lay_out(case, rows, 0.0)


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_no_number_shows(strange: float) -> None:
    """In the query: its row is NaN. In a key: as much as plain PyTorch makes of it."""
    query, blocks, step = one_token()
    query[0, 1, 0, 3] = strange
    out = attention(query, blocks, step, scale=0.3)
    assert bool(out[0, 1].isnan().all())
    assert bool(out[0, 0].isfinite().all())
    query, blocks, step = one_token()
    blocks.key[0, step.block_table[0, 1], 5, 2] = strange
    expected = paged_attention(query, blocks, step, scale=0.3, backend="reference")
    torch.testing.assert_close(attention(query, blocks, step, scale=0.3), expected, equal_nan=True)


def test_a_sink_that_takes_nothing_beside_keys_that_are_hidden() -> None:
    query, blocks, step = one_token()
    sinks, key_mask = torch.tensor([-math.inf, 0.5]), torch.zeros(1, 70, dtype=torch.bool)
    out, lse = attention(query, blocks, step, scale=0.3, sinks=sinks, key_mask=key_mask, return_lse=True)
    assert bool((out == 0).all())
    assert lse.flatten().tolist() == [-math.inf, 0.5]


def test_what_float16_can_hold_stays_finite() -> None:
    case = Case(lengths=(70,), heads=(2, 1), dims=(16, 16), new_from_blocks=True)
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    rows = [type(row)(row.key.half(), torch.full_like(row.value, 65504.0).half()) for row in rows]
    blocks, step, _ = quantized(case, rows, "int8")
    assert bool((attention(torch.zeros(1, 2, 1, 16).half(), blocks, step, scale=0.3) == 65504).all())


def test_arguments_that_do_not_fit_are_refused() -> None:
    """Their addresses would be read wherever they lead."""
    query, blocks, step = one_token()
    new = torch.zeros(1, 1, 1, 16)
    for arguments, message in [
        ({"query": torch.zeros(1, 2, 2, 16)}, r"query is \[1, 2, 2, 16\] on cpu: expected \[1, 2, 1, 16\]"),
        ({"query": torch.zeros(2, 2, 1, 16)}, "query is"),
        ({"new_kv": (new, torch.zeros(1, 2, 1, 16))}, r"value is \[1, 2, 1, 16\] on cpu"),
        ({"sinks": torch.zeros(3)}, "sinks is"),
        ({"key_mask": torch.ones(1, 60, dtype=torch.bool)}, "key_mask is"),
        ({"key_mask": torch.ones(1, 70, dtype=torch.int64)}, "key_mask has dtype torch.int64: expected bool"),
    ]:
        given = {"query": query, **arguments}
        with pytest.raises(ValueError, match=message):
            attention(given.pop("query"), blocks, step, scale=0.3, **given)
    many = lay_out(Case(lengths=(70,), heads=(4, 2)), random_rows(Case(lengths=(70,), heads=(4, 2)), torch.float32,
                   torch.Generator()), 0.0)  # fmt: skip
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2 KV heads"):
        attention(torch.zeros(1, 3, 1, 16), *many, scale=0.3)


def test_calls_of_several_threads_do_not_meet() -> None:
    case = Case(lengths=(400, 90), heads=(6, 2), dims=(64, 64), new_from_blocks=True)
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    blocks, step = lay_out(case, rows, 0.0)
    queries = [torch.randn(2, 6, 1, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    expected = [attention(query, blocks, step, scale=0.1) for query in queries]

    def call(index: int) -> None:
        for _ in range(50):
            assert torch.equal(attention(queries[index], blocks, step, scale=0.1), expected[index])

    with ThreadPoolExecutor(4) as callers:
        list(callers.map(call, range(4)))  # raises what a caller has raised


def test_what_is_kept_for_the_next_call_is_not_pickled() -> None:
    """Neither addresses in memory of the original, nor copies of planes beside the planes."""
    case = Case(lengths=(70, 33), heads=(4, 2), new_from_blocks=True)
    original = lay_out(case, random_rows(case, torch.float32, torch.Generator().manual_seed(0)), 0.0)
    query = torch.randn(2, 4, 1, 16, generator=torch.Generator().manual_seed(1))
    expected = attention(query, *original, scale=0.3)
    blocks, step = pickle.loads(pickle.dumps(original))
    original[1].block_table[:] = 0
    assert torch.equal(attention(query, blocks, step, scale=0.3), expected)
    blocks.value.mul_(2)
    assert torch.equal(attention(query, blocks, step, scale=0.3), 2 * expected)
