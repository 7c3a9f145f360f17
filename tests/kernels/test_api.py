"""Which kernels do a call: by device, argument and environment; and what they do not take."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hf_paged_kernels import KVBlocks, StepMetadata, api, block_attention_scores, paged_attention
from transformers import PreTrainedModel

from hf_paged_cache import InvalidArgumentError, PagedCache
from tests.kernels.hostile import poisoned_blocks
from tests.support.compat import generate


@pytest.fixture(autouse=True)
def fresh_environment() -> Iterator[None]:
    """The environment is read once a process; here for every question."""
    yield
    api._named_by_environment.cache_clear()


def choose(*arguments: Any) -> api.Backend:
    api._named_by_environment.cache_clear()
    return api.choose(*arguments)


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_the_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("numba")
    monkeypatch.delenv(api.ENVIRONMENT, raising=False)
    assert choose(CPU) == "cpu"
    assert choose(GPU) == "triton"
    assert choose(torch.device("mps")) == "reference"
    for device in (CPU, GPU):
        assert choose(device, "reference") == "reference"


def test_the_environment_decides_over_the_device_and_the_argument_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv(api.ENVIRONMENT, "reference")
    assert choose(GPU) == choose(CPU) == "reference"
    assert choose(GPU, "triton") == "triton"
    monkeypatch.setenv(api.ENVIRONMENT, "")
    assert choose(GPU) == "triton"


def test_without_triton_and_numba_there_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, device, backend in (("triton", GPU, "triton"), ("numba", CPU, "cpu")):
        monkeypatch.setattr(api, f"_has_{name}", lambda: False)
        assert choose(device) == "reference"
        with pytest.raises(ValueError, match=f"pip install {name}"):
            choose(device, backend)


def test_a_numba_that_does_not_work_is_left_alone_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("numba")

    def fail() -> None:
        raise ImportError("Numba needs NumPy 1.9 or less")

    monkeypatch.delenv(api.ENVIRONMENT, raising=False)
    monkeypatch.setattr(api, "_cpu", fail)
    api._cpu_works.cache_clear()
    api._warn_once.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger=api.__name__):
            assert choose(CPU) == choose(CPU) == "reference"
        assert [record.message for record in caplog.records] == [
            "Numba is installed, but does not work (Numba needs NumPy 1.9 or less): plain PyTorch attends instead, "
            "which is slower."
        ]
        with pytest.raises(ImportError, match=r"NumPy 1\.9"):
            choose(CPU, "cpu")
    finally:
        api._cpu_works.cache_clear()


def test_kernels_that_would_leave_threads_idle_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = pytest.importorskip("hf_paged_kernels.numba.threads")
    monkeypatch.delenv(api.ENVIRONMENT, raising=False)
    monkeypatch.setattr(threads, "_openmp", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert choose(CPU) == "reference"
    assert choose(CPU, "cpu") == "cpu"
    # How many threads there were at the first call decides nothing.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert choose(CPU) == "cpu"


def test_what_does_not_exist_or_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"backend 'cuda' .*expected one of 'cpu', 'reference', 'triton'"):
        choose(GPU, "cuda")
    monkeypatch.setenv(api.ENVIRONMENT, "cutlass")
    with pytest.raises(ValueError, match=f"'cutlass' .*{api.ENVIRONMENT}"):
        choose(CPU)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="tensors on a GPU, not on cpu"):
        choose(CPU, "triton")
    pytest.importorskip("numba")
    with pytest.raises(ValueError, match="tensors on a CPU, not on cuda:0"):
        choose(GPU, "cpu")


def test_a_cache_says_which_backends_there_are(llama) -> None:
    with pytest.raises(
        InvalidArgumentError, match="unknown backend='flash': expected one of 'cpu', 'reference', 'triton'"
    ):
        PagedCache(llama().config, backend="flash")


def one_row_of_tokens(count: int) -> StepMetadata:
    """A step of one row in block 1, the last of its tokens new."""
    return StepMetadata(
        block_table=np.ones((1, 1), dtype=np.int32),
        seq_lens=np.array([count], dtype=np.int32),
        padding=np.zeros(1, dtype=np.int32),
        slots=np.array([[16 + count - 1]], dtype=np.int32),
        num_columns=count,
        block_size=16,
        new_tokens_stored=True,
    )


def test_what_the_kernels_do_not_take_is_done_by_the_reference_with_one_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("triton")
    blocks = poisoned_blocks(2, 1, 16, (16, 16), torch.float64, 1.0)
    step = one_row_of_tokens(5)
    query = torch.randn(1, 1, 1, 16, dtype=torch.float64)
    api._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger=api.__name__):
        for _ in range(2):
            out = paged_attention(query, blocks, step, scale=1.0, backend="triton")
    assert torch.equal(out, torch.ones_like(out))
    assert [record.message for record in caplog.records] == [
        "The triton kernels do not take dtype torch.float64 with blocks in torch.float64: plain PyTorch attends "
        "instead, which is slower."
    ]


def test_options_that_mean_nothing_are_refused() -> None:
    """A window of 0 tokens would be read as none at all."""
    blocks = poisoned_blocks(2, 1, 16, (16, 16), torch.float32, 1.0)
    inputs = (torch.randn(1, 1, 1, 16), blocks, one_row_of_tokens(5))
    for window in (0, -1):
        with pytest.raises(ValueError, match=f"a window of {window} tokens: expected at least 1, or None"):
            paged_attention(*inputs, scale=1.0, window=window)
        with pytest.raises(ValueError, match=f"a window of {window} tokens"):
            block_attention_scores(*inputs, torch.zeros(1, 1, 1), scale=1.0, window=window)
    with pytest.raises(ValueError, match=r"a softcap of 0\.0: expected more than 0, or None"):
        paged_attention(*inputs, scale=1.0, softcap=0.0)


def test_planes_that_are_views_are_refused() -> None:
    plane = torch.zeros(1, 4, 16, 32)
    with pytest.raises(ValueError, match="planes of blocks have to be contiguous"):
        KVBlocks(plane[..., :16], plane[..., :16].contiguous())


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generate_on_interpreted_kernels(windowed, prompts, num_beams: int) -> None:
    """The whole path: writing, copy-on-write, decoding, windows and padding."""
    pytest.importorskip("triton")
    model: PreTrainedModel = windowed(["sliding_attention", "full_attention"])
    options = {"max_new_tokens": 3, "do_sample": False, "num_beams": num_beams}
    expected = generate(model, prompts(17, 9), None, **options)
    cache = PagedCache(model.config, block_size=16, backend="triton")
    assert generate(model, prompts(17, 9), cache, **options).equal(expected)
    assert (cache.stats().copies > 0) == (num_beams > 1)
