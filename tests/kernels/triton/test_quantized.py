"""The Triton kernels over codes: attention is that over what the codes say."""

from __future__ import annotations

import copy
import math
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hf_paged_kernels import Blocks, MixedBlocks, StepMetadata

from hf_paged_cache import PagedCache
from hf_paged_cache.codecs import Geometry, KVQuant, make_codec
from tests.kernels import oracle, quantized_cases
from tests.kernels.cases import FEATURES, Case, lay_out, random_rows
from tests.kernels.device import DEVICE, on_device
from tests.kernels.hostile import poison_planes, poisoned_blocks
from tests.kernels.quantized_cases import attend_quantized, check_quantized
from tests.support.combinations import combined, later
from tests.support.compat import generate

triton_kernels = pytest.importorskip("hf_paged_kernels.triton")

SCALED = {"int8": "int8", "fp8": "fp8"}
GROUPED = {
    "int4": KVQuant("int4"),
    "k8v4": KVQuant("k8v4", value_group=16),
    "k4v2": KVQuant("k4v2", key_group=8),
    "kivi2": KVQuant("kivi2", key_group=32, value_group=8),
}
CODECS = SCALED | GROUPED
THREE = {name: CODECS[name] for name in ("int8", "int4", "kivi2")}


def attention(query: torch.Tensor, blocks: Blocks, step: StepMetadata, **options: Any) -> Any:
    """The Triton kernels, and no others."""
    assert triton_kernels.unsupported_reason(query, blocks) is None
    return on_device(triton_kernels.paged_attention)(query, blocks, step, **options)


