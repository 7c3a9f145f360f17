"""How kernels are launched: tiles, warps and pipeline stages, by architecture, width, dtype and phase.

The table is data, so that a new card is a new row. `source` says where the figures of a row come from; rows that say
"compiled" were chosen by what the compiler reports (no spills, shared memory within the limit, 16-byte loads, loads in
flight while a tile is worked on) and were not timed on a card.
"""

from dataclasses import dataclass
from typing import Literal

import triton

Phase = Literal["decode", "extend"]


@dataclass(frozen=True)
class Launch:
    """One row of the table: applies to widths up to `max_dim` in elements of `bits`, and to groups up to `rows`.

    Attributes:
        arch: compute capability such as `"sm_90"`, a ROCm name such as `"gfx942"`, or `"any"`, from `"sm_80"` on.
        phase: decode (up to 8 queries, split keys) or extend.
        max_dim: largest of key and value width.
        bits: of an element of keys and values; rows of 8 bits serve codes of fewer bits that have none of their own.
        rows: query tokens times heads that a program takes in the extend phase; the most it takes in decode. All heads
            of a group are in one program, so that it reads each key once; their sums are in its registers.
        tile: keys a step.
        num_warps, num_stages: as Triton means them.
        source: where the figures come from.
    """

    arch: str
    phase: Phase
    max_dim: int
    bits: int
    rows: int
    tile: int
    num_warps: int
    num_stages: int
    source: str = "compiled"


MAX_DIM = 512
MAX_DECODE_QUERIES = 8
# Compiled for these, 16-bit products run without matrix units and spill by the kilobyte.
UNSUPPORTED = ("sm_50", "sm_52", "sm_60", "sm_61", "sm_70", "sm_72", "sm_75")

