"""Facts that a model has to find again in what a cache stored: a pass key in a long text, a list of keys and values.

An answer counts when each of its tokens is the most likely one after the question and the tokens before it: then, and
only then, greedy decoding gives that answer. So questions and answers are read in one forward pass.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from transformers import PreTrainedTokenizerBase

from eval.quality.bench import Bench, Row
from eval.quality.caches import CacheKind
from eval.quality.journal import Measurement
from eval.quality.reader import Reader
from eval.quality.text import TextError, encode, first_tokens

# After Mohtashami and Jaggi, Landmark Attention, 2023.
PASSKEY_TASK = "There is important info hidden inside a lot of irrelevant text. Find it and memorize it.\n\n"
PASSKEY_FACT = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
PASSKEY_QUESTION = "\n\nWhat is the pass key? The pass key is"
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "

RECALL_TASK = "Remember this list.\n\n"
RECALL_QUESTION = "\n\nThe list was:\n\n"
RECALL_DEPTH = 1 / 8
# fmt: off
RECALL_WORDS = (
    "anchor", "apple", "basket", "bridge", "candle", "carpet", "cloud", "desert", "engine", "feather", "forest",
    "garden", "guitar", "hammer", "helmet", "island", "jacket", "kitchen", "ladder", "mirror", "needle", "orange",
    "pencil", "rabbit", "river", "saddle", "stone", "table", "tunnel", "velvet", "whistle", "window",
)
# fmt: on


@dataclass(frozen=True)
class Prompt:
    """Something to store, and questions about it.

    Attributes:
        section: `passkey` or `recall`.
        name: tells it from others of the section and context.
        depth: where the fact begins: 0 at the start of what is stored, 1 at its end.
        stored: int64 `[1, context]`.
        questions: questions and answers, int64 `[1, tokens]`.
        answers: where in `questions` each answer begins and ends.
    """

    section: str
    name: str
    depth: float
    stored: torch.Tensor
    questions: torch.Tensor
    answers: tuple[tuple[int, int], ...]

    @property
    def context(self) -> int:
        return self.stored.shape[1]

    @property
    def num_tokens(self) -> int:
        return self.context + self.questions.shape[1]

    def measure(self, bench: Bench, kinds: Sequence[CacheKind]) -> None:
        """Asks the model with each of these caches."""
        stored, questions = (ids.to(bench.model.device) for ids in (self.stored, self.questions))
        for kind in kinds:
            with bench.attempt(kind, str(self)):
                reader = Reader(bench.model, kind)
                reader.skim(stored, bench.prefill_chunk)
                log_probs = reader.read(questions)
                likeliest = log_probs.argmax(dim=-1)
                # What follows each token is predicted at it.
                nll = torch.nn.functional.nll_loss(log_probs[:-1], questions[0, 1:], reduction="none")
                found, answer_nll = [], []
                for begin, end in self.answers:
                    found.append(int(torch.equal(likeliest[begin - 1 : end - 1], questions[0, begin:end])))
                    answer_nll.append(float(f"{nll[begin - 1 : end - 1].mean().item():.5g}"))
                bench.record(self, kind, {"found": found, "nll": answer_nll})
            bench.advance(self.num_tokens)

    def __str__(self) -> str:
        return f"{self.section}, context {self.context}, {self.name}"


@dataclass(frozen=True)
class Haystack:
    """Tokens to hide facts in."""

    ids: Sequence[int]

    def hide(
        self, start: list[int], fact: list[int], context: int, depth: float, chance: random.Random
    ) -> torch.Tensor:
        """`start`, and after it the fact at this depth of a random place of the haystack.

        Returns:
            int64 `[1, context]`.

        Raises:
            TextError: the context is too short for the fact.
        """
        room = context - len(start) - len(fact)
        if room < 0:
            raise TextError(f"a context of {context} tokens is too short for a fact of {context - room} tokens")
        first = chance.randrange(len(self.ids))
        hay = [*islice(cycle(self.ids), first, first + room)]
        before = round(depth * room)
        return torch.tensor([start + hay[:before] + fact + hay[before:]])


def passkey_prompts(
    tokenizer: PreTrainedTokenizerBase, haystack: Haystack, context: int, depths: Sequence[float], trials: int
) -> list[Prompt]:
    """A number of five digits at each depth, `trials` times.

    Raises:
        TextError: the context is too short for it.
    """
    prompts = []
    for depth in depths:
        for trial in range(trials):
            chance = random.Random(f"{context} {depth} {trial}")
            key = str(chance.randrange(10_000, 100_000))
            fact = encode(tokenizer, PASSKEY_FACT.format(key=key))
            start = first_tokens(tokenizer) + encode(tokenizer, PASSKEY_TASK)
            questions, answers = _questions(tokenizer, PASSKEY_QUESTION, [("", f" {key}")])
            stored = haystack.hide(start, fact, context, depth, chance)
            prompts.append(Prompt("passkey", f"depth {depth:g}, trial {trial}", depth, stored, questions, answers))
    return prompts


def recall_prompts(
    tokenizer: PreTrainedTokenizerBase, haystack: Haystack, context: int, pairs: int, trials: int
) -> list[Prompt]:
    """A list of words, each with a number of four digits, all of which are asked for in another order.

    Raises:
        TextError: the context is too short for it.
    """
    prompts = []
    for trial in range(trials):
        chance = random.Random(f"{context} {pairs} {trial}")
        words = chance.sample(RECALL_WORDS, pairs)
        numbers = {word: str(chance.randrange(1_000, 10_000)) for word in words}
        lines = "".join(f"{word}: {number}\n" for word, number in numbers.items())
        fact = encode(tokenizer, f"\n\n{RECALL_TASK}{lines}\n")
        asked = [(f"{word}:", f" {numbers[word]}") for word in chance.sample(words, pairs)]
        questions, answers = _questions(tokenizer, RECALL_QUESTION, asked)
        stored = haystack.hide(first_tokens(tokenizer), fact, context, RECALL_DEPTH, chance)
        prompts.append(Prompt("recall", f"{pairs} pairs, trial {trial}", RECALL_DEPTH, stored, questions, answers))
    return prompts


def _questions(
    tokenizer: PreTrainedTokenizerBase, beginning: str, asked: Sequence[tuple[str, str]]
) -> tuple[torch.Tensor, tuple[tuple[int, int], ...]]:
    """Questions and their answers after a beginning, and where the answers lie."""
    ids = encode(tokenizer, beginning)
    answers = []
    for question, answer in asked:
        ids += encode(tokenizer, question)
        answer_ids = encode(tokenizer, answer)
        # Where the space before an answer is a token of its own, it is not what was to be found.
        first = next(index for index, token in enumerate(answer_ids) if tokenizer.decode([token]).strip())
        answers.append((len(ids) + first, len(ids) + len(answer_ids)))
        ids += answer_ids + encode(tokenizer, "\n")
    return torch.tensor([ids]), tuple(answers)


def passkey_row(bench: Bench, tasks: Sequence[Prompt], kind: CacheKind) -> Row | None:
    """How often a cache found the pass key in one context, by depth; None if it was not asked everything."""
    measurements = bench.recorded(tasks, kind)
    if measurements is None:
        return None
    found: dict[float, list[int]] = {}
    for task, measurement in zip(tasks, measurements, strict=True):
        found.setdefault(task.depth, []).extend(measurement["found"])
    shares = [statistics.fmean(answers) for answers in found.values()]
    return bench.row(tasks, kind) | _totals(measurements) | {"depths": [*found], "found": shares}


def recall_row(bench: Bench, tasks: Sequence[Prompt], kind: CacheKind) -> Row | None:
    """How many numbers a cache recalled in one context; None if it was not asked everything."""
    measurements = bench.recorded(tasks, kind)
    if measurements is None:
        return None
    return bench.row(tasks, kind) | _totals(measurements) | {"pairs": len(tasks[0].answers)}


def _totals(measurements: Sequence[Measurement]) -> Row:
    found = [answer for measurement in measurements for answer in measurement["found"]]
    nll = [answer for measurement in measurements for answer in measurement["nll"]]
    return {"asked": len(found), "found_count": sum(found), "answer_nll": statistics.fmean(nll)}
