"""Compares the speed and memory of KV caches in `generate` on a model of yours.

    python eval/speed.py --quick                       a first look with a small model, some minutes
    python eval/speed.py --model FOLDER_OR_HUB_ID --markdown speed.md --plot speed.png
    python eval/speed.py --kernels --quick             attention alone, without a model (see --kernels --help)
    python eval/speed.py --prefix --quick              prompts whose beginning is known (see --prefix --help)

Measured are transformers' DynamicCache, its QuantizedCache (if optimum-quanto is installed), and PagedCache: under its
own attention, raw (`paged`) and quantized (`int8`, `int4`), and under sdpa, which gathers (`paged+gather`). All take
turns in one process on the same model and prompts, and DynamicCache's tokens are what the others' are compared with.

Steps are timed inside `generate`, from one call of a logits processor to the next (see `timing.py`): this is what a
user waits for, it is the same code for every cache, and it serves greedy and beam search alike. Prefill is the time
from the start of the call to the logits of the first new token. End-of-sequence tokens are ignored, so all calls are
equally long.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence

import kernel_speed
import prefix_speed
import torch
from arguments import chosen_from, fill, new_file, positive, positives
from bookkeeping import measure_bookkeeping
from machine import describe
from plot import plot
from report import RATIO_NOTE, conclusions, machine_line, markdown, settings_line, text_section
from sections import Bench, Case, beam_cases, decode_cases, padding_cases
from tqdm import tqdm
from transformers import PreTrainedModel
from variants import BASELINE, VARIANTS, Variant, missing_requirement

from hf_paged_cache import PagedCacheError, small_models

SECTION_NAMES = ("decode", "beam", "padding", "bookkeeping")
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


def _mode_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--kernels", action="store_true", help="measure attention alone; its options: --kernels --help")
    parser.add_argument("--prefix", action="store_true", help="measure reuse of prefixes; its options: --prefix --help")
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="speed.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[_mode_parser()],
    )

    def default(name: str) -> str:
        value = FULL[name]
        return "default " + (",".join(map(str, value)) if isinstance(value, list) else str(value))

    parser.add_argument("--model", help=f"folder or hub id; default {small_models.SMOLLM2.name}")
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
    parser.add_argument(
        "--sections", type=chosen_from(SECTION_NAMES), default=[*SECTION_NAMES], help=f"from {','.join(SECTION_NAMES)}"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as the model is loaded")
    parser.add_argument("--threads", type=positive, help="threads of torch on the CPU; default: torch's choice")
    parser.add_argument("--quick", action="store_true", help="small defaults instead, for a first look")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", type=new_file, metavar="FILE", help="write the tables")
    parser.add_argument("--plot", type=new_file, metavar="FILE.png", help="draw milliseconds a step by context length")
    return parser


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser.parse_args(argv)
    fill(arguments, QUICK if arguments.quick else FULL)
    if arguments.new_tokens < 2:
        parser.error("--new-tokens must be at least 2: the first comes from the prefill, steps are timed after it")
    if arguments.plot is not None:
        if not {"decode", "beam"} & {*arguments.sections}:
            parser.error("--plot shows the sections decode and beam: add one of them to --sections")
        if importlib.util.find_spec("matplotlib") is None:
            parser.error('--plot needs matplotlib: pip install "hf-paged-cache[eval]"')
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


def _refusal(model: PreTrainedModel, cases: Sequence[Case], new_tokens: int) -> str | None:
    """Why the model cannot run these cases, or None."""
    if model.config.is_encoder_decoder:
        return "encoder-decoder models are not measured here: choose a decoder-only model"
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max((case.context for case in cases), default=0)
    if positions is not None and longest + new_tokens > positions:
        return (
            f"a context of {longest} tokens and {new_tokens} new ones do not fit the model's {positions} positions: "
            "choose shorter --contexts, --beam-contexts or --new-tokens"
        )
    return None


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
            table = text_section(section, [row for row in bench.rows if row["section"] == section])
            progress.write(f"\n{table}", file=sys.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    mode, others = _mode_parser().parse_known_args(argv)
    if mode.kernels:
        return kernel_speed.main(others)
    if mode.prefix:
        return prefix_speed.main(others)
    parser = _parser()
    arguments = _parse(parser, argv)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    try:
        model, tokenizer = small_models.load(arguments.model, "sdpa")
    except PagedCacheError as error:
        parser.error(str(error))
    if arguments.dtype is not None:
        model.to(getattr(torch, arguments.dtype))

    variants, unavailable = _variants(arguments.caches)
    cases = _cases(arguments, variants)
    refusal = _refusal(model, cases, arguments.new_tokens)
    if refusal is not None:
        parser.error(refusal)

    machine = describe(model, arguments.model or small_models.SMOLLM2.name)
    settings = {"new_tokens": arguments.new_tokens, "repeats": arguments.repeats}
    print(machine_line(machine), f"{settings_line(settings)}. {RATIO_NOTE}", sep="\n")
    bench = Bench(model, tokenizer, arguments.new_tokens, arguments.repeats, failures=unavailable)
    _measure(bench, cases, variants, arguments.sections)
    results = {
        "machine": machine,
        "settings": settings,
        "rows": bench.rows,
        "differences": bench.differences,
        "failures": bench.failures,
    }
    print("", *conclusions(results), sep="\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(results))
    if arguments.plot is not None:
        plot(results, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
