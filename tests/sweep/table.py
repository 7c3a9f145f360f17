"""The sweep's part of docs/families.md."""

from __future__ import annotations

from collections.abc import Mapping

import transformers as hf

from tests.sweep.comparison import ModelClass, Outcome, compare, model_classes

INTRODUCTION = f"""\
## Every model class

A tiny random model of every class that the auto classes for causal, sequence-to-sequence, image-text and speech models
of transformers {hf.__version__} know, in fp32, with weights so large that attention matters. Each is compared with
eager attention and `DynamicCache`: without a cache; with a prompt, steps and a chunk over a `PagedCache`, under `eager`
and under `hf_paged`; the same with left padding; and with later tokens changed, which may not move earlier logits.
Prompts are text: images and sounds are in the table above. No class differs from its reference without a note here.
"""

HEADINGS = {
    "in blocks": ("Read in their blocks", "All attention over the cache reads blocks in place."),
    "some in blocks, some copied": (
        "Read in part in their blocks",
        "Some layers or passes get copies: cross attention, chunked layers, image blocks, and passes of several\n"
        "tokens whose mask shows more than the window of the cache.",
    ),
    "copied": (
        "Copied out of their blocks",
        "The model changes keys before attention (latent keys), adds biases by position, or runs attention code\n"
        "of its own.",
    ),
    "nothing is paged": (
        "Nothing is paged",
        "The layers keep more than keys and values, such as recurrent states or keys of an indexer. transformers' own\n"
        "cache layers hold them, in a `PagedCache` as elsewhere.",
    ),
}


def sweep_page(outcomes: Mapping[ModelClass, Outcome] | None = None) -> str:
    """The whole part, in Markdown; without `outcomes` the sweep runs, for some minutes."""
    if outcomes is None:
        outcomes = {model_class: compare(model_class) for model_class in model_classes()}
    parts = [INTRODUCTION]
    for how, (heading, text) in HEADINGS.items():
        names = sorted(each.name for each, outcome in outcomes.items() if outcome.how == how)
        parts.append(f"### {heading} ({len(names)})\n\n{text}\n\n{', '.join(names)}\n")
    parts.append(
        _table(
            "Refused under `hf_paged`",
            "These models look the name up among attention classes of their own when they are made. Load them with\n"
            'another implementation and call `model.set_attn_implementation("hf_paged")`: so they were compared.',
            "message",
            [row for each, outcome in outcomes.items() for row in refusal_row(each, outcome)],
        )
    )
    parts.append(
        _table(
            "Differs in transformers itself",
            "Eager attention gives different results without a cache, with `DynamicCache`, or in a padded batch. A\n"
            "`PagedCache` gives what `DynamicCache` gives, unless said.",
            "what",
            [row for each, outcome in outcomes.items() for row in note_row(each, outcome)],
        )
    )
    parts.append(
        _table(
            "Not compared",
            "No tiny model that runs on text alone was made; the reason is what transformers says. The text models in\n"
            "them are mostly classes above.",
            "reason",
            [f"| {each.name} | {outcome.not_built} |" for each, outcome in outcomes.items() if outcome.not_built],
        )
    )
    return "\n".join(parts)


def refusal_row(model_class: ModelClass, outcome: Outcome) -> list[str]:
    return [f"| {model_class.name} | {outcome.refused} |"] if outcome.refused else []


def note_row(model_class: ModelClass, outcome: Outcome) -> list[str]:
    return [f"| {model_class.name} | {'; '.join(outcome.notes)} |"] if outcome.notes else []


def _table(heading: str, text: str, column: str, rows: list[str]) -> str:
    table = "\n".join([f"| class | {column} |", "| --- | --- |", *rows])
    return f"### {heading} ({len(rows)})\n\n{text}\n\n{table}\n"
