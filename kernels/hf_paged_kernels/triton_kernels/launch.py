"""How kernels are launched: tiles, warps and pipeline stages, by architecture, width, dtype and phase.

The table is data, so that a new card is a new row. `source` says where the figures of a row come from; rows that say
"compiled" were chosen by what the compiler reports (no spills, shared memory within the limit, 16-byte loads) and were
not timed on a card.
"""

from dataclasses import dataclass
from typing import Literal

Phase = Literal["decode", "extend"]


@dataclass(frozen=True)
class Launch:
    """One row of the table: applies to widths up to `max_dim` in elements of `bits`.

    Attributes:
        arch: compute capability such as `"sm_90"`, a ROCm name such as `"gfx942"`, or `"any"`.
        phase: decode (up to 8 queries, split keys) or extend.
        max_dim: largest of key and value width.
        bits: of an element of keys and values.
        rows: query tokens times heads that a program takes in the extend phase; the most it takes in decode.
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

LAUNCHES = (
    Launch("sm_90", "decode", 64, 16, 64, 128, 4, 3),
    Launch("sm_90", "decode", 128, 16, 64, 64, 4, 3),
    Launch("sm_90", "decode", 256, 16, 64, 32, 4, 3),
    Launch("sm_90", "decode", 512, 16, 32, 32, 8, 2),
    Launch("sm_90", "extend", 64, 16, 128, 64, 8, 3),
    Launch("sm_90", "extend", 128, 16, 64, 64, 8, 3),
    Launch("sm_90", "extend", 256, 16, 64, 32, 8, 2),
    Launch("sm_90", "extend", 512, 16, 32, 32, 8, 2),
    Launch("gfx942", "decode", 64, 16, 64, 64, 4, 2),
    Launch("gfx942", "decode", 128, 16, 64, 32, 4, 2),
    Launch("gfx942", "decode", 256, 16, 32, 16, 4, 2),
    Launch("gfx942", "decode", 512, 16, 16, 16, 8, 1),
    Launch("gfx942", "extend", 64, 16, 64, 64, 4, 2),
    Launch("gfx942", "extend", 128, 16, 64, 32, 4, 2),
    Launch("gfx942", "extend", 256, 16, 32, 16, 4, 2),
    Launch("gfx942", "extend", 512, 16, 16, 16, 8, 1),
    Launch("gfx942", "decode", 128, 32, 32, 16, 4, 1),
    Launch("gfx942", "decode", 512, 32, 16, 16, 8, 1),
    Launch("gfx942", "extend", 128, 32, 32, 16, 4, 1),
    Launch("gfx942", "extend", 512, 32, 16, 16, 8, 1),
    Launch("any", "decode", 64, 16, 64, 64, 4, 2),
    Launch("any", "decode", 128, 16, 64, 64, 4, 2),
    Launch("any", "decode", 256, 16, 32, 32, 4, 2),
    Launch("any", "decode", 512, 16, 16, 16, 8, 2),
    Launch("any", "extend", 64, 16, 64, 64, 8, 2),
    Launch("any", "extend", 128, 16, 64, 64, 8, 2),
    Launch("any", "extend", 256, 16, 32, 32, 8, 2),
    Launch("any", "extend", 512, 16, 16, 16, 8, 2),
    Launch("any", "decode", 128, 32, 32, 16, 4, 2),
    Launch("any", "decode", 512, 32, 16, 16, 16, 1),
    Launch("any", "extend", 128, 32, 32, 16, 8, 2),
    Launch("any", "extend", 512, 32, 16, 16, 16, 1),
)


def select(arch: str, phase: Phase, dim: int, bits: int) -> Launch:
    """The row for a width of `dim` elements of `bits` on `arch`: its own if the table has one, else one for any card.

    Raises:
        LookupError: the width is larger than any row's.
    """
    for name in (arch, "any"):
        for launch in LAUNCHES:
            if (launch.arch, launch.phase, launch.bits) == (name, phase, bits) and dim <= launch.max_dim:
                return launch
    raise LookupError(f"no launch for {phase} with {dim} elements of {bits} bits: the kernels take up to {MAX_DIM}")
