"""`eval.kernels` and `eval.kernels.tune`, on tiny shapes; the Triton kernels are interpreted without a GPU."""

from __future__ import annotations

import json
import sys
import types
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from eval.kernels import command, peers, sections, tables, timing, tune
from eval.kernels.peers import Contender
from eval.kernels.problems import Heads, Problem, Shape, WrongResult
from tests.kernels import oracle

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = Shape(Heads(4, 2, 16), torch.float32, batch=2, context=300)
TINY = {"heads": "2:1:16", "contexts": "48,70", "batches": "1,2", "dtypes": "float32", "peers": "sdpa", "repeats": 2}


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer is as much as a cache holds, and little is copied."""
    monkeypatch.setattr(timing, "last_level_cache", lambda device: 1)
    monkeypatch.setattr(timing, "COPIED_BYTES", {"cpu": 2**20, "cuda": 2**20})
    monkeypatch.setattr(sections, "LAUNCHED_CALLS", 2)
    monkeypatch.setattr(sections, "UNSHARED_SPLITS", (1, 2))


@pytest.fixture
def shares_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared reads however little they save."""
    pytest.importorskip("triton")
    from hf_paged_kernels.triton import plan, shared

    find = partial(shared.find_shared_runs, min_saved_tokens=0)
    monkeypatch.setattr(plan, "find_shared_runs", find)
    monkeypatch.setattr(shared, "find_shared_runs", find)


def bench(*contenders: Contender) -> sections.KernelBench:
    return sections.KernelBench(DEVICE, contenders, repeats=2)


def sdpa_and(name: str, prepare) -> tuple[Contender, ...]:
    """The first of torch's own, and one that is put to the test."""
    (sdpa, *_) = (each for each in peers.contenders(["sdpa"]) if each.kind == "sdpa")
    return sdpa, replace(sdpa, name=name, kind="paged", prepare=prepare)


def test_figures_of_a_run(tmp_path, capsys):
    files = {name: tmp_path / f"kernels.{name}" for name in ("json", "md")}
    options = TINY | {"sections": "attention,launch", "json": files["json"], "markdown": files["md"]}
    status = command.main([*(f"--{name}={value}" for name, value in options.items())])
    text, markdown = capsys.readouterr().out, files["md"].read_text()
    results = json.loads(files["json"].read_text())
    attention = [row for row in results["rows"] if row["section"] == "attention"]
    launch = [row for row in results["rows"] if row["section"] == "launch"]

    assert status == 0
    sizes = {(row["batch"], row["context"]) for row in attention}
    assert sizes == {(batch, context) for batch in (1, 2) for context in (48, 70)}
    for batch, context in sizes:
        rows = [row for row in attention if (row["batch"], row["context"]) == (batch, context)]
        assert {"paged, reference", "sdpa", "sdpa, heads repeated", "sdpa, heads as queries"} <= {
            row["implementation"] for row in rows
        }
        assert 1.0 in {row["sdpa_ratio"] for row in rows if row["kind"] == "sdpa"}
        for row in rows:
            assert row["kv_bytes"] == 2 * batch * context * 16 * 4
            assert 0 < row["microseconds_min"] <= row["microseconds"]
            assert row["bytes_per_second"] == pytest.approx(row["kv_bytes"] / row["microseconds"] * 1e6)
            assert row["copy_ratio"] > 0
    assert ("write", "paged, reference") in {(row["call"], row["implementation"]) for row in launch}
    assert results["copy_bytes_per_second"] > 0
    for output in (text, markdown):
        for section in ("attention", "launch"):
            assert tables.SECTIONS[section].title in output
        assert "Not measured: " in output
        assert str(tmp_path) not in output


def test_a_wrong_result_is_told_and_not_timed():
    def forgets_a_block(problem):
        key, value = (states[:, :, 64:] for states in problem.contiguous[0])
        return [partial(torch.nn.functional.scaled_dot_product_attention, problem.query, key, value, enable_gqa=True)]

    measured = bench(*sdpa_and("forgetful", forgets_a_block))
    measured.attention(SHAPE)

    assert ["microseconds" in row for row in measured.rows] == [True, False]
    (sentence,) = measured.failures
    assert sentence.startswith("forgetful (4:2:16, float32, batch 2, context 300): WrongResult: the result is off by")
    assert tables.SECTIONS["attention"].text(measured.rows).splitlines()[-1].split()[-5:] == ["-"] * 5


