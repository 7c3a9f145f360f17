"""Attention over codes is attention over what the codes say: the definition on the dequantized rows, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hf_paged_kernels import (
    GroupedBlocks,
    KVBlocks,
    MixedBlocks,
    ScaledBlocks,
    block_attention_scores,
    paged_attention,
    read_columns,
)
from hf_paged_kernels.torch import quantized_attention

from tests.kernels.cases import BLOCK_SIZES, FEATURES, LENGTHS, Case, random_rows
from tests.kernels.quantized_cases import CODECS, attend_quantized, check_quantized, exact_copy, quantized

pytestmark = pytest.mark.usefixtures("in_plain_pytorch")
codecs = pytest.mark.parametrize("kv", CODECS.values(), ids=CODECS)
two_codecs = pytest.mark.parametrize("kv", [CODECS["int8"], CODECS["int4"]], ids=["int8", "int4"])


@two_codecs
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("query_length", [1, 5])
@pytest.mark.parametrize("window", [None, 17])
def test_windows_and_rows_of_any_length(kv: Any, lengths: tuple[int, ...], query_length: int, window: int) -> None:
    case = Case(lengths=lengths, query_length=query_length, window=window)
    check_quantized(case, kv)
    check_quantized(replace(case, new_from_blocks=True), kv)


@two_codecs
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "query_length", "window"),
    [((50, 50), 1, None), ((40, 17, 3), 4, 20), ((40, 17), 4, None), ((0, 0), 2, None)],
    ids=str,
)
def test_softcap_sinks_and_holes(
    kv: Any, features: dict[str, Any], lengths: tuple[int, ...], query_length: int, window: int | None
) -> None:
    case = Case(lengths=lengths, query_length=query_length, window=window, heads=(6, 2), **features)
    check_quantized(case, kv, torch.float64)
    check_quantized(replace(case, new_from_blocks=True), kv, torch.float64)


@two_codecs
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_lengths_around_a_block_edge(kv: Any, block_size: int, beyond: int) -> None:
    length = 2 * block_size + beyond
    check_quantized(Case(block_size=block_size, lengths=(length, length - 1), query_length=2), kv)


@codecs
@pytest.mark.parametrize(
    ("heads", "dims"), [((4, 4), (64, 64)), ((3, 1), (80, 80)), ((9, 3), (192, 128)), ((28, 4), (16, 48))], ids=str
)
def test_heads_and_widths(kv: Any, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check_quantized(Case(lengths=(50, 33), heads=heads, dims=dims, query_length=2), kv)


@two_codecs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("query_length", [1, 9])
def test_16_bit_error_is_two_roundings_of_the_largest_value(kv: Any, dtype: torch.dtype, query_length: int) -> None:
    case = Case(lengths=(70, 41), query_length=query_length, heads=(6, 2), dims=(64, 64))
    largest = max(float(row.value.abs().max()) for row in random_rows(case, dtype, torch.Generator().manual_seed(0)))
    for out, lse, expected_out, expected_lse in attend_quantized(case, kv, dtype):
        assert out.dtype == dtype
        assert float((out.double() - expected_out).abs().max()) <= 2 * torch.finfo(dtype).eps * largest
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)


@two_codecs
@pytest.mark.parametrize("lengths", [(70, 70), (70, 21)], ids=str)
@pytest.mark.parametrize("features", FEATURES[::3], ids=str)
def test_queries_are_taken_in_tiles_and_keys_in_chunks(
    monkeypatch: pytest.MonkeyPatch, kv: Any, lengths: tuple[int, ...], features: dict[str, Any]
) -> None:
    for tile, chunk, window in ((1, 1, None), (3, 2 * 16 * 2 * 16, 30), (8, 1 << 18, None)):
        monkeypatch.setattr(quantized_attention, "MAX_SCORES", tile * len(lengths) * 2 * 70)
        monkeypatch.setattr(quantized_attention, "CHUNK", chunk)
        check_quantized(Case(lengths=lengths, query_length=10, window=window, **features), kv, torch.float64)


@codecs
def test_only_a_chunk_is_dequantized_at_a_time(monkeypatch: pytest.MonkeyPatch, kv: Any) -> None:
    """Whatever the context is: the largest piece is a chunk, or one block of each row if that is more."""
    sizes: list[int] = []
    for cls in (GroupedBlocks, ScaledBlocks, KVBlocks):

        def read_counted(self: Any, part: Any, block_ids: torch.Tensor, read: Any = cls.read_blocks) -> torch.Tensor:
            states = read(self, part, block_ids)
            sizes.append(states.numel())
            return states

        monkeypatch.setattr(cls, "read_blocks", read_counted)
    case = Case(lengths=(1000, 700), heads=(4, 2), query_length=1)
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    blocks, step, _ = quantized(case, rows, kv)
    one_block_each = len(rows) * 2 * 16 * 16
    for chunk in (1, 4 * one_block_each, 10 * one_block_each):
        monkeypatch.setattr(quantized_attention, "CHUNK", chunk)
        sizes.clear()
        paged_attention(torch.randn(2, 4, 1, 16), blocks, step, scale=0.3)
        assert max(sizes) <= max(chunk, one_block_each)
        assert sum(sizes) == 2 * 2 * 16 * 16 * (63 + 44)  # keys and values of each block of each row, once


@codecs
@pytest.mark.parametrize("first_column", [0, 5, 40])
def test_columns_are_read_as_the_codes_say(kv: Any, first_column: int) -> None:
    case = Case(lengths=(70, 33, 3), query_length=1, heads=(2, 2), new_from_blocks=True)
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    blocks, step, as_read = quantized(case, rows, kv)
    for part in ("key", "value"):
        columns = read_columns(blocks, part, step, first_column, 70)
        for row, padding, states in zip(as_read, step.padding.tolist(), columns, strict=True):
            tokens = getattr(row, part)
            padded = torch.cat([tokens.new_zeros(2, padding, tokens.shape[-1]), tokens], dim=1)
            assert torch.equal(states, padded[:, first_column:])


@codecs
@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(70, 17), new_from_blocks=True),
        Case(lengths=(70, 35, 0), heads=(6, 2), query_length=9, window=30, new_from_blocks=True),
        Case(lengths=(70, 3), heads=(4, 4), query_length=5, softcap=1.5, holes=True, new_from_blocks=True),
    ],
    ids=str,
)
def test_block_mass_is_that_over_what_the_codes_say(kv: Any, case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = random_rows(case, torch.float64, generator)
    query = torch.randn(len(rows), case.heads[0], case.query_length, 16, dtype=torch.float64, generator=generator)
    blocks, step, as_read = quantized(replace(case, window=None), rows, kv)
    options: dict[str, Any] = {"scale": 0.5, "window": case.window, "softcap": case.softcap}
    options["key_mask"] = torch.rand(len(rows), max(case.lengths), generator=generator) < 0.6 if case.holes else None
    _, lse = paged_attention(query, blocks, step, **options, return_lse=True)
    plain = exact_copy(blocks, step, as_read)
    mass = block_attention_scores(query, blocks, step, lse, **options)
    torch.testing.assert_close(mass, block_attention_scores(query, plain, step, lse, **options), atol=1e-12, rtol=1e-12)


def test_mixed_blocks_say_what_both_are() -> None:
    case = Case(lengths=(40,), dims=(16, 48))
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    blocks, _, _ = quantized(case, rows, CODECS["int4"])
    assert isinstance(blocks, MixedBlocks)
    assert blocks.dims == blocks.quantized.dims == (16, 48)
    assert (blocks.block_size, blocks.num_kv_heads, blocks.num_blocks) == (16, 1, blocks.quantized.num_blocks)
