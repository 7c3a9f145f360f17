"""When the kernels for CPUs are compiled, and what happens where they cannot be."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_paged_kernels import api, paged_attention, write_kv

from tests.kernels.cases import Case, lay_out, random_rows

pytest.importorskip("numba")
compiled = pytest.importorskip("hf_paged_kernels.numba.compiled")
attend = pytest.importorskip("hf_paged_kernels.numba.attend")
warmup = pytest.importorskip("hf_paged_kernels.numba.warmup")
write = pytest.importorskip("hf_paged_kernels.numba.write")


def nothing(version: int) -> Callable[[int], None]:
    def work(address):
        if version < 0:
            return

    return work


def not_python_that_numba_takes(version: int) -> Callable[[int], None]:
    def work(address):
        print({version: address}.popitem(), file=address)

    return work


def test_a_kernel_is_compiled_when_it_is_first_asked_for() -> None:
    kernel = compiled.Kernel("nothing", 1, nothing)
    assert "_function" not in vars(kernel)
    assert kernel.address == kernel.address != 0
    assert kernel.problem is None
    assert kernel.seconds > 0


def test_machine_code_is_made_in_memory_where_no_folder_can_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.caching import CacheImpl

    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    kernel = compiled.Kernel("nothing", 1, nothing)
    assert kernel.address != 0
    assert kernel.folder is None


def test_damaged_machine_code_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from numba.core import config

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    assert compiled.Kernel("nothing", 1, nothing).address != 0
    files = list(tmp_path.rglob("*.nb*"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:20])
    assert compiled.Kernel("nothing", 1, nothing).address != 0


def test_plain_pytorch_does_what_numba_cannot_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(lengths=(40,), heads=(4, 2), dims=(16, 16), new_from_blocks=True)
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    query = torch.randn(1, 4, 1, 16, generator=torch.Generator().manual_seed(1))
    blocks, step = lay_out(case, rows, 0.0)
    expected = paged_attention(query, blocks, step, scale=0.3, backend="reference")
    broken = compiled.Kernel("attention", 1, not_python_that_numba_takes)
    assert "Numba cannot compile attention" in broken.problem
    with pytest.raises(RuntimeError, match="cannot compile"):
        _ = broken.address
    monkeypatch.setattr("hf_paged_kernels.numba.attention.attend_exact", broken)
    monkeypatch.setattr(write, "store_exact", broken)
    api._warn_once.cache_clear()
    blocks, step = lay_out(case, rows, 0.0)
    key, value = blocks.key.clone(), blocks.value.clone()
    with caplog.at_level(logging.WARNING):
        out = [paged_attention(query, blocks, step, scale=0.3, backend="cpu") for _ in range(2)]
        write_kv(blocks, torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), step, backend="cpu")
    assert torch.equal(out[0], expected)
    assert torch.equal(out[1], expected)
    assert sum("plain PyTorch attends instead" in record.message for record in caplog.records) == 1
    assert (blocks.key != key).any()
    assert (blocks.value != value).any()


@pytest.mark.parametrize(
    ("storages", "kernels"),
    [
        (["exact"], [write.store_exact, attend.attend_exact]),
        (["scaled"], [write.store_codes, attend.attend_codes]),
        (["grouped", "exact"], [write.store_exact, attend.attend_codes, attend.attend_exact]),
    ],
)
def test_only_what_a_way_of_storing_uses_is_warmed_up(storages: list[str], kernels: list) -> None:
    assert list(warmup.warm_up(*storages)) == kernels


def test_importing_the_kernels_compiles_none() -> None:
    script = (
        "from hf_paged_kernels.numba import attend, write\n"
        "kernels = (write.store_exact, write.store_codes, attend.attend_exact, attend.attend_codes)\n"
        "print(sum('problem' in vars(kernel) for kernel in kernels))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True, text=True)
    assert run.stdout.strip() == "0", run.stderr
