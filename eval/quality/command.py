"""Compares what KV caches make of a model's predictions.

    python -m eval.quality --quick                     a first look with a small model, some minutes
    python -m eval.quality --model FOLDER_OR_HUB_ID --text FILE --markdown quality.md --plot quality.png

Measured are PagedCache with every codec, transformers' QuantizedCache with every backend that is installed, and what
both are compared with, DynamicCache. In one forward pass over a text no cache is read, so it shows no loss. Here a
part of each text is stored and the rest is read in chunks, whose predictions rest on what the cache gives back.

The text is the language reference that comes with Python (it differs between Python versions, so the report has its
hash), a file, or a data set.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

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
    new_file,
    parser_of,
    positive,
    positives,
    set_threads,
)
from eval.common.machine import describe
from eval.common.report import write_files
from eval.quality.bench import Bench, Row, Task
from eval.quality.caches import CACHES, REFERENCE, CacheKind, detailed_kind, missing_requirement
from eval.quality.journal import Journal, JournalError
from eval.quality.key_bias import add_key_bias, key_bias
from eval.quality.likelihood import likelihood_row, make_windows
from eval.quality.plot import plot
from eval.quality.reader import kept_attention
from eval.quality.report import conclusions, head_lines, markdown, text_section
from eval.quality.retrieval import (
    FILLER,
    RECALL_WORDS,
    Haystack,
    passkey_prompts,
    passkey_row,
    recall_prompts,
    recall_row,
)
from eval.quality.text import Text, TextError, dataset_text, encode, file_text, python_text

ROWS: dict[str, Callable[[Bench, Sequence[Task], CacheKind], Row | None]] = {
    "likelihood": likelihood_row,
    "passkey": passkey_row,
    "recall": recall_row,
}
HAYSTACKS = {"text": "the text", "filler": "five sentences, repeated"}
FULL = {
    "contexts": [1024, 2048],
    "limit": 8192,
    "depths": [0.1, 0.3, 0.5, 0.7, 0.9],
    "trials": 1,
    "pairs": 16,
}
QUICK = {
    "contexts": [512],
    "limit": 256,
    "depths": [0.1, 0.5, 0.9],
    "trials": 1,
    "pairs": 8,
}


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def shares(text: str) -> list[float]:
    """Such numbers, comma-separated, in ascending order."""
    return sorted({share(item) for item in text.split(",")})


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("python -m eval.quality", __doc__)
    default = partial(default_of, FULL)
    add_model(parser)
    parser.add_argument(
        "--key-bias",
        type=key_bias,
        metavar="SIZE:PAIR,PAIR,..[:QUERY_FACTOR]",
        help="add a bias to the keys of all layers in these rotary pairs, 0 for the fastest, as Qwen2 has one",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", type=Path, metavar="FILE", help="text to measure on, in UTF-8")
    source.add_argument("--dataset", metavar="NAME", help="wikitext, or repository:configuration:split:column")
    parser.add_argument("--contexts", type=positives, help=f"tokens that a cache comes to hold; {default('contexts')}")
    parser.add_argument("--limit", type=positive, help=f"scored tokens for each context; {default('limit')}")
    parser.add_argument("--stored", type=share, default=0.5, help="part of a window that is only stored; default 0.5")
    parser.add_argument("--prefill-chunk", type=positive, default=512, help="tokens stored in a pass; default 512")
    parser.add_argument("--chunk", type=positive, default=32, help="tokens scored in a pass, 1 as generate; default 32")
    parser.add_argument("--depths", type=shares, help=f"of the pass key, from 0 to 1; {default('depths')}")
    parser.add_argument("--pairs", type=positive, help=f"words to recall, at most 32; {default('pairs')}")
    parser.add_argument("--trials", type=positive, help=f"pass keys at a depth, and lists; {default('trials')}")
    parser.add_argument(
        "--haystack",
        choices=[*HAYSTACKS],
        default="text",
        help="hide pass keys and lists in the text, or in five sentences, repeated, which is easier; default text",
    )
    parser.add_argument(
        "--caches",
        type=chosen_from([*CACHES]),
        default=[*CACHES],
        help=f"from {','.join(CACHES)}; {REFERENCE} always runs, as what the others are compared with",
    )
    parser.add_argument(
        "--details",
        type=detailed_kind,
        nargs="+",
        default=[],
        metavar="CODEC:FIELD=N,...",
        help="further codecs, with fields of KVQuant, such as int4:exact_sinks=0,exact_recent=128",
    )
    add_chosen(parser, "--sections", ROWS)
    add_dtype(parser)
    add_threads(parser)
    add_quick(parser)
    parser.add_argument(
        "--resume",
        type=new_file,
        metavar="FILE.jsonl",
        help="keep what is finished here; another run with it measures the rest, or other caches. Remove it when code "
        "has changed",
    )
    add_files(parser)
    add_plot(parser, "divergence by size, and the pass keys")
    return parser


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser.parse_args(argv)
    fill(arguments, QUICK if arguments.quick else FULL)
    if arguments.stored == 1:
        parser.error("--stored must be less than 1: the rest of a window is what is scored")
    if arguments.pairs > len(RECALL_WORDS):
        parser.error(f"--pairs must be at most {len(RECALL_WORDS)}")
    check_plot(parser, arguments, ["likelihood", "passkey"])
    return arguments


def _text(arguments: argparse.Namespace) -> Text:
    if arguments.text is not None:
        return file_text(arguments.text)
    return dataset_text(arguments.dataset) if arguments.dataset is not None else python_text()


def _tasks(
    arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, text: Text
) -> dict[str, list[list[Task]]]:
    """By section, the tasks of each context.

    Raises:
        TextError: the text is too short, or a context.
    """
    haystack = Haystack(encode(tokenizer, FILLER if arguments.haystack == "filler" else text.content))
    make = {
        "likelihood": lambda context: make_windows(tokenizer, text, context, arguments.stored, arguments.limit),
        "passkey": lambda context: passkey_prompts(tokenizer, haystack, context, arguments.depths, arguments.trials),
        "recall": lambda context: recall_prompts(tokenizer, haystack, context, arguments.pairs, arguments.trials),
    }
    return {section: [make[section](context) for context in arguments.contexts] for section in arguments.sections}


def _kinds(arguments: argparse.Namespace) -> tuple[dict[str, CacheKind], list[str]]:
    """The reference and the chosen caches that can run here, and in plain words which cannot."""
    chosen = [kind for name, kind in CACHES.items() if name in {REFERENCE, *arguments.caches}] + arguments.details
    missing = {kind.name: reason for kind in chosen if (reason := missing_requirement(kind)) is not None}
    kinds = {kind.name: kind for kind in chosen if kind.name not in missing}
    return kinds, [f"{CACHES[name].label}: {reason}" for name, reason in missing.items()]


def _measure(bench: Bench, tasks: Mapping[str, Sequence[Sequence[Task]]]) -> list[Row]:
    """Measures section by section, with a progress bar, and prints each section's tables when it is complete."""
    rows = []
    every_task = [task for contexts in tasks.values() for of_context in contexts for task in of_context]
    num_tokens = sum(task.num_tokens * len(bench.missing(task)) for task in every_task)
    with tqdm(total=num_tokens, unit="tok", unit_scale=True, file=sys.stderr) as progress:
        bench.advance = progress.update
        for section, contexts in tasks.items():
            for task in itertools.chain(*contexts):
                progress.set_description(str(task))
                if kinds := bench.missing(task):
                    task.measure(bench, kinds)
            candidates = (
                ROWS[section](bench, of_context, kind) for of_context in contexts for kind in bench.kinds.values()
            )
            section_rows = [row for row in candidates if row is not None]
            progress.write(f"\n{text_section(section, section_rows)}", file=sys.stdout)
            rows += section_rows
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = _parser()
    arguments = _parse(parser, argv)
    set_threads(arguments)
    model, tokenizer, name = load_model(parser, arguments)
    if arguments.key_bias is not None:
        try:
            add_key_bias(model, arguments.key_bias)
        except ValueError as error:
            parser.error(f"--key-bias: {error}")
        name = f"{name} with {arguments.key_bias}"
    try:
        text = _text(arguments)
        tasks = _tasks(arguments, tokenizer, text)
    except TextError as error:
        parser.error(str(error))
    longest = max(task.num_tokens for contexts in tasks.values() for of_context in contexts for task in of_context)
    check_positions(parser, model, longest, 0, "shorter --contexts")

    machine = describe(model, name)
    settings = {
        "text": text.name,
        "sha256": text.sha256,
        "stored": arguments.stored,
        "prefill_chunk": arguments.prefill_chunk,
        "chunk": arguments.chunk,
        "limit": arguments.limit,
        "haystack": HAYSTACKS[arguments.haystack],
    }
    try:
        journal = Journal({"model": machine["model"], "dtype": machine["dtype"], **settings}, arguments.resume)
    except JournalError as error:
        parser.error(str(error))
    kinds, unavailable = _kinds(arguments)
    bench = Bench(model, tokenizer, kinds, arguments.prefill_chunk, arguments.chunk, journal)
    results = {
        "machine": machine,
        "settings": settings,
        "plot": None if arguments.plot is None else arguments.plot.name,
    }
    print(*head_lines(results), sep="\n")
    with kept_attention(model):
        rows = _measure(bench, tasks)
    results |= {"rows": rows, "failures": [*unavailable, *bench.failures.values()]}
    print("", *conclusions(results), sep="\n")
    write_files(arguments, results, lambda run: markdown([run]))
    if arguments.plot is not None:
        plot(results, arguments.plot)
    return 0
