"""Whose threads the kernels for CPUs run in, and what is left of them where there are none."""

from __future__ import annotations

import multiprocessing
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_paged_kernels import KVBlocks, StepMetadata, paged_attention

from tests.kernels.cases import Case, lay_out, random_rows

pytest.importorskip("numba")
threads = pytest.importorskip("hf_paged_kernels.numba.threads")

SCALE = 0.1


def long_context() -> tuple[torch.Tensor, KVBlocks, StepMetadata]:
    case = Case(lengths=(1000,), heads=(6, 2), dims=(64, 64), block_size=64, new_from_blocks=True)
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    return torch.randn(1, 6, 1, 64, generator=torch.Generator().manual_seed(1)), *lay_out(case, rows, 0.0)


@pytest.fixture
def two_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_pytorch_s_own_threads_are_found() -> None:
    if sys.platform == "linux":
        assert threads._openmp() is not None


def test_without_openmp_the_caller_does_all(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    inputs = long_context()
    expected = paged_attention(*inputs, scale=SCALE, backend="cpu")
    monkeypatch.setattr(threads, "_openmp", lambda: None)
    assert torch.equal(paged_attention(*inputs, scale=SCALE, backend="cpu"), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_does_not_wait_for_threads_it_has_not(two_threads: None) -> None:
    inputs = long_context()
    expected = paged_attention(*inputs, scale=SCALE, backend="cpu")

    def attend() -> None:
        out = paged_attention(*inputs, scale=SCALE, backend="cpu")
        os._exit(0 if (out.numpy() == expected.numpy()).all() else 1)

    child = multiprocessing.get_context("fork").Process(target=attend)
    child.start()
    child.join(timeout=60)
    if child.is_alive():
        child.kill()
        pytest.fail("the forked process hangs")
    assert child.exitcode == 0


@pytest.mark.slow
def test_machine_code_is_kept_for_the_source_it_came_from(tmp_path: Path) -> None:
    """A second process loads it; with another checksum of the sources it is compiled again."""
    script = (
        "import sys\n"
        "from hf_paged_kernels.numba import compiled, write\n"
        "compiled.checksum = lambda: int(sys.argv[1])\n"
        "assert write.store_exact.problem is None\n"
        "print(write.store_exact.was_compiled, write.store_exact.folder.parent == compiled.Path(sys.argv[2]))\n"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True)
        for arguments in (("1", str(tmp_path)), ("1", str(tmp_path)), ("2", str(tmp_path)))
    ]
    assert [run.stdout.strip() for run in runs] == ["True True", "False True", "True True"], runs[0].stderr
    said = "Compiling the CPU kernel for storing tokens exactly: about 2 s, once"
    assert [run.stderr.count(said) for run in runs] == [1, 0, 1]


def on_processor(name: str, features: str, cache: Path, script: str) -> subprocess.CompletedProcess[str]:
    """A script for whose kernels Numba takes the machine for another one."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("these are names of x86 processors")
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_vectors_of_8_floats(tmp_path: Path) -> None:
    """As on processors with AVX2 only."""
    script = (
        "import pytest, sys\n"
        "from hf_paged_kernels.numba.machine import LANES\n"
        "assert LANES == 8\n"
        "names = 'head_ratios or widths or every_width or any_number_of_channels or 16_bit or softcap'\n"
        "sys.exit(pytest.main(['-q', '-x', '-p', 'no:xdist', 'tests/kernels/numba/test_attention.py', '-k', names]))\n"
    )
    run = on_processor("haswell", "+avx2,+fma,+f16c", tmp_path, script)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


CHOOSE = (
    "import torch\n"
    "from hf_paged_kernels import api\n"
    "print(api.choose(torch.device('cpu')))\n"
)  # fmt: skip


def test_processors_that_cannot_convert_float16_have_plain_pytorch(tmp_path: Path) -> None:
    run = on_processor("x86-64", "", tmp_path, CHOOSE)
    assert run.stdout.strip() == "reference", run.stderr
    assert "F16C" in run.stderr


def test_old_versions_of_numba_have_plain_pytorch() -> None:
    old = "import numba\nnumba.version_info = numba.version_info._replace(short=(0, 61), string='0.61.2')\n"
    run = subprocess.run([sys.executable, "-c", old + CHOOSE], capture_output=True, text=True)
    assert run.stdout.strip() == "reference", run.stderr
    assert "need Numba 0.62 or newer, not 0.61.2" in run.stderr