@pytest.mark.parametrize("out", [torch.zeros(2, 4, 1, 16), torch.full((2, 4, 1, 16), torch.nan), torch.zeros(2, 4)])
def test_what_counts_as_wrong(out):
    with pytest.raises(WrongResult):
        Problem(SHAPE, DEVICE).check(out.to(DEVICE))


def test_a_failing_call_is_told():
    def fails(problem):
        raise ValueError("no kernel in /usr/lib/somewhere")

    measured = bench(*sdpa_and("broken", fails))
    measured.attention(SHAPE)
    assert [*measured.failures] == [
        "broken (4:2:16, float32, batch 2, context 300): ValueError: no kernel in somewhere"
    ]


def test_too_large_a_case_is_left_out(monkeypatch):
    monkeypatch.setattr(sections, "available_memory", lambda device: 2**10)
    measured = bench(*peers.contenders(["sdpa"]))
    measured.attention(SHAPE)
    assert measured.rows == []
    assert [*measured.failures] == ["4:2:16, float32, batch 2, context 300: needs 0.0 GiB, 0.0 GiB are free"]


def test_a_shared_prompt(shares_everything):
    measured = bench()
    measured.shared_prompt(Shape(Heads(1, 1, 16), torch.float32, batch=3, context=128, shared_prompt=64))

    assert [row["implementation"] for row in measured.rows] == [
        "shared",
        "unshared, num_splits=1",
        "unshared, num_splits=2",
        "unshared, blocks of their own",
    ]
    assert not measured.failures
    assert 1.0 in {row["unshared_ratio"] for row in measured.rows[1:3]}
    results = {"copy_bytes_per_second": None, "rows": measured.rows, "failures": []}
    (line,) = tables.conclusions(results)
    assert line.startswith("3 rows that share 64 tokens (1:1:16, float32): ")


def test_a_prompt_too_short_to_be_shared():
    pytest.importorskip("triton")
    measured = bench()
    measured.shared_prompt(Shape(Heads(2, 1, 16), torch.float32, batch=3, context=128, shared_prompt=64))
    assert measured.rows == []
    (sentence,) = measured.failures
    assert sentence.endswith("too little is shared for one read to be faster; choose a longer --prompt")


def test_goals_are_summed_up_over_large_cases():
    row = {"section": "attention", "kind": "paged", "implementation": "triton", "kv": "fp8", "microseconds": 1.0}
    rows = [
        row | {"batch": 8, "context": 8192, "copy_ratio": 0.9, "sdpa_ratio": 0.8},
        row | {"batch": 64, "context": 4096, "copy_ratio": 0.86, "sdpa_ratio": 1.1},
        row | {"batch": 1, "context": 1024, "copy_ratio": 0.1, "sdpa_ratio": 9.0},
    ]
    assert tables.conclusions({"copy_bytes_per_second": 2e12, "rows": rows, "failures": ["this"]}) == [
        "Copying reads and writes 2,000.0 GB/s.",
        "triton, fp8, 65,536 tokens and more: 0.86 to 0.90 of copying, 0.80 to 1.10 times the fastest sdpa's time.",
        "Not measured: this",
    ]


@pytest.mark.parametrize("context", [48, 300])
def test_implementations_that_run_here_are_right(context):
    problem = Problem(replace(SHAPE, context=context), DEVICE)
    able = [each for each in peers.contenders(["sdpa"]) if each.refusal(problem) is None]
    assert len(able) >= 4
    for contender in able:
        (call,) = contender.prepare(problem)
        problem.check(call())


@pytest.mark.slow
@pytest.mark.parametrize("context", [128, 300])
def test_flex_attention_reads_our_blocks(context):
    problem = Problem(replace(SHAPE, context=context), DEVICE)
    (call,) = peers._flex(problem)
    problem.check(call())


