"""NaN and infinity in a token that a query does not see: behind it, before its window, or in a hole of the mask."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hf_paged_kernels import dense_attention, paged_attention
from hf_paged_kernels.torch import scores
from hf_paged_kernels.torch.reference import _guarded_sdpa, _sdpa
from hf_paged_kernels.torch.scores import _seen_products, weighted_values

from tests.kernels.cases import Case, lay_out, new_states, random_rows
from tests.kernels.device import on_device
from tests.kernels.quantized_cases import quantized

# A case, and a token of its first row.
WINDOWED = Case(lengths=(40, 21), query_length=1, window=20)  # the other row's window begins earlier
CAPPED = Case(lengths=(40, 37), query_length=6, window=8, softcap=2.0)
WITH_HOLES = Case(lengths=(40, 12), query_length=6, new_from_blocks=True, holes=True, dims=(16, 24))
WITH_SINKS = Case(lengths=(37, 40), query_length=5, window=12, sinks=True, heads=(4, 2))
CASES = [
    *((WINDOWED, 18, kv) for kv in ("raw", "int8")),
    *((CAPPED, 30, kv) for kv in ("raw", "int8")),
    *((WITH_HOLES, 38, kv) for kv in ("raw", "int8", "int4")),
    *((WITH_SINKS, token, "raw") for token in (22, 35)),
    (WITH_SINKS, 35, "int4"),
]


@pytest.mark.parametrize("number", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize(("case", "token", "kv"), CASES, ids=str)
def test_a_query_is_not_touched_by_what_it_does_not_see(
    case: Case, token: int, kv: str, backend: str, number: float
) -> None:
    if backend == "cpu":
        pytest.importorskip("numba")
    if backend == "triton":
        pytest.importorskip("triton")
    if kv == "int8" and math.isinf(number):
        pytest.skip("infinity is stored as the largest number")
    generator = torch.Generator().manual_seed(0)
    rows = random_rows(case, torch.float32, generator)
    query = torch.randn(len(rows), case.heads[0], case.query_length, case.dims[0], generator=generator)
    key_mask = torch.rand(len(rows), max(case.lengths), generator=generator) < 0.6 if case.holes else None
    if key_mask is not None:
        key_mask[0, token] = False

    def attend() -> torch.Tensor:
        blocks, step = lay_out(case, rows, 0.0) if kv == "raw" else quantized(case, rows, kv, 0.0)[:2]
        return on_device(paged_attention)(
            query,
            blocks,
            step,
            scale=0.3,
            window=case.window,
            softcap=case.softcap,
            sinks=torch.zeros(case.heads[0]) if case.sinks else None,
            new_kv=None if case.new_from_blocks else new_states(case, rows),
            key_mask=key_mask,
            backend=backend,
        )

    expected = attend()
    rows[0].value[:, token] = number
    if math.isnan(number):
        rows[0].key[:, token] = number
    actual = attend()
    queries = np.arange(case.lengths[0] - case.query_length, case.lengths[0])
    sees = (queries >= token) & (queries - token < (case.window or max(case.lengths)))
    sees &= key_mask is None
    assert not sees.all()
    torch.testing.assert_close(actual[1], expected[1])
    torch.testing.assert_close(actual[0][:, ~sees], expected[0][:, ~sees])
    assert not actual[0][:, sees].isfinite().any()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
def test_attention_to_keys_in_no_blocks(number: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 9, 8, generator=generator)
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    expected, _ = dense_attention(query, key, value, scale=0.3, visible=visible)
    value[:, :, 5] = number
    actual, _ = dense_attention(query, key, value, scale=0.3, visible=visible)
    torch.testing.assert_close(actual[:, :, :5], expected[:, :, :5])
    assert actual[:, :, 5:].equal(torch.full_like(actual[:, :, 5:], number)) or math.isnan(number)
    assert not actual[:, :, 5:].isfinite().any()


@pytest.mark.parametrize("number", [math.nan, math.inf], ids=str)
def test_what_accelerators_do_instead_of_looking_at_numbers(number: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 9, 8, generator=generator)
    key, value = torch.randn(2, 1, 2, 9, 8, generator=generator)
    visible = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    weights = torch.rand(1, 4, 9, 9, generator=generator).tril()

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        return _guarded_sdpa(query, key, value, visible, 0.3), _seen_products(weights, value, visible[:, None])

    expected = (_sdpa(query, key, value, 0.3, visible=visible), weighted_values(weights, value))
    torch.testing.assert_close(results(), expected)
    value[:, 1, 5] = number
    for actual, without in zip(results(), expected, strict=True):
        torch.testing.assert_close(actual[:, :2], without[:, :2])  # of another KV head
        torch.testing.assert_close(actual[:, 2:, :5], without[:, 2:, :5])
        assert not actual[:, 2:, 5:].isfinite().any()


@pytest.mark.parametrize("query_length", [1, 9])
def test_accelerators_are_not_waited_for(query_length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor without numbers raises where they are asked for."""
    monkeypatch.setattr(scores, "matmul", torch.matmul)
    weights = torch.empty(2, 4, query_length, 9, device="meta")
    visible = torch.empty(2, 1, query_length, 9, dtype=torch.bool, device="meta")
    value = torch.empty(2, 2, 9, 8, device="meta")
    assert weighted_values(weights, value, visible).shape == (2, 4, query_length, 8)
