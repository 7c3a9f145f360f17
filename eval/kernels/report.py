"""Compiles every kernel for every row of the launch table and prints what came out, without a GPU.

python -m eval.kernels.report > docs/kernels_compiled.md
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
from hf_paged_kernels import Blocks, GroupedBlocks, KVBlocks, MixedBlocks, StepMetadata
from hf_paged_kernels.triton import attention, block_attention_scores, copy_blocks, write_kv
from hf_paged_kernels.triton.launch import LAUNCHES, Launch, archs, rows_of_program, select
from tabulate import tabulate

from eval.kernels.compiled import SHARED_LIMIT, TARGETS, Compiled, compiling_for
from hf_paged_cache.codecs import Geometry, make_codec

BLOCK_SIZE = 64
KV_HEADS = 2
GROUP = 4
DTYPES = {16: torch.bfloat16, 32: torch.float32}
# The first three are the kinds of codes that kernels know, and the widths between which the others lie.
CODECS = ("int8", "int4", "kivi2", "fp8", "k8v4", "k4v2")

INTRODUCTION = """\
# The Triton kernels, compiled

What the compiler makes of each row of the launch table (`kernels/hf_paged_kernels/triton/launch.py`), with no
GPU at hand: 4 heads a KV head, or as many as fill the program in rows that are there for large groups; blocks of 64
tokens. Decode: one query, keys in splits, or four where the rows of a program are to be full. Extend: 64 fresh tokens
beside 960 in blocks. "all features": window, softcap, sinks, a 2-D mask. "bytes a token": what the main loop asks of
memory for a token, divided by what its key and value take. It is left out where codes are read beside fresh tokens or
by large groups: there it is another loop that has the most matrix work, or threads ask for scales that their neighbours
ask for too. "in flight": asynchronous copies that are under way while a tile is worked on (NVIDIA only). Registers and
spills are a thread's (spills in bytes on NVIDIA, in vector registers on AMD).

Printed by `python -m eval.kernels.report`; tests check that nothing in it spills, that shared memory fits, that keys
and values come in loads of 16 bytes (8-bit codes partly of 8), that with three stages loads are in flight, and that the
loop, mask aside, loads at most 1.15 times what is stored, of codes 1.2 times with their scales. They check what the
table shows; other heads, widths between those of the table and other cards may differ.
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


def launches_of(target: str) -> list[tuple[Launch, int]]:
    """The rows of the launch table that `target` uses, each with the group that it is compiled for."""
    rows = []
    for launch in LAUNCHES:
        if launch.arch not in archs(target):
            continue
        for group in (GROUP, launch.rows):
            if select(target, launch.phase, launch.max_dim, launch.bits, group) is launch:
                rows.append((launch, group))
                break
    return rows


def step(query_length: int, num_tokens: int = 1024, batch: int = 1) -> StepMetadata:
    """A step of rows that share all blocks, of which codes in groups are all but the first and the last one."""
    width = num_tokens // BLOCK_SIZE
    exact_table = np.full((batch, width), -1, dtype=np.int32)
    exact_table[:, 0], exact_table[:, -1] = 0, 1
    return StepMetadata(
        block_table=np.arange(1, width + 1, dtype=np.int32)[None].repeat(batch, axis=0),
        seq_lens=np.full(batch, num_tokens, dtype=np.int32),
        padding=np.zeros(batch, dtype=np.int32),
        slots=np.full((batch, query_length), BLOCK_SIZE, dtype=np.int32),
        num_columns=num_tokens,
        block_size=BLOCK_SIZE,
        new_tokens_stored=True,
        exact_table=exact_table,
    )


def states(num_heads: int, query_length: int, dim: int, dtype: torch.dtype, batch: int = 1) -> torch.Tensor:
    return torch.empty(batch, query_length, num_heads, dim, dtype=dtype).transpose(1, 2)


def blocks_of(dim: int, dtype: torch.dtype) -> KVBlocks:
    return KVBlocks(*(torch.empty(KV_HEADS, 32, BLOCK_SIZE, dim, dtype=dtype) for _ in range(2)))


def codes_of(codec: str, dim: int) -> Blocks:
    """Blocks of codes, of which the first row begins with an exact one."""
    states = torch.empty(1, KV_HEADS, 1, dim, dtype=torch.bfloat16)
    blocks = make_codec(codec).allocate(Geometry.of(states, states), BLOCK_SIZE, 32)
    return MixedBlocks(blocks, blocks_of(dim, torch.bfloat16)) if isinstance(blocks, GroupedBlocks) else blocks


def attend(
    target: str,
    launch: Launch,
    group: int,
    query_length: int,
    *,
    codec: str | None = None,
    has_features: bool = False,
) -> list[Row]:
    """The attention kernels of one row of the table."""
    dtype, dim, num_heads = DTYPES[max(launch.bits, 16)], launch.max_dim, group * KV_HEADS
    features = {}
    if has_features:
        mask = torch.ones(1, 1024, dtype=torch.bool)
        features = {"window": 512, "softcap": 30.0, "sinks": torch.zeros(num_heads, dtype=dtype), "key_mask": mask}
    blocks = codes_of(codec, dim) if codec else blocks_of(dim, dtype)
    fresh = states(KV_HEADS, query_length, dim, dtype)
    with compiling_for(target) as compiled:
        attention.paged_attention(
            states(num_heads, query_length, dim, dtype),
            blocks,
            step(query_length),
            scale=dim**-0.5,
            new_kv=(fresh, fresh) if launch.phase == "extend" else None,
            num_splits=2 if launch.phase == "decode" else 1,
            launch=launch,
            **features,
        )
    num_rows = rows_of_program(launch, group, query_length)
    width = codec or f"{launch.bits} bits"
    name = f"{launch.phase} {dim}, {width}, {num_rows} rows" + (", all features" if has_features else "")
    # Where fresh tokens or many rows are beside codes, it is another loop that has the most matrix work.
    serves_group = select(target, launch.phase, dim, launch.bits, GROUP) is launch
    counts_bytes = not codec or (launch.phase == "decode" and serves_group)
    rows = []
    for kernel in compiled:
        is_attention = kernel.kernel == "attend_kernel"
        ratio = None
        if is_attention and kernel.loop_bytes and counts_bytes:
            ratio = kernel.loop_bytes / launch.tile / token_bytes(blocks)
        rows.append(Row(name, launch if is_attention else None, kernel, ratio))
    return rows


