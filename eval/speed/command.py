"""Compares the speed and memory of KV caches in `generate` on a model of yours.

    python -m eval.speed --quick                       a first look with a small model, some minutes
    python -m eval.speed --model FOLDER_OR_HUB_ID --markdown speed.md --plot speed.png

Measured are transformers' DynamicCache, its QuantizedCache (if optimum-quanto is installed), and PagedCache: under its
own attention, raw (`paged`) and quantized (`int8`, `int4`), and under sdpa, which gathers (`paged+gather`). All take
turns in one process on the same model and prompts, and DynamicCache's tokens are what the others' are compared with.

Steps are timed inside `generate`, from one call of a logits processor to the next (see `eval.common.timing`): this is
what a user waits for, it is the same code for every cache, and it serves greedy and beam search alike. Prefill is the
time from the start of the call to the logits of the first new token. End-of-sequence tokens are ignored, so all calls
are equally long.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from tqdm import tqdm

from eval.common.arguments import (
    add_chosen,
    add_dtype,
    add_files,
    add_model,
    add_plot,
    add_quick,
    add_threads,
    check_plot,
    check_positions,
    chosen_from,
    default_of,
    fill,
    load_model,
    parser_of,
    positive,
    positives,
    set_threads,
)
from eval.common.machine import describe
from eval.common.report import rows_of, write_files
from eval.common.variants import BASELINE, VARIANTS, Variant, missing_requirement
from eval.speed.bookkeeping import measure_bookkeeping
from eval.speed.plot import plot
from eval.speed.sections import Bench, Case, beam_cases, decode_cases, padding_cases
from eval.speed.tables import SECTIONS, conclusions, head_lines, markdown, text_section

FULL = {
    "contexts": [256, 1024, 2048],
    "batches": [1, 8],
    "beam_contexts": [256, 1024, 4096],
    "new_tokens": 64,
    "repeats": 3,
}
QUICK = {
    "contexts": [64, 256],
    "batches": [1, 2],
    "beam_contexts": [64, 256],
    "new_tokens": 8,
    "repeats": 1,
}
BOOKKEEPING_STEPS = 1024


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("python -m eval.speed", __doc__)
    default = partial(default_of, FULL)
    add_model(parser)
    parser.add_argument("--contexts", type=positives, help=f"prompt lengths; {default('contexts')}")
    parser.add_argument("--batches", type=positives, help=f"batch sizes; {default('batches')}")
    parser.add_argument(
        "--beam-contexts", type=positives, help=f"prompt lengths of beam search; {default('beam_contexts')}"
    )
    parser.add_argument("--new-tokens", type=positive, help=f"new tokens a call, at least 2; {default('new_tokens')}")
    parser.add_argument("--repeats", type=positive, help=f"rounds in which all take turns; {default('repeats')}")
    parser.add_argument(
        "--caches",
        type=chosen_from([*VARIANTS]),
        default=[*VARIANTS],
        help=f"from {','.join(VARIANTS)}; {BASELINE} always runs, as what the others are divided by",
    )
    add_chosen(parser, "--sections", SECTIONS)
    add_dtype(parser)
    add_threads(parser)
    add_quick(parser)
    add_files(parser)
    add_plot(parser, "milliseconds a step by context length")
    return parser


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser.parse_args(argv)
    fill(arguments, QUICK if arguments.quick else FULL)
    if arguments.new_tokens < 2:
        parser.error("--new-tokens must be at least 2: the first comes from the prefill, steps are timed after it")
    check_plot(parser, arguments, ["decode", "beam"])
    return arguments


def _cases(arguments: argparse.Namespace, variants: Sequence[Variant]) -> list[Case]:
    cases: list[Case] = []
    if "decode" in arguments.sections:
        cases += decode_cases(variants, arguments.contexts, arguments.batches)
    if "beam" in arguments.sections:
        cases += beam_cases(variants, arguments.beam_contexts)
    if "padding" in arguments.sections:
        cases += padding_cases(variants, max(arguments.contexts))
    return cases


def _variants(names: Sequence[str]) -> tuple[list[Variant], list[str]]:
    """The baseline and those of `names` that can run here, and in plain words which cannot."""
    missing = {name: reason for name in names if (reason := missing_requirement(name)) is not None}
    variants = [VARIANTS[name] for name in VARIANTS if name in {BASELINE, *names} - {*missing}]
    return variants, [f"{VARIANTS[name].label}: {reason}" for name, reason in missing.items()]


def _measure(bench: Bench, cases: Sequence[Case], variants: Sequence[Variant], sections: Sequence[str]) -> None:
    """Measures section by section, with a progress bar, and prints each section's table when it is complete."""
    rounds = 1 + bench.repeats
    runs = sum(len(case.variants) for case in cases) * rounds
    with tqdm(total=runs, unit="run", file=sys.stderr) as progress:
        for section in sections:
            if section == "bookkeeping":
                progress.set_description(section)
                rows, failures = measure_bookkeeping(variants, BOOKKEEPING_STEPS, bench.repeats)
                bench.rows += rows
                bench.failures += failures
            for case in cases:
                if case.section == section:
                    progress.set_description(str(case))
                    bench.measure(case, progress.update)
            table = text_section(section, rows_of(bench.rows, section))
            progress.write(f"\n{table}", file=sys.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = _parser()
    arguments = _parse(parser, argv)
    set_threads(arguments)
    model, tokenizer, name = load_model(parser, arguments)
    variants, unavailable = _variants(arguments.caches)
    cases = _cases(arguments, variants)
    longest = max((case.context for case in cases), default=0)
    check_positions(parser, model, longest, arguments.new_tokens, "shorter --contexts, --beam-contexts or --new-tokens")

    results = {
        "machine": describe(model, name),
        "settings": {"new_tokens": arguments.new_tokens, "repeats": arguments.repeats},
    }
    print(*head_lines(results), sep="\n")
    bench = Bench(model, tokenizer, arguments.new_tokens, arguments.repeats, failures=unavailable)
    _measure(bench, cases, variants, arguments.sections)
    results |= {"rows": bench.rows, "differences": bench.differences, "failures": bench.failures}
    print("", *conclusions(results), sep="\n")
    write_files(arguments, results, markdown)
    if arguments.plot is not None:
        plot(results, arguments.plot)
    return 0
