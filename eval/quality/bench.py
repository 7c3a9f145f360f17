"""What all measurements of quality share: the model, the caches, and what is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.common.failures import reason
from eval.quality.bits import BitCounter
from eval.quality.caches import REFERENCE, CacheKind
from eval.quality.journal import Journal, Measurement

Row = dict[str, Any]


class Task(Protocol):
    """Something that is measured with every cache.

    Attributes:
        section: of the report.
        context: tokens that are stored.
        name: tells it from others of the section and context, also in another run.
        num_tokens: tokens that a cache reads.
    """

    section: str
    context: int
    name: str
    num_tokens: int

    def measure(self, bench: Bench, kinds: Sequence[CacheKind]) -> None:
        """Measures these caches, and records what comes out."""


@dataclass
class Bench:
    """Measures tasks with one model.

    kinds: the caches, by name; the reference is one of them. prefill_chunk, chunk: tokens in a forward pass while text
    is only stored, and while it is scored. advance: told how many tokens were read. failures: by cache, what failed
    and why; it is left out from then on.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kinds: dict[str, CacheKind]
    prefill_chunk: int
    chunk: int
    journal: Journal
    advance: Callable[[int], object] = lambda num_tokens: None
    failures: dict[str, str] = field(default_factory=dict)

    @cached_property
    def bits(self) -> BitCounter:
        """Counts the bits of caches of this model."""
        return BitCounter(self.model)

    def missing(self, task: Task) -> list[CacheKind]:
        """The caches that the task is yet to be measured with."""
        return [
            kind
            for kind in self.kinds.values()
            if kind.name not in self.failures and (task.section, task.context, task.name, kind.name) not in self.journal
        ]

    def record(self, task: Task, kind: CacheKind, measurement: Measurement) -> None:
        """Keeps what a task came to with a cache."""
        self.journal.add((task.section, task.context, task.name, kind.name), measurement)

    def recorded(self, tasks: Sequence[Task], kind: CacheKind) -> list[Measurement] | None:
        """What the tasks came to with a cache; None if not all of them were measured."""
        keys = [(task.section, task.context, task.name, kind.name) for task in tasks]
        return [self.journal[key] for key in keys] if all(key in self.journal for key in keys) else None

    @staticmethod
    def row(tasks: Sequence[Task], kind: CacheKind) -> Row:
        """What a row of a table says of the tasks, all of one section and context, and of the cache."""
        return {
            "section": tasks[0].section,
            "context": tasks[0].context,
            "cache": kind.name,
            "label": kind.label,
            "family": kind.family,
            "is_exact": kind.is_exact,
        }

    @contextmanager
    def attempt(self, kind: CacheKind, where: str) -> Iterator[None]:
        """Leaves out a cache that fails inside the `with` block.

        Raises:
            RuntimeError: it is the reference.
        """
        try:
            yield
        except Exception as error:
            if kind.name == REFERENCE:
                raise RuntimeError(f"the reference failed ({where}): {reason(error)}") from error
            self.failures[kind.name] = f"{kind.label} ({where}): {reason(error)}"
