"""Runs tasks of lm-evaluation-harness on a model whose keys and values are in a cache of choice.

    python -m eval.harness --model FOLDER_OR_HUB_ID --tasks wikitext,lambada_openai --kv raw,int4

The harness by itself computes log-likelihoods in one forward pass, in which no cache is read: they come out the same
whatever the cache does. Here contexts are read in chunks through a new cache, and generation gets a new cache for each
batch. A cache that is to quantize, but of which no quantized token was read, is an error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.common.arguments import (
    add_model,
    add_threads,
    chosen_from,
    load_model,
    new_file,
    parser_of,
    positive,
    set_threads,
)
from eval.common.machine import describe
from eval.common.report import Column, Row, machine_line, text_table
from eval.quality.caches import CACHES, CacheKind, missing_requirement
from eval.quality.reader import kept_attention

COLUMNS: tuple[Column, ...] = (
    ("task", lambda row: row["task"]),
    ("metric", lambda row: row["metric"]),
    ("cache", lambda row: row["label"]),
    ("value", lambda row: f"{row['value']:.4f}"),
    ("+-", lambda row: "-" if row["error"] is None else f"{row['error']:.4f}"),
)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("python -m eval.harness", __doc__)
    add_model(parser)
    parser.add_argument("--tasks", required=True, type=lambda text: text.split(","), help="names, comma-separated")
    parser.add_argument(
        "--kv", type=chosen_from([*CACHES]), default=["raw", "int8"], help=f"from {','.join(CACHES)}; default raw,int8"
    )
    parser.add_argument("--chunk", type=positive, default=64, help="tokens in a forward pass; default 64, a block")
    parser.add_argument("--batch-size", type=positive, default=1, help="default 1")
    parser.add_argument("--max-length", type=positive, help="longest context; default: the model's")
    parser.add_argument("--num-fewshot", type=int, help="examples in a prompt; default: the task's")
    parser.add_argument("--limit", type=positive, help="documents of each task, for a first look")
    parser.add_argument("--include-path", metavar="FOLDER", help="folder with further task files")
    parser.add_argument(
        "--metadata",
        type=_object,
        default={},
        metavar="JSON",
        help='for tasks such as ruler: {"max_seq_lengths":[4096]}',
    )
    parser.add_argument("--apply-chat-template", action="store_true", help="for models that are tuned to chats")
    add_threads(parser)
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures")
    return parser


def _rows(results: Mapping[str, Mapping[str, Any]], kind: CacheKind) -> list[Row]:
    """One row for each figure of each task. The harness names them `metric,filter` and `metric_stderr,filter`."""
    rows = []
    for task, figures in results.items():
        for name, value in figures.items():
            metric, _, choice = name.partition(",")
            if not choice or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = figures.get(f"{metric}_stderr,{choice}")
            rows.append(
                {
                    "task": task,
                    "metric": metric if choice == "none" else f"{metric}, {choice}",
                    "cache": kind.name,
                    "label": kind.label,
                    "value": value,
                    "error": error if isinstance(error, int | float) else None,
                }
            )
    return rows


def task_manager(include_path: str | None, metadata: Mapping[str, Any]) -> Any:
    """Finds tasks by name, which takes it a while: those of the harness, and those of a folder.

    Raises:
        ModuleNotFoundError: the harness is not installed.
    """
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, metadata=dict(metadata))


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: CacheKind,
    tasks: Sequence[str],
    manager: Any,
    *,
    chunk: int = 64,
    batch_size: int = 1,
    max_length: int | None = None,
    **options: Any,
) -> list[Row]:
    """Runs tasks with one cache. `options` are those of the harness's `simple_evaluate`.

    Returns:
        A row for each figure of each task.

    Raises:
        NothingQuantizedError: the cache is to quantize, but nothing quantized was read.
    """
    from lm_eval import simple_evaluate

    from eval.harness.cached_lm import CachedLM

    with kept_attention(model):
        lm = CachedLM(model, tokenizer, kind, chunk=chunk, batch_size=batch_size, max_length=max_length)
        outcome = simple_evaluate(lm, tasks=[*tasks], task_manager=manager, log_samples=False, **options)
    lm.check()
    return _rows(outcome["results"], kind)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 1 if some cache could not be judged."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    set_threads(arguments)
    kinds = [CACHES[name] for name in arguments.kv]
    for kind in kinds:
        if (reason := missing_requirement(kind)) is not None:
            parser.error(f"{kind.name}: {reason}")
    try:
        manager = task_manager(arguments.include_path, arguments.metadata)
        model, tokenizer, name = load_model(parser, arguments)
    except ModuleNotFoundError as error:
        parser.error(f'{error}: pip install "hf-paged-cache[lm-eval]"')
    unknown = [name for name in arguments.tasks if not manager.match_tasks([name]) and not Path(name).is_file()]
    if unknown:
        parser.error(f"unknown tasks: {', '.join(unknown)} (lm_eval ls tasks lists them)")

    results = {"machine": describe(model, name), "rows": [], "failures": []}
    print(machine_line(results["machine"]))
    for kind in kinds:
        try:
            results["rows"] += evaluate(
                model,
                tokenizer,
                kind,
                arguments.tasks,
                manager,
                chunk=arguments.chunk,
                batch_size=arguments.batch_size,
                max_length=arguments.max_length,
                num_fewshot=arguments.num_fewshot,
                limit=arguments.limit,
                apply_chat_template=arguments.apply_chat_template,
            )
        except RuntimeError as error:
            results["failures"].append(str(error))
    rows = sorted(results["rows"], key=lambda row: (row["task"], row["metric"]))
    print(text_table(COLUMNS, rows, "cache"), *results["failures"], sep="\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if results["failures"] else 0