def token_bytes(blocks: Blocks) -> float:
    """What a token of a head takes in blocks, with its part of everything that is there once a block."""
    tokens = blocks.num_kv_heads * blocks.num_blocks * blocks.block_size
    return sum(plane.numel() * plane.element_size() for plane in blocks.planes) / tokens


def attend_codes(target: str, launch: Launch, group: int, *, is_quick: bool) -> Iterator[Row]:
    """The attention kernels of one row of the table for codes, by how these are stored."""
    query_length = 1 if launch.phase == "decode" else 64
    is_common = launch.max_dim == 128 and group == GROUP
    if is_quick and not (is_common and launch.phase == "decode"):
        return
    for codec in CODECS[:3] if is_quick or not is_common else CODECS:
        yield from attend(target, launch, group, query_length, codec=codec)
        if launch.phase == "decode" and group == GROUP and launch.rows > 16 and not is_quick:
            yield from attend(target, launch, launch.rows // 4, 4, codec=codec)
    if is_common and not is_quick:
        yield from attend(target, launch, group, query_length, codec="int4", has_features=True)


def attend_shared(target: str) -> list[Row]:
    """The kernels of eight beams that share their prompt."""
    query, blocks = states(GROUP * KV_HEADS, 1, 128, torch.bfloat16, batch=8), blocks_of(128, torch.bfloat16)
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
    for bits, dtype in DTYPES.items():
        for dim in (128, 512):
            query = states(GROUP * KV_HEADS, 16, dim, dtype)
            with compiling_for(target) as compiled:
                block_attention_scores(
                    query, blocks_of(dim, dtype), step(16), torch.zeros(1, GROUP * KV_HEADS, 16), scale=0.1
                )
            rows += [Row(f"block mass {dim}, {bits} bits", None, kernel, None) for kernel in compiled]
    return rows


def move(target: str) -> list[Row]:
    """The kernels that write tokens and copy blocks."""
    rows = []
    for dtype in DTYPES.values():
        new = states(KV_HEADS, 1, 128, dtype)
        with compiling_for(target) as compiled:
            write_kv(blocks_of(128, dtype), new, new, step(1))
        rows += [Row(f"write 128, {dtype.itemsize * 8} bits", None, kernel, None) for kernel in compiled]
    new = states(KV_HEADS, 1, 128, torch.bfloat16)
    for codec in ("int8", "fp8"):
        with compiling_for(target) as compiled:
            write_kv(codes_of(codec, 128), new, new, step(1))
        rows += [Row(f"write 128, {codec}", None, kernel, None) for kernel in compiled]
    with compiling_for(target) as compiled:
        copy_blocks([blocks_of(128, torch.bfloat16)], [(1, 2)])
    return rows + [Row("copy", None, kernel, None) for kernel in compiled]


def report(target: str, *, is_quick: bool) -> Iterator[Row]:
    """All kernels for one target; the quick part of them is one width."""
    for launch, group in launches_of(target):
        if launch.bits == 8:
            yield from attend_codes(target, launch, group, is_quick=is_quick)
            continue
        is_common = (launch.max_dim, launch.bits) == (128, 16)
        if is_quick and not (is_common and group == GROUP):
            continue
        yield from attend(target, launch, group, 1 if launch.phase == "decode" else 64)
        if is_common and group == GROUP and launch.phase == "decode":
            yield from attend(target, launch, launch.rows // 4, 4)
        if launch.max_dim == 128 and not is_quick:
            yield from attend(target, launch, group, 1 if launch.phase == "decode" else 64, has_features=True)
    yield from attend_shared(target)
    yield from weigh(target)
    yield from move(target)


def markdown(rows: list[Row]) -> str:
    """The rows as a table."""
    cells = []
    for row in rows:
        compiled, launch = row.compiled, row.launch
        cells.append(
            {
                "GPU": compiled.target,
                "case": row.case,
                "kernel": compiled.kernel.removesuffix("_kernel"),
                "tile": launch and launch.tile,
                "warps": launch and launch.num_warps,
                "stages": launch and launch.num_stages,
                "registers": compiled.registers,
                "spilled": compiled.spilled,
                "shared KiB": f"{compiled.shared / 1024:.1f}",
                "loads by bits": ", ".join(f"{count} x {width}" for width, count in sorted(compiled.loads.items())),
                "MMA": compiled.mma,
                "in flight": launch and compiled.in_flight,
                "bytes a token": row.bytes_ratio and f"{row.bytes_ratio:.2f}x",
            }
        )
    words = {"GPU", "case", "kernel", "loads by bits"}
    alignment = ["left" if name in words else "right" for name in cells[0]]
    return tabulate(cells, "keys", "pipe", colalign=alignment, disable_numparse=True)


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
