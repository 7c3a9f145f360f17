"""Measures what a `BlockStore` saves: prompts whose beginning is known, on a model of yours.

    python -m eval.prefix --quick                       a first look with a small model
    python -m eval.prefix --model FOLDER_OR_HUB_ID --json prefix.json --markdown prefix.md

Measured are the time to the first token of a prompt of which most is known, and of the second turn of a chat; questions
on one document, beside a copy.deepcopy of the document's cache for each; how many tokens transformers' continuous
batching reuses of them; and the index alone. All ways take turns in one process. The times of a store count
`cache_for`, the lookup, and not `commit`, which comes after the answer and is told by itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from tqdm import tqdm

from eval.common.arguments import (
    add_chosen,
    add_files,
    add_model,
    add_quick,
    add_threads,
    check_positions,
    chosen_from,
    default_of,
    fill,
    load_model,
    parser_of,
    positive,
    set_threads,
)
from eval.common.machine import describe
from eval.common.report import rows_of, write_files
from eval.prefix.index import BLOCK_SIZE, measure_index
from eval.prefix.sections import ANSWER_TOKENS, QUESTION_TOKENS, PrefixBench
from eval.prefix.tables import SECTIONS, conclusions, head_lines, markdown

CODECS = ("raw", "int8", "fp8", "k8v4", "int4", "k4v2", "kivi2")
FULL = {
    "prompt": 2048,
    "known": 1984,
    "history": 1024,
    "document": 1000,
    "questions": 8,
    "new_tokens": 8,
    "index_blocks": 100_000,
    "index_prompt": 8192,
    "repeats": 5,
    "document_repeats": 3,
}
QUICK = {
    "prompt": 256,
    "known": 192,
    "history": 128,
    "document": 160,
    "questions": 3,
    "new_tokens": 4,
    "index_blocks": 2000,
    "index_prompt": 1024,
    "repeats": 2,
    "document_repeats": 1,
}
HELP = {
    "prompt": "tokens of a prompt",
    "known": "its first tokens, which are known",
    "history": f"tokens of a first turn and its answer, more than {ANSWER_TOKENS}",
    "document": "tokens of the document",
    "questions": "questions on it",
    "new_tokens": "new tokens for each of them",
    "index_blocks": "blocks in the index",
    "index_prompt": "tokens of a prompt that is looked up there",
    "repeats": "rounds in which all take turns",
    "document_repeats": "rounds of the section document",
}


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("python -m eval.prefix", __doc__)
    add_model(parser)
    for name, text in HELP.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, help=f"{text}; {default_of(FULL, name)}")
    parser.add_argument(
        "--kv", type=chosen_from(CODECS), default=["raw", "int8", "int4"], help=f"from {','.join(CODECS)}"
    )
    parser.add_argument("--memory", default="1GiB", help="of each store; default 1GiB")
    add_chosen(parser, "--sections", SECTIONS)
    add_threads(parser)
    add_quick(parser)
    add_files(parser)
    return parser


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser.parse_args(argv)
    fill(arguments, QUICK if arguments.quick else FULL)
    if arguments.known >= arguments.prompt:
        parser.error("--known must be less than --prompt: at least one token is always computed")
    if arguments.history <= ANSWER_TOKENS:
        parser.error(f"--history must be more than {ANSWER_TOKENS}, the tokens of the answer in it")
    if arguments.index_prompt < 2 * BLOCK_SIZE:
        parser.error(f"--index-prompt must be at least {2 * BLOCK_SIZE}, two blocks")
    return arguments


def _measurements(arguments: argparse.Namespace, bench: PrefixBench) -> dict[str, Callable[[], None]]:
    """By section, what measures it."""

    def index() -> None:
        bench.rows += measure_index(arguments.index_blocks, arguments.index_prompt, arguments.repeats)

    def document() -> None:
        bench.document(arguments.document, arguments.questions, arguments.new_tokens, arguments.document_repeats)

    measurements = {
        "known": lambda: bench.known(arguments.prompt, arguments.known),
        "chat": lambda: bench.chat(arguments.history),
        "document": document,
        "batching": lambda: bench.batching(arguments.document, arguments.questions),
        "index": index,
    }
    return {section: measurements[section] for section in arguments.sections}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = _parser()
    arguments = _parse(parser, argv)
    set_threads(arguments)
    model, tokenizer, name = load_model(parser, arguments)
    advice = "a shorter --prompt, --history or --document"
    check_positions(parser, model, max(arguments.prompt, arguments.history + QUESTION_TOKENS), 1, advice)
    check_positions(parser, model, arguments.document + QUESTION_TOKENS, arguments.new_tokens, advice)

    bench = PrefixBench(model, tokenizer, arguments.repeats, arguments.memory, arguments.kv)
    settings = {option: getattr(arguments, option) for option in FULL} | {"memory": arguments.memory}
    settings["has_goals"] = all(settings[option] == FULL[option] for option in FULL if not option.endswith("repeats"))
    results = {"machine": describe(model, name), "settings": settings}
    print(*head_lines(results), sep="\n")
    if {*arguments.sections} - {"index"}:
        bench.warm_up()
    with tqdm(total=len(arguments.sections), unit="section", file=sys.stderr) as progress:
        for section, measure in _measurements(arguments, bench).items():
            progress.set_description(section)
            measure()
            progress.write(f"\n{SECTIONS[section].text(rows_of(bench.rows, section))}", file=sys.stdout)
            progress.update()
    results |= {"rows": bench.rows, "differences": bench.differences, "failures": bench.failures}
    print("", *conclusions(results), sep="\n")
    write_files(arguments, results, markdown)
    return 0
