"""Measures attention on blocks alone, without a model, beside what others offer.

    python -m eval.kernels --quick                       a first look
    python -m eval.kernels --json kernels.json --markdown kernels.md

Measured are our backends that run here, on blocks in random order; scaled_dot_product_attention on contiguous keys and
values; flex_attention on the same blocks; and flash-attn and FlashInfer where they are installed. Every result is
compared with attention in float64 first: what is wrong is not timed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from tqdm import tqdm

from eval.common.arguments import (
    add_chosen,
    add_files,
    add_quick,
    add_threads,
    chosen_from,
    default_of,
    fill,
    parser_of,
    positive,
    positives,
    set_threads,
)
from eval.common.machine import describe_hardware
from eval.common.report import rows_of, write_files
from eval.kernels.peers import PEERS, contenders
from eval.kernels.problems import BLOCK_SIZE, Heads, Shape
from eval.kernels.sections import KernelBench
from eval.kernels.tables import SECTIONS, conclusions, head_lines, markdown
from hf_paged_cache import CODECS

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
FULL = {
    "heads": [Heads(9, 3, 64), Heads(32, 8, 128)],
    "contexts": [1024, 4096, 16384],
    "batches": [1, 8, 32],
    "dtypes": ["float32", "bfloat16"],
    "prompt": 16384,
    "repeats": 7,
}
QUICK = {
    "heads": [Heads(9, 3, 64)],
    "contexts": [256, 1024],
    "batches": [1, 2],
    "dtypes": ["float32", "bfloat16"],
    "prompt": 4096,
    "repeats": 3,
}


def heads(text: str) -> list[Heads]:
    """Such as `9:3:64,32:8:128`."""
    chosen = []
    for item in text.split(","):
        numbers = [positive(number) for number in item.split(":")]
        if len(numbers) != 3 or numbers[0] % numbers[1] > 0:
            raise argparse.ArgumentTypeError(
                f"{item!r}: expected num_heads:num_kv_heads:head_dim, the first a multiple of the second"
            )
        chosen.append(Heads(*numbers))
    return chosen


def whole_blocks(text: str) -> int:
    """A number of tokens that fills blocks."""
    if positive(text) % BLOCK_SIZE > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no multiple of {BLOCK_SIZE}, the tokens of a block")
    return positive(text)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("python -m eval.kernels", __doc__)
    default = partial(default_of, FULL)
    parser.add_argument("--heads", type=heads, help=f"num_heads:num_kv_heads:head_dim; {default('heads')}")
    parser.add_argument("--contexts", type=positives, help=f"tokens of a row; {default('contexts')}")
    parser.add_argument("--batches", type=positives, help=f"rows; {default('batches')}")
    parser.add_argument("--dtypes", type=chosen_from([*DTYPES]), help=f"from {','.join(DTYPES)}; {default('dtypes')}")
    parser.add_argument(
        "--kv",
        type=chosen_from(CODECS),
        default=["raw"],
        help=f"formats of blocks, from {','.join(CODECS)}; default raw",
    )
    add_chosen(parser, "--peers", PEERS)
    add_chosen(parser, "--sections", SECTIONS)
    parser.add_argument("--beams", type=positive, default=8, help="rows that share a prompt; default 8")
    parser.add_argument("--prompt", type=whole_blocks, help=f"tokens that they share; {default('prompt')}")
    parser.add_argument("--repeats", type=positive, help=f"rounds in which all take turns; {default('repeats')}")
    add_threads(parser)
    add_quick(parser)
    add_files(parser)
    return parser


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser.parse_args(argv)
    fill(arguments, QUICK if arguments.quick else FULL)
    return arguments


def _cases(arguments: argparse.Namespace, bench: KernelBench) -> dict[str, list[tuple[Callable[[Shape], None], Shape]]]:
    """By section, what to measure each shape with."""
    models = [(one, DTYPES[dtype]) for one, dtype in itertools.product(arguments.heads, arguments.dtypes)]
    sizes = list(itertools.product(arguments.batches, arguments.contexts))
    context = arguments.prompt + BLOCK_SIZE
    cases = {
        "attention": [
            (bench.attention, Shape(*model, *size, kv=kv)) for model in models for size in sizes for kv in arguments.kv
        ],
        "shared": [
            (bench.shared_prompt, Shape(*model, arguments.beams, context, shared_prompt=arguments.prompt))
            for model in models
        ],
        "launch": [
            (bench.launch, Shape(arguments.heads[0], DTYPES[dtype], batch=1, context=BLOCK_SIZE))
            for dtype in arguments.dtypes
        ],
    }
    return {section: cases[section] for section in arguments.sections}


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    arguments = _parse(_parser(), argv)
    set_threads(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = KernelBench(device, contenders(arguments.peers), arguments.repeats)
    results = {
        "machine": describe_hardware(device),
        "settings": {"repeats": arguments.repeats, "rotated_bytes": bench.rotated_bytes},
    }
    print(*head_lines(results), sep="\n")
    cases = _cases(arguments, bench)
    with tqdm(total=sum(map(len, cases.values())), unit="case", file=sys.stderr) as progress:
        for section, measurements in cases.items():
            for measure, shape in measurements:
                progress.set_description(f"{section}, {shape}")
                measure(shape)
                progress.update()
            if rows := rows_of(bench.rows, section):
                progress.write(f"\n{SECTIONS[section].text(rows)}", file=sys.stdout)
    results |= {
        "copy_bytes_per_second": bench.copy_bytes_per_second,
        "rows": bench.rows,
        "failures": [*bench.failures],
    }
    print("", *conclusions(results), sep="\n")
    write_files(arguments, results, markdown)
    return 0
