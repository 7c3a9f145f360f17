"""Searches the launch table of the Triton kernels on the card at hand and prints rows for it.

    python -m eval.kernels.tune --dims 128 --bits 16       one width, some minutes
    python -m eval.kernels.tune > launches.txt             all of the table

For every phase, width and number of bits, each tile, number of warps and number of stages is timed on one shape, with
the rows of today's launch. The fastest are then timed with every number of rows, on all shapes. Printed is the one with
the least geometric mean of its times by those of today's launch. All take turns; what does not fit on the card or does
not compute attention is left out and counted.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

import torch
from hf_paged_kernels.api import choose
from tqdm import tqdm

from eval.common.arguments import add_chosen, add_quick, parser_of, positive, positives

PHASES, DIMS, BITS = ("decode", "extend"), (64, 128, 256, 512), ("16", "32")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("python -m eval.kernels.tune", __doc__)
    add_chosen(parser, "--phases", PHASES)
    parser.add_argument(
        "--dims",
        type=positives,
        default=[*DIMS],
        help=f"largest key or value widths that rows are for; default {','.join(map(str, DIMS))}",
    )
    add_chosen(parser, "--bits", BITS)
    parser.add_argument("--repeats", type=positive, default=5, help="rounds in which all take turns; default 5")
    add_quick(parser, "few candidates and shapes")
    return parser


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        choose(device, "triton")
    except ValueError as error:
        print(f"there is no card to time kernels on: {error}", file=sys.stderr)
        return 1
    # Triton need not be installed before this.
    from eval.kernels import launch_search as tune_search

    if max(arguments.dims) > tune_search.MAX_DIM:
        parser.error(f"--dims: the kernels take widths up to {tune_search.MAX_DIM}")
    extent = tune_search.QUICK if arguments.quick else tune_search.THOROUGH
    if device.type == "cpu":
        extent = tune_search.INTERPRETED
    wanted = list(itertools.product(arguments.phases, map(int, arguments.bits), arguments.dims))
    results = []
    with tqdm(wanted, unit="row", file=sys.stderr) as progress:
        for phase, bits, dim in progress:
            progress.set_description(f"{phase} {dim}, {bits} bits")
            results.append(tune_search.search(extent, phase, dim, bits, device, arguments.repeats))
    print(*(result.summary() for result in results), "", *(result.row() for result in results), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
