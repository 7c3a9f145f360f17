"""Compiles every kernel for every row of the launch table and prints what came out, without a GPU.

python eval/kernel_report.py > docs/kernels_compiled.md
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

# Before anything imports the kernels: an interpreted kernel cannot be compiled.
os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import numpy as np
import torch
import triton
from compiled import SHARED_LIMIT, TARGETS, Compiled, compiling_for
from hf_paged_kernels import KVBlocks, StepMetadata
from hf_paged_kernels.triton_kernels import attention, block_mass, copy_blocks, write_kv
from hf_paged_kernels.triton_kernels.launch import LAUNCHES, Launch, select

BLOCK_SIZE = 64
HEADS = (8, 2)
DTYPES = {16: torch.bfloat16, 32: torch.float32}

INTRODUCTION = """\
# The Triton kernels, compiled

What the compiler makes of each row of the launch table (`kernels/hf_paged_kernels/triton_kernels/launch.py`), with no
GPU at hand: 8 heads on 2 KV heads, blocks of 64 tokens. Decode: one query, keys in splits. Extend: 64 fresh tokens
beside 960 in blocks. "all features": window, softcap, sinks, a 2-D mask. "bytes a token": what the main loop asks of
memory for a token, divided by what its key and value take. Registers and spills are a thread's (spills in bytes on
NVIDIA, in vector registers on AMD).

