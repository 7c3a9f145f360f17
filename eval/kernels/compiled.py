"""What the compiler makes of a Triton kernel, for a GPU that need not be there: registers, spills, loads, MMA.

The Python code that launches a kernel runs as it is, on CPU tensors, against a driver that only names a target; the
kernel is compiled for the arguments it was launched with, and not run.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes of shared memory that one program may have.
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled for one target.

    Attributes:
        kernel: name of the function.
        target: name of the GPU, a key of `TARGETS`.
        registers: of a thread.
        spilled: bytes of registers that a thread keeps in memory; on AMD spilled vector registers.
        shared: bytes of shared memory.
        loads: loads from global memory by their width in bits, asynchronous copies among them.
        mma: matrix instructions.
        loop_bytes: bytes that a program asks of global memory in one round of its main loop; `None` on AMD.
        in_flight: asynchronous copies that a loop leaves under way while it works on a tile; `None` on AMD.
    """

    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int
    loads: dict[int, int]
    mma: int
    loop_bytes: int | None
    in_flight: int | None


class _TargetOnly:
    """A driver that knows a target and nothing to run on."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # Compiled kernels are kept by device, so each target is one of its own.
        return list(TARGETS.values()).index(self._target)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling_for(target: str) -> Iterator[list[Compiled]]:
    """Kernels launched inside are compiled for `target` and listed, and not run."""
    compiled: list[Compiled] = []
    with _launching_for(target, lambda function, kernel: compiled.append(_examine(function.__name__, target, kernel))):
        yield compiled


@contextmanager
def counting_variants(target: str) -> Iterator[dict[str, set[Any]]]:
    """Of each kernel launched inside, what it would be compiled for; nothing is compiled."""
    variants: dict[str, set[Any]] = {}

    class _Done:
        """Stands in for a kernel that is compiled or being so."""

        def result(self) -> "_Done":
            return self

    def note(self: JITFunction, key: Any, *inputs: Any) -> _Done:
        variants.setdefault(self.__name__, set()).add(key)
        return _Done()

    compile_kernel = JITFunction._do_compile
    JITFunction._do_compile = note
    try:
        with _launching_for(target, lambda self, kernel: None):
            yield variants
    finally:
        JITFunction._do_compile = compile_kernel


@contextmanager
def _launching_for(target: str, examine: Callable[[JITFunction, Any], None]) -> Iterator[None]:
    """Kernels launched inside are compiled for `target`, handed to `examine`, and not run."""
    driver, run = triton.runtime.driver._active, JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        examine(self, run(self, *args, grid=grid, warmup=True, **options))

    triton.runtime.driver.set_active(_TargetOnly(TARGETS[target]))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run
        triton.runtime.driver._active = driver


def _examine(name: str, target: str, kernel: Any) -> Compiled:
    examine: Callable[..., Compiled] = _examine_amd if TARGETS[target].backend == "hip" else _examine_nvidia
    return examine(name, target, kernel)


def _examine_nvidia(name: str, target: str, kernel: Any) -> Compiled:
    arch = TARGETS[target].arch
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(kernel.asm["ptx"])
        cubin.write_bytes(kernel.asm["cubin"])
        gpu = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        assembler = TOOLS / "ptxas-blackwell" if arch >= 90 else TOOLS / "ptxas"
        assembled = [assembler, "-lineinfo", "-v", f"--gpu-name={gpu}", ptx, "-o", Path(folder, "again.cubin")]
        log = subprocess.run(assembled, capture_output=True, text=True, check=True).stderr
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    instructions = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.a-z]+)\s*(.*?);", sass, re.M)
    code = [(int(address, 16), operation, operands) for address, operation, operands in instructions]
    labels = dict(re.findall(r"^(\.L_x_\d+):\n(?:\s*//.*\n)*\s+/\*([0-9a-f]{4,})\*/", sass, re.M))
    threads = kernel.metadata.num_warps * 32
    loads: dict[int, int] = {}
    for _, operation, _ in code:
        if _is_load(operation):
            loads[_width(operation)] = loads.get(_width(operation), 0) + 1
    body = _main_loop(code, {label: int(address, 16) for label, address in labels.items()})
    return Compiled(
        kernel=name,
        target=target,
        registers=int(re.search(r"Used (\d+) registers", log)[1]),
        spilled=int(re.search(r"(\d+) bytes spill stores", log)[1]),
        shared=kernel.metadata.shared,
        loads=loads,
        mma=sum(_is_mma(operation) for _, operation, _ in code),
        loop_bytes=sum(_width(operation) // 8 * threads for operation in body if _is_load(operation)),
        in_flight=max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", kernel.asm["ptx"])), default=0),
    )


def _examine_amd(name: str, target: str, kernel: Any) -> Compiled:
    assembly = kernel.asm["amdgcn"]
    loads: dict[int, int] = {}
    for words in re.findall(r"^\s+(?:global|buffer)_load_(\w+)", assembly, re.M):
        digits = re.search(r"x(\d)$", words)
        width = 32 * int(digits[1]) if digits else 8 if "byte" in words else 16 if "short" in words else 32
        loads[width] = loads.get(width, 0) + 1
    return Compiled(
        kernel=name,
        target=target,
        registers=int(re.search(r"\.vgpr_count:\s+(\d+)", assembly)[1]),
        spilled=int(re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)[1]),
        shared=kernel.metadata.shared,
        loads=loads,
        mma=len(re.findall(r"^\s+v_(?:mfma|smfmac)", assembly, re.M)),
        loop_bytes=None,
        in_flight=None,
    )


def _is_load(operation: str) -> bool:
    return operation.startswith(("LDG.", "LDGSTS"))


def _is_mma(operation: str) -> bool:
    return operation.startswith(("HMMA", "HGMMA", "IMMA", "QGMMA"))


def _width(operation: str) -> int:
    """Bits that a load takes for a thread."""
    widths = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
    return next((widths[part] for part in operation.split(".") if part in widths), 32)


def _main_loop(code: list[tuple[int, str, str]], labels: dict[str, int]) -> list[str]:
    """The operations of the loop with the most matrix work that has no mask, which is the longest-running one.

    Loops are backward branches. Of those with the same matrix work, the one with the fewest instructions is the
    interior, without masks.
    """
    bodies = []
    for address, operation, operands in code:
        target = re.search(r"\((\.L_x_\d+)\)", operands)
        if operation.startswith("BRA") and target and labels.get(target[1], address) < address:
            first = labels[target[1]]
            bodies.append([op for at, op, _ in code if first <= at <= address])
    work = [sum(_is_mma(operation) or operation.startswith("FFMA") for operation in body) for body in bodies]
    busy = [body for body, amount in zip(bodies, work, strict=True) if 2 * amount > max(work)]
    return min(busy, key=len, default=[])