def attention_by_table(query, rows_of_tokens):
    """The definition, for fakes: query `[batch, heads, dim]`, keys and values of each row `[tokens, heads, dim]`."""
    rows = [oracle.Row(key.transpose(0, 1), value.transpose(0, 1)) for key, value in rows_of_tokens]
    out, _ = oracle.attention(query[:, :, None], rows, scale=query.shape[-1] ** -0.5)
    return out[:, :, 0].to(query.dtype)


def fake_flash_attn(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale):
    """As flash-attn documents it: pages `[pages, page size, heads, dim]`, whose size is a multiple of 256."""
    assert k_cache.shape[1] % 256 == 0
    assert softmax_scale == q.shape[-1] ** -0.5
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    rows = [
        tuple(cache[table.long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        for table, length in zip(block_table, cache_seqlens, strict=True)
    ]
    return attention_by_table(q[:, 0], rows)[:, None]


class FakeFlashInfer:
    """As FlashInfer documents its batch decode with the layout HND: pages `[pages, heads, page size, dim]`."""

    def __init__(self, workspace, layout, use_tensor_cores):
        assert (workspace.dtype, layout) == (torch.uint8, "HND")

    def plan(self, indptr, indices, last_page_len, *sizes, **options):
        self.planned = indptr, indices, last_page_len
        self.sizes, self.options = sizes, options

    def run(self, query, caches):
        num_heads, num_kv_heads, head_dim, page_size = self.sizes
        assert query.shape[1:] == (num_heads, head_dim)
        assert caches[0].shape[1:] == (num_kv_heads, page_size, head_dim)
        assert self.options == {"q_data_type": query.dtype, "kv_data_type": query.dtype, "sm_scale": head_dim**-0.5}
        indptr, indices, last_page_len = self.planned
        rows = []
        for row, last in enumerate(last_page_len):
            pages = indices[indptr[row] : indptr[row + 1]].long()
            length = (len(pages) - 1) * page_size + last
            rows.append(tuple(cache[pages].transpose(1, 2).flatten(0, 1)[:length] for cache in caches))
        return attention_by_table(query, rows)


@pytest.mark.parametrize("context", [48, 300, 512])
def test_other_libraries_get_their_own_layouts(monkeypatch, context):
    modules = {
        "flash_attn": types.SimpleNamespace(flash_attn_with_kvcache=fake_flash_attn),
        "flash_attn_interface": types.SimpleNamespace(
            flash_attn_with_kvcache=lambda *tensors, page_table, **options: fake_flash_attn(
                *tensors, block_table=page_table, **options
            )
        ),
        "flashinfer": types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeFlashInfer),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    problem = Problem(replace(SHAPE, context=context), torch.device("cpu"))
    for contender in peers.contenders(["flash-attn", "flashinfer"]):
        if contender.kind != "paged":
            (call,) = contender.prepare(problem)
            problem.check(call())


def test_layers_hold_the_same_in_memory_of_their_own():
    problem = Problem(SHAPE, DEVICE, rotated_bytes=3 * SHAPE.stored_bytes)
    assert len(problem.layers) == len(problem.contiguous) == 3
    assert len({blocks.key.data_ptr() for blocks in problem.layers}) == 3
    assert torch.equal(problem.layers[0].value[:, 1:], problem.layers[2].value[:, 1:])
    assert torch.equal(problem.contiguous[0][0], problem.contiguous[2][0])


@pytest.mark.parametrize("query_length", [1, 20])
def test_the_expected_result_is_attention(query_length):
    problem = Problem(replace(SHAPE, context=100, query_length=query_length), torch.device("cpu"))
    rows = [oracle.Row(key, value) for key, value in zip(*problem.contiguous[0], strict=True)]
    expected, _ = oracle.attention(problem.query, rows, scale=problem.scale)
    torch.testing.assert_close(problem.expected, expected)


def test_rows_share_the_blocks_of_a_prompt():
    shape = replace(SHAPE, context=200, shared_prompt=128)
    problem = Problem(shape, DEVICE)
    key, _ = problem.contiguous[0]
    assert torch.equal(key[0, :, :128], key[1, :, :128])
    assert not torch.equal(key[0, :, 128:], key[1, :, 128:])
    assert problem.layers[0].num_blocks == 1 + 2 + 2 * 2
    assert shape.stored_bytes < shape.kv_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--heads 9:4:64", "'9:4:64': expected num_heads:num_kv_heads:head_dim"),
        ("--heads 9:3", "'9:3': expected num_heads:num_kv_heads:head_dim"),
        ("--heads 9:x:64", "'x' is not a whole number of at least 1"),
        ("--prompt 100", "'100' is no multiple of 64"),
        ("--peers cudnn", "'cudnn' is unknown, choose from sdpa, flex, flash-attn, flashinfer"),
        ("--sections decode", "'decode' is unknown, choose from attention, shared, launch"),
        ("--model some/model", "unrecognized arguments: --model some/model"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        command.main([*arguments.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def tune_search(monkeypatch: pytest.MonkeyPatch):
    """The module, with a search that is as small with a GPU as without."""
    pytest.importorskip("triton")
    from eval.kernels import launch_search as tune_search

    monkeypatch.setattr(tune_search, "QUICK", tune_search.INTERPRETED)
    return tune_search


def test_tuning_prints_rows_of_the_table(tune_search, capsys):
    from hf_paged_kernels.triton.launch import Launch

    assert tune.main(["--quick", "--dims=32,64", "--bits=16", "--repeats=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    launches = [eval(line.rstrip(","), {"Launch": Launch}) for line in lines if line.startswith("Launch(")]
    assert [(launch.phase, launch.max_dim, launch.bits) for launch in launches] == [
        (phase, dim, 16) for phase in ("decode", "extend") for dim in (32, 64)
    ]
    assert {launch.source for launch in launches} == {tune_search._source(DEVICE)}
    assert sum(" candidates" in line for line in lines) == 4


def test_launches_that_do_not_fit_are_counted(tune_search, monkeypatch):
    from triton.runtime.errors import OutOfResources

    def attend(*inputs, launch, **options):
        if launch.tile == 32:
            raise OutOfResources(2**18, 2**17, "shared memory")
        out = paged_attention(*inputs, launch=launch, **options)
        return out if launch.tile != 16 else torch.zeros_like(out)

    paged_attention = tune_search.paged_attention
    monkeypatch.setattr(tune_search, "paged_attention", attend)
    monkeypatch.setattr(tune_search, "median_ratio", lambda seconds, base: 1.0)
    found = tune_search.search(tune_search.INTERPRETED, "decode", 64, 16, DEVICE, repeats=1)
    assert found.left_out == Counter({"OutOfResources": 1, "WrongResult": 1})
    assert found.launch == found.today
    assert "as today; " in found.summary()


@pytest.mark.parametrize(("gain", "is_changed"), [(1.3, True), (1.01, False)])
def test_the_fastest_over_all_shapes_is_found(tune_search, monkeypatch, gain, is_changed):
    def race(today, launches, shape, device, repeats):
        """Tile 16 with one stage is fastest, and twice as fast with one query."""
        return {
            launch: 1 / (gain * (2 if shape.query_length == 1 else 1)) if launch.tile == 16 else 1.0
            for launch in launches
        }, {}

    monkeypatch.setattr(tune_search, "_race", race)
    sizes = (tune_search.Size(1, 64), tune_search.Size(1, 64, query_length=4))
    extent = replace(tune_search.INTERPRETED, sizes={"decode": sizes if is_changed else sizes[1:]})
    found = tune_search.search(extent, "decode", 64, 16, DEVICE, repeats=1)
    assert (found.launch.tile == 16) == is_changed
    if is_changed:
        assert found.gains == pytest.approx([2 * gain, gain])
        assert f"{2**0.5 * gain:.2f} times as fast as today's" in found.summary()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--phases prefill", "'prefill' is unknown, choose from decode, extend"),
        ("--bits 8", "'8' is unknown, choose from 16, 32"),
        ("--dims 0", "'0' is not a whole number of at least 1"),
        ("--dims 64,1024", "--dims: the kernels take widths up to 512"),
    ],
)
def test_bad_arguments_of_tuning(tune_search, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        tune.main(arguments.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_tuning_needs_a_card(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert tune.main([]) == 1
    assert capsys.readouterr().err.startswith("there is no card to time kernels on: ")