# The first row that fits is taken, a card's own before those for any card.
LAUNCHES = (
    Launch("sm_90", "decode", 64, 16, 64, 128, 4, 3),
    Launch("sm_90", "decode", 128, 16, 64, 64, 4, 3),
    Launch("sm_90", "decode", 128, 16, 128, 64, 8, 3),
    Launch("sm_90", "decode", 256, 16, 32, 32, 4, 3),
    Launch("sm_90", "decode", 256, 16, 64, 32, 8, 3),
    Launch("sm_90", "decode", 512, 16, 32, 32, 8, 3),
    Launch("sm_90", "extend", 64, 16, 128, 64, 8, 3),
    Launch("sm_90", "extend", 128, 16, 64, 64, 8, 3),
    Launch("sm_90", "extend", 128, 16, 128, 64, 8, 3),
    Launch("sm_90", "extend", 256, 16, 64, 32, 8, 3),
    Launch("sm_90", "extend", 512, 16, 32, 32, 8, 3),
    Launch("gfx942", "decode", 64, 16, 64, 64, 4, 2),
    Launch("gfx942", "decode", 128, 16, 64, 32, 4, 2),
    Launch("gfx942", "decode", 128, 16, 128, 32, 8, 2),
    Launch("gfx942", "decode", 256, 16, 32, 16, 4, 2),
    Launch("gfx942", "decode", 256, 16, 64, 16, 8, 2),
    Launch("gfx942", "decode", 512, 16, 32, 16, 8, 1),
    Launch("gfx942", "extend", 64, 16, 64, 64, 4, 2),
    Launch("gfx942", "extend", 128, 16, 64, 32, 4, 2),
    Launch("gfx942", "extend", 128, 16, 128, 32, 8, 2),
    Launch("gfx942", "extend", 256, 16, 32, 16, 4, 2),
    Launch("gfx942", "extend", 256, 16, 64, 16, 8, 2),
    Launch("gfx942", "extend", 512, 16, 32, 16, 8, 1),
    Launch("gfx942", "decode", 128, 32, 32, 16, 4, 1),
    Launch("gfx942", "decode", 64, 32, 128, 16, 8, 1),
    Launch("gfx942", "decode", 512, 32, 16, 16, 8, 1),
    Launch("gfx942", "extend", 128, 32, 32, 16, 4, 1),
    Launch("gfx942", "extend", 64, 32, 128, 16, 8, 1),
    Launch("gfx942", "extend", 512, 32, 16, 16, 8, 1),
    Launch("any", "decode", 64, 16, 64, 64, 4, 3),
    Launch("any", "decode", 128, 16, 64, 64, 4, 3),
    Launch("any", "decode", 128, 16, 128, 64, 8, 3),
    Launch("any", "decode", 256, 16, 32, 32, 4, 3),
    Launch("any", "decode", 256, 16, 64, 16, 8, 3),
    Launch("any", "decode", 512, 16, 32, 16, 8, 3),
    Launch("any", "extend", 64, 16, 64, 64, 8, 3),
    Launch("any", "extend", 128, 16, 64, 64, 8, 3),
    Launch("any", "extend", 128, 16, 128, 64, 8, 3),
    Launch("any", "extend", 256, 16, 32, 32, 8, 3),
    Launch("any", "extend", 256, 16, 64, 16, 8, 3),
    Launch("any", "extend", 512, 16, 32, 16, 8, 3),
    Launch("any", "decode", 128, 32, 32, 16, 4, 3),
    Launch("any", "decode", 64, 32, 128, 16, 8, 3),
    Launch("any", "decode", 512, 32, 16, 16, 16, 1),
    Launch("any", "extend", 128, 32, 32, 16, 8, 3),
    Launch("any", "extend", 64, 32, 128, 16, 8, 3),
    Launch("any", "extend", 512, 32, 16, 16, 16, 1),
    Launch("gfx942", "decode", 64, 8, 64, 64, 4, 2),
    Launch("gfx942", "decode", 128, 8, 64, 32, 4, 2),
    Launch("gfx942", "decode", 256, 8, 16, 16, 4, 2),
    Launch("gfx942", "extend", 64, 8, 32, 64, 4, 2),
    Launch("gfx942", "extend", 128, 8, 32, 32, 4, 2),
    Launch("gfx942", "extend", 256, 8, 32, 16, 4, 2),
    Launch("any", "decode", 64, 8, 32, 64, 2, 3),
    Launch("any", "decode", 64, 8, 64, 64, 4, 3),
    Launch("any", "decode", 128, 8, 32, 64, 4, 3),
    Launch("any", "decode", 128, 8, 64, 64, 8, 3),
    Launch("any", "decode", 256, 8, 16, 32, 4, 3),
    Launch("any", "decode", 256, 8, 32, 32, 8, 3),
    Launch("any", "extend", 64, 8, 64, 64, 4, 3),
    Launch("any", "extend", 128, 8, 32, 64, 4, 3),
    Launch("any", "extend", 256, 8, 32, 32, 8, 3),
)


def phase_of(query_length: int) -> Phase:
    return "decode" if query_length <= MAX_DECODE_QUERIES else "extend"


def rows_of_program(launch: Launch, group: int, query_length: int) -> int:
    """Rows of a program: a power of two from 16 on that holds all heads of a group for at least one query."""
    if group > launch.rows:
        raise ValueError(f"{group} heads a KV head, more than the {launch.rows} rows of {launch}")
    wanted = group * query_length if launch.phase == "decode" else launch.rows
    return max(16, triton.next_power_of_2(group), min(launch.rows, triton.next_power_of_2(wanted)))


def archs(arch: str) -> tuple[str, str]:
    """Those whose rows `arch` uses: its own, then those for any card. Other AMD cards have as much shared memory as
    gfx942, and use its rows."""
    return arch, "gfx942" if arch.startswith("gfx") else "any"


def select(arch: str, phase: Phase, dim: int, bits: int, group: int = 1) -> Launch:
    """The row for a width of `dim` elements of `bits` and `group` query heads a KV head on `arch`.

    Raises:
        LookupError: there is none.
    """
    for name in archs(arch):
        for row_bits in (bits, max(bits, 8)):
            for launch in LAUNCHES:
                if (launch.arch, launch.phase, launch.bits) != (name, phase, row_bits):
                    continue
                if dim <= launch.max_dim and group <= launch.rows:
                    return launch
    raise LookupError(f"no launch for {phase} with {dim} elements of {bits} bits and {group} heads a KV head")