Printed by `python eval/kernel_report.py`; tests check that nothing spills, that shared memory fits, that keys and
values come in loads of 16 bytes, and that the loop loads at most 1.15 times what is stored.
"""


@dataclass(frozen=True)
class Row:
    """One kernel of one case.

    Attributes:
        case: what was called.
        launch: row of the launch table; `None` for kernels that have none.
        compiled: what came out.
        bytes_ratio: bytes that the main loop loads for a token, by those that the token takes; `None` if not counted.
    """

    case: str
    launch: Launch | None
    compiled: Compiled
    bytes_ratio: float | None


def launches_of(target: str) -> list[Launch]:
    """The rows of the launch table that `target` uses: its own, and those for any card that no row of its own hides."""
    rows = []
    for launch in LAUNCHES:
        is_own = launch.arch == target
        selected = select(target, launch.phase, launch.max_dim, launch.bits) is launch
        if is_own or (launch.arch == "any" and selected):
            rows.append(launch)
    return rows


def step(query_length: int, num_tokens: int = 1024, batch: int = 1) -> StepMetadata:
    """A step of rows that share all blocks."""
    width = num_tokens // BLOCK_SIZE
    return StepMetadata(
        block_table=np.arange(1, width + 1, dtype=np.int32)[None].repeat(batch, axis=0),
        seq_lens=np.full(batch, num_tokens, dtype=np.int32),
        padding=np.zeros(batch, dtype=np.int32),
        slots=np.full((batch, query_length), BLOCK_SIZE, dtype=np.int32),
        num_columns=num_tokens,
        block_size=BLOCK_SIZE,
        new_tokens_stored=True,
    )


def states(num_heads: int, query_length: int, dim: int, dtype: torch.dtype, batch: int = 1) -> torch.Tensor:
    return torch.empty(batch, query_length, num_heads, dim, dtype=dtype).transpose(1, 2)


def blocks_of(dim: int, dtype: torch.dtype) -> KVBlocks:
    return KVBlocks(*(torch.empty(HEADS[1], 32, BLOCK_SIZE, dim, dtype=dtype) for _ in range(2)))


def attend(target: str, launch: Launch, *, has_features: bool) -> list[Row]:
    """The attention kernels of one row of the table."""
    dtype, dim = DTYPES[launch.bits], launch.max_dim
    query_length = 1 if launch.phase == "decode" else 64
    features = {}
    if has_features:
        mask = torch.ones(1, 1024, dtype=torch.bool)
        features = {"window": 512, "softcap": 30.0, "sinks": torch.zeros(HEADS[0], dtype=dtype), "key_mask": mask}
    fresh = states(HEADS[1], query_length, dim, dtype)
    with compiling_for(target) as compiled:
        attention.paged_attention(
            states(HEADS[0], query_length, dim, dtype),
            blocks_of(dim, dtype),
            step(query_length),
            scale=dim**-0.5,
            new_kv=(fresh, fresh) if launch.phase == "extend" else None,
            num_splits=2 if launch.phase == "decode" else 1,
            launch=launch,
            **features,
        )
    name = f"{launch.phase} {dim}, {launch.bits} bits" + (", all features" if has_features else "")
    token_bytes = 2 * dim * launch.bits // 8
    rows = []
    for kernel in compiled:
        is_attention = kernel.kernel == "attend_kernel"
        ratio = kernel.loop_bytes / launch.tile / token_bytes if is_attention and kernel.loop_bytes else None
        rows.append(Row(name, launch if is_attention else None, kernel, ratio))
    return rows


def attend_shared(target: str) -> list[Row]:
    """The kernels of eight beams that share their prompt."""
    query, blocks = states(HEADS[0], 1, 128, torch.bfloat16, batch=8), blocks_of(128, torch.bfloat16)
    launch = select(target, "decode", 128, 16)
    with compiling_for(target) as compiled:
        attention.paged_attention(query, blocks, step(1, 4096, batch=8), scale=0.1, launch=launch)
    rows = []
    for kernel in compiled:
        is_shared = kernel.kernel == "attend_shared_kernel"
        ratio = kernel.loop_bytes / launch.tile / 512 if is_shared and kernel.loop_bytes else None
        rows.append(Row("8 beams, decode 128, 16 bits", launch if is_shared else None, kernel, ratio))
    return rows


def weigh(target: str) -> list[Row]:
    """The kernel that sums attention by block."""
    rows = []
    for dtype in DTYPES.values():
        query = states(HEADS[0], 1, 128, dtype)
        with compiling_for(target) as compiled:
            block_mass(query, blocks_of(128, dtype), step(1), torch.zeros(1, HEADS[0], 1), scale=0.1)
        rows += [Row(f"block mass 128, {dtype.itemsize * 8} bits", None, kernel, None) for kernel in compiled]
    return rows


def move(target: str) -> list[Row]:
    """The kernels that write tokens and copy blocks."""
    rows = []
    for dtype in DTYPES.values():
        new = states(HEADS[1], 1, 128, dtype)
        with compiling_for(target) as compiled:
            write_kv(blocks_of(128, dtype), new, new, step(1))
        rows += [Row(f"write 128, {dtype.itemsize * 8} bits", None, kernel, None) for kernel in compiled]
    with compiling_for(target) as compiled:
        copy_blocks([blocks_of(128, torch.bfloat16)], [(1, 2)])
    return rows + [Row("copy", None, kernel, None) for kernel in compiled]


def report(target: str, *, is_quick: bool) -> Iterator[Row]:
    """All kernels for one target; the quick part of them is one width."""
    for launch in launches_of(target):
        if is_quick and (launch.max_dim, launch.bits) != (128, 16):
            continue
        yield from attend(target, launch, has_features=False)
        if launch.max_dim == 128 and not is_quick:
            yield from attend(target, launch, has_features=True)
    yield from attend_shared(target)
    yield from weigh(target)
    yield from move(target)


def markdown(rows: list[Row]) -> str:
    lines = [
        "| GPU | case | kernel | tile | warps | stages | registers | spilled | shared KiB | loads by bits | MMA "
        "| bytes a token |",
        "| --- | --- | --- | --: | --: | --: | --: | --: | --: | --- | --: | --: |",
    ]
    for row in rows:
        compiled, launch = row.compiled, row.launch
        shape = (launch.tile, launch.num_warps, launch.num_stages) if launch else ("", "", "")
        loads = ", ".join(f"{count} x {width}" for width, count in sorted(compiled.loads.items()))
        cells = (
            compiled.target,
            row.case,
            compiled.kernel.removesuffix("_kernel"),
            *shape,
            compiled.registers,
            compiled.spilled,
            f"{compiled.shared / 1024:.1f}",
            loads,
            compiled.mma,
            "" if row.bytes_ratio is None else f"{row.bytes_ratio:.2f}x",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated, of " + ", ".join(TARGETS))
    parser.add_argument("--quick", action="store_true", help="one width only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    arguments = parser.parse_args()
    rows = []
    for target in arguments.targets.split(","):
        for row in report(target, is_quick=arguments.quick):
            print(f"{target}: {row.case}, {row.compiled.kernel}", file=sys.stderr)
            rows.append(row)
    if arguments.json:
        print(json.dumps([{**asdict(row), "shared_limit": SHARED_LIMIT[row.compiled.target]} for row in rows]))
    else:
        print(f"{INTRODUCTION}\nTriton {triton.__version__}.\n\n{markdown(rows)}")


if __name__ == "__main__":
    main()