def with_one_run_of_codes(
    case: Case, rows: list[oracle.Row], kv: str | KVQuant, poison: float = math.nan
) -> tuple[Blocks, StepMetadata, list[oracle.Row]]:
    """As `quantized_cases.quantized`, but the codes of a row are one run of blocks, as a cache has them.

    The first row begins with codes, the second with an exact block, and so on; the newest full block is exact in each.
    """
    exact, step = lay_out(case, rows, poison)
    heads, num_blocks, size, _ = exact.key.shape
    geometry = Geometry.of(*(plane.transpose(0, 1) for plane in exact.planes))
    quantized = make_codec(kv).allocate(geometry, size, num_blocks)
    poison_planes(quantized)
    in_exact_blocks = poisoned_blocks(num_blocks, heads, size, case.dims, exact.key.dtype, poison)
    # Exact blocks have ids of their own.
    exact_table = np.where(step.block_table > 0, num_blocks - 1 - step.block_table, -1).astype(np.int32)
    codes_table = np.zeros_like(step.block_table)
    for row, length in enumerate(case.lengths if case.new_from_blocks else case.past_lens):
        run = slice(row % 2, max(length // size - 1, row % 2))
        codes_table[row, run], exact_table[row, run] = step.block_table[row, run], -1
    for block_id in codes_table[codes_table > 0].tolist():
        quantized.quantize(exact.key[:, [block_id]], exact.value[:, [block_id]], torch.tensor([block_id]))
    for row, block in zip(*np.nonzero(exact_table >= 0), strict=True):
        for plane, source in zip(in_exact_blocks.planes, exact.planes, strict=True):
            plane[:, exact_table[row, block]] = source[:, step.block_table[row, block]]
    with_exact = StepMetadata(
        block_table=step.block_table,
        exact_table=exact_table,
        seq_lens=step.seq_lens,
        padding=step.padding,
        slots=step.slots,
        num_columns=step.num_columns,
        block_size=size,
        new_tokens_stored=step.new_tokens_stored,
    )
    return (
        MixedBlocks(quantized, in_exact_blocks),
        with_exact,
        quantized_cases._as_read(case, rows, quantized, codes_table),
    )


@pytest.fixture(autouse=True)
def codes_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = quantized_cases.quantized

    def lay_out_codes(case: Case, rows: list[oracle.Row], kv: str | KVQuant) -> tuple[Any, ...]:
        return (quantized if kv in SCALED.values() else with_one_run_of_codes)(case, rows, kv)

    monkeypatch.setattr(quantized_cases, "quantized", lay_out_codes)


@combined(quick=1, kv=CODECS, query_length=[1, *later(9)], new_from_blocks=[False, True])
def test_codes_of_every_width(kv, query_length, new_from_blocks):
    case = Case(lengths=(101, 70), heads=(3, 1), dims=(64, 64), block_size=32, query_length=query_length)
    check_quantized(replace(case, new_from_blocks=new_from_blocks), kv, attention=attention)


@combined(quick=1, kv=CODECS, dims=[(80, 80), (16, 48), *later((96, 96), (128, 128), (192, 128))])
def test_key_and_value_widths(kv, dims):
    check_quantized(Case(lengths=(70, 33), heads=(3, 1), dims=dims), kv, attention=attention)


@combined(quick=1, key_bits=[2, *later(8)], value_bits=[2, 8], groups=[(16, 64), (64, 16), (8, 8)])
def test_groups_of_any_size(key_bits, value_bits, groups):
    """Of channels of a key, and of a value."""
    kv = KVQuant("int4", key_bits, value_bits, *groups)
    check_quantized(Case(lengths=(200, 150), dims=(64, 64), block_size=64), kv, attention=attention)


@combined(slow=2, kv=THREE, block_size=[48, *later(16, 32, 128)], num_splits=[3, *later(1)])
def test_splits_and_block_sizes_have_no_influence(kv, block_size, num_splits):
    lengths = (3 * block_size + 5, 2 * block_size, 3, 0)
    case = Case(lengths=lengths, query_length=2, heads=(3, 1), dims=(32, 32), block_size=block_size, sinks=True)
    check_quantized(case, kv, attention=partial(attention, num_splits=num_splits))


@combined(
    slow=2,
    kv=THREE,
    lengths=[(90, 64), (0, 70), *later((1,))],
    query_length=[1, 9],
    window=[40, *later(1, 17, 60)],
    new_from_blocks=[True, *later(False)],
)
def test_windows_and_rows_of_any_length(kv, lengths, query_length, window, new_from_blocks):
    case = Case(lengths=lengths, query_length=query_length, window=window, new_from_blocks=new_from_blocks)
    check_quantized(case, kv, attention=partial(attention, num_splits=2))


@combined(quick=1, slow=2, kv=THREE, features=[FEATURES[-1], *later(*FEATURES[:-1])], query_length=[1, 9])
def test_softcap_sinks_and_holes(kv, features, query_length):
    case = Case(lengths=(90, 40, 3), query_length=query_length, window=60, heads=(6, 2), **features)
    check_quantized(case, kv, attention=attention)


@combined(quick=1, kv=CODECS, dtype=[torch.bfloat16, torch.float16], query_length=[1, *later(9)])
def test_16_bit_error_is_a_few_roundings_of_the_largest_value(kv, dtype, query_length):
    case = Case(lengths=(90, 41), query_length=query_length, heads=(3, 1), dims=(64, 64))
    largest = max(float(row.value.abs().max()) for row in random_rows(case, dtype, torch.Generator().manual_seed(0)))
    for out, lse, expected_out, expected_lse in attend_quantized(case, kv, dtype, attention):
        assert out.dtype == dtype
        assert float((out.double() - expected_out).abs().max()) <= 3 * torch.finfo(dtype).eps * largest
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kv", [CODECS["int8"], CODECS["int4"]], ids=["int8", "int4"])
def test_offsets_beyond_32_bits(kv):
    """A pool whose second head begins behind 2**31 bytes of codes, of which hardly any is ever touched."""
    case = Case(lengths=(200, 130), heads=(4, 2), block_size=64)
    rows = random_rows(case, torch.float16, torch.Generator().manual_seed(0))
    query = torch.randn(2, 4, 1, 16, generator=torch.Generator().manual_seed(1)).half()
    blocks, step, _ = quantized_cases.quantized(case, rows, kv)
    expected = attention(query, blocks, step, scale=0.3)
    codes = blocks.quantized if isinstance(blocks, MixedBlocks) else blocks
    shift = 2**31 // codes.key[0, 0].numel() + 8 - codes.num_blocks
    wide = {}
    for field in fields(codes):
        plane = getattr(codes, field.name)
        if isinstance(plane, torch.Tensor):
            wide[field.name] = torch.empty(2, shift + plane.shape[1], *plane.shape[2:], dtype=plane.dtype)
            wide[field.name][:, shift:] = plane
    codes = replace(codes, **wide)
    step.block_table = np.where(step.block_table > 0, step.block_table + shift, 0).astype(np.int32)
    step._memo.clear()
    far = replace(blocks, quantized=codes) if isinstance(blocks, MixedBlocks) else codes
    assert torch.equal(attention(query, far, step, scale=0.3), expected)


def test_exact_blocks_between_codes_are_refused():
    """No cache has them: what is exact are the first and the newest tokens."""
    case = Case(lengths=(90,))
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    blocks, step, _ = with_one_run_of_codes(case, rows, GROUPED["int4"])
    step.exact.block_table[0, 1] = 1
    with pytest.raises(ValueError, match="exact blocks between blocks of codes"):
        attention(torch.randn(1, 2, 1, 16), blocks, step, scale=1.0)


@pytest.mark.parametrize("kv", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_generate_on_interpreted_kernels(llama, prompts, kv):
    """The whole path: writing codes, quantizing blocks, decoding, beams and padding."""
    model = copy.deepcopy(llama(num_layers=1)).to(DEVICE)
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": 2}
    inputs = {name: tensor.to(DEVICE) for name, tensor in prompts(63, 50).items()}
    quant = KVQuant(kv) if kv in SCALED else KVQuant(kv, exact_recent=16, exact_sinks=16)
    tokens = []
    for backend in ("reference", "triton"):
        cache = PagedCache(model.config, block_size=16, backend=backend, kv=quant)
        tokens.append(generate(model, inputs, cache, **options))
    assert tokens[1].equal(tokens[0])
