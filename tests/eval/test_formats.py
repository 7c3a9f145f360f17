"""Problems in every format of blocks, and what is said of kernels that do not compute what plain PyTorch does."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from hf_paged_kernels import block_attention_scores, copy_blocks, paged_attention, write_kv

from eval.kernels import correctness
from eval.kernels.formats import clone
from eval.kernels.peers import contenders
from eval.kernels.problems import BLOCK_SIZE, Heads, Problem, Shape
from hf_paged_cache import CODECS
from tests.kernels.device import DEVICE

CPU = torch.device("cpu")
SHAPE = Shape(Heads(4, 2, 32), torch.float32, batch=2, context=300)
CODES = [kv for kv in CODECS if kv != "raw"]


@pytest.mark.parametrize("kv", CODECS)
@pytest.mark.parametrize("context", [48, 300])
@pytest.mark.parametrize("query_length", [1, 9])
def test_blocks_read_as_the_problem_says(kv, context, query_length):
    problem = Problem(replace(SHAPE, kv=kv, context=context, query_length=query_length), CPU)
    out = paged_attention(problem.query, problem.layers[0], problem.step, scale=problem.scale, backend="reference")
    problem.check(out)


@pytest.mark.parametrize("kv", CODES)
def test_what_is_quantized_reads_as_something_near(kv):
    (exact, _), (read, _) = (Problem(replace(SHAPE, kv=name), CPU).contiguous[0] for name in ("raw", kv))
    is_the_same = (exact == read).all(dim=-1).all(dim=1)[0]
    if kv in ("int8", "fp8"):
        assert not is_the_same.any()
    else:
        # The first block and the last one are exact, those between are not.
        assert is_the_same.tolist() == [not BLOCK_SIZE <= token < 256 for token in range(300)]
    assert float((exact - read).abs().max()) < 2


@pytest.mark.parametrize("kv", CODECS)
def test_bytes_are_those_of_the_blocks(kv):
    shape = replace(SHAPE, kv=kv)
    problem = Problem(shape, CPU)
    planes = problem.layers[0].planes
    assert shape.stored_bytes == sum(plane.nbytes for plane in planes) / planes[0].shape[1] / BLOCK_SIZE * 600
    assert (shape.stored_bytes < SHAPE.stored_bytes) == (kv != "raw")


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_layers_hold_codes_in_memory_of_their_own(kv):
    shape = replace(SHAPE, kv=kv)
    problem = Problem(shape, CPU, rotated_bytes=2 * shape.stored_bytes)
    first, second = (layer.planes for layer in problem.layers)
    for plane, other in zip(first, second, strict=True):
        assert plane.data_ptr() != other.data_ptr()
        assert torch.equal(plane.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("kv", ["int8", "kivi2"])
def test_implementations_that_run_here_are_right(kv):
    problem = Problem(replace(SHAPE, kv=kv), CPU)
    able = [each for each in contenders(["sdpa", "flex"]) if each.refusal(problem) is None]
    able = [each for each in able if "interpreted" not in each.name]
    assert {"paged, reference", "sdpa"} <= {each.name for each in able}
    assert "flex_attention, paged" not in {each.name for each in able}
    for contender in able:
        problem.check(contender.prepare(problem)[0]())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kv", ["raw", "fp8", pytest.param("int4", marks=pytest.mark.slow)])
def test_the_kernels_are_right(kv):
    pytest.importorskip("triton")
    shape = Shape(Heads(1, 1, 16), torch.float32, batch=1, context=140, kv=kv)
    rows = correctness.rows_of_format(shape, (1, 9), DEVICE)
    assert {row["verdict"] for row in rows} == {"right"}
    calls = {"decode", "9 new tokens"}
    calls |= {"raw": {"write", "copy", "attention by block"}, "fp8": {"write"}, "int4": set()}[kv]
    assert {row["call"] for row in rows} == calls


def test_wrong_attention_is_told(monkeypatch):
    def forgets_the_scale(*inputs, scale, backend, **options):
        return paged_attention(*inputs, scale=1.0, backend="reference", **options)

    monkeypatch.setattr(correctness, "paged_attention", forgets_the_scale)
    row = correctness.attention_row(SHAPE, CPU)
    assert row["error"] is None
    assert row["verdict"].startswith("WRONG: the result is off by ")


BYTES = r"WRONG: \d+ of \d+ bytes differ"


@pytest.mark.parametrize(
    ("kv", "verdict"), [("raw", BYTES), ("int8", BYTES), ("fp8", "WRONG: the squared error of a key is .*")]
)
def test_wrong_writing_is_told(monkeypatch, kv, verdict):
    def writes_zeros(blocks, key, value, step, backend):
        new = (key, value) if backend == "reference" else (torch.zeros_like(key), value)
        write_kv(blocks, *new, step, backend="reference")

    monkeypatch.setattr(correctness, "write_kv", writes_zeros)
    row = correctness.write_row(replace(SHAPE, kv=kv, context=70), CPU)
    assert row["error"] is None
    assert re.fullmatch(verdict, row["verdict"])


def test_a_copy_that_is_forgotten_is_told(monkeypatch):
    def copies_one_pair(layers, pairs, backend):
        copy_blocks(layers, pairs if backend == "reference" else pairs[:1], backend="reference")

    monkeypatch.setattr(correctness, "copy_blocks", copies_one_pair)
    assert re.fullmatch(BYTES, correctness.copy_row(SHAPE, CPU)["verdict"])


@pytest.mark.parametrize(("softcap", "verdict"), [(None, "right"), (1.0, "WRONG: off by .*")])
def test_wrong_sums_of_attention_are_told(monkeypatch, softcap, verdict):
    def in_plain_pytorch(*inputs, backend, **options):
        return paged_attention(*inputs, **options, backend="reference")

    def with_a_softcap(*inputs, backend, **options):
        options["softcap"] = softcap if backend == "triton" else None
        return block_attention_scores(*inputs, **options, backend="reference")

    monkeypatch.setattr(correctness, "paged_attention", in_plain_pytorch)
    monkeypatch.setattr(correctness, "block_attention_scores", with_a_softcap)
    assert re.fullmatch(verdict, correctness.scores_row(SHAPE, CPU)["verdict"])


def test_a_clone_has_memory_of_its_own():
    blocks = Problem(replace(SHAPE, kv="int4"), CPU).layers[0]
    copied = clone(blocks)
    copied.exact.key.fill_(math.nan)
    assert not blocks.exact.key.isnan().any()
