"""The attention that each block gets, against the weights of the definition, by every backend."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hf_paged_kernels import block_attention_scores, paged_attention

from tests.kernels import oracle
from tests.kernels.cases import Case, lay_out, random_rows
from tests.kernels.device import on_device
from tests.kernels.hostile import POISONS

BACKENDS = ["reference", "triton"]


@pytest.fixture(autouse=True)
def backend_is_there(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")


def block_scores(query: torch.Tensor, rows: Sequence[oracle.Row], block_size: int, **options) -> torch.Tensor:
    """float64 `[batch, num_kv_heads, blocks]`. A value of 1 for the tokens of a block and of 0 for all others makes
    attention's output the attention score of that block."""
    width = -(-max(row.length for row in rows) // block_size)
    marked = []
    for row in rows:
        of_token = torch.nn.functional.one_hot(torch.arange(row.length) // block_size, width)
        marked.append(oracle.Row(row.key, of_token.expand(row.key.shape[0], -1, -1)))
    out, _ = oracle.attention(query, marked, **options)
    return out.unflatten(1, (rows[0].key.shape[0], -1)).sum((2, 3))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(40, 17)),
        Case(lengths=(40, 17, 0), heads=(6, 2), query_length=9, sinks=True),
        Case(lengths=(70, 35), heads=(5, 1), query_length=3, window=20, block_size=16),
        Case(lengths=(70, 3), heads=(4, 4), query_length=5, softcap=1.5, holes=True, block_size=32, dims=(48, 16)),
        Case(lengths=(30, 9), query_length=2, block_size=24),
        pytest.param(Case(lengths=(300,), heads=(64, 1), query_length=3, dims=(80, 16)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_mass_is_the_weight_of_a_block_s_tokens(case: Case, backend: str) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    rows = random_rows(case, torch.float32, generator)
    query = torch.randn(len(rows), case.query_length, case.heads[0], case.dims[0], generator=generator).transpose(1, 2)
    options = {"scale": 0.5, "window": case.window, "softcap": case.softcap}
    options["key_mask"] = torch.rand(len(rows), max(case.lengths), generator=generator) < 0.6 if case.holes else None
    sinks = torch.randn(case.heads[0], generator=generator) if case.sinks else None
    expected = block_scores(query, rows, case.block_size, **options, sinks=sinks)
    for poison in POISONS:
        blocks, step = lay_out(Case(**{**vars(case), "new_from_blocks": True}), rows, poison)
        _, lse = on_device(paged_attention)(
            query, blocks, step, **options, sinks=sinks, return_lse=True, backend=backend
        )
        mass = on_device(block_attention_scores)(query, blocks, step, lse, **options, backend=backend)
        torch.testing.assert_close(mass.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_that_are_not_in_blocks_are_asked_for(backend: str) -> None:
    case = Case(lengths=(40,), query_length=33, window=5)
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    blocks, step = lay_out(case, rows, math.nan)
    query = torch.randn(1, 2, 33, 16)
    with pytest.raises(ValueError, match="all new tokens in the blocks"):
        on_device(block_attention_scores)(
            query, blocks, step, torch.zeros(1, 2, 33), scale=0.5, window=5, backend=backend
        )
