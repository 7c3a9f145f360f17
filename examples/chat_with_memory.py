"""A chat, and questions on one long document, on a `BlockStore`: what was computed before is not computed again.

    python examples/chat_with_memory.py
    python examples/chat_with_memory.py --model FOLDER_OR_HUB_ID --document FILE --new-tokens 64 --plot tree.png

Every turn and question is generated twice, with the store and without it, and the time to the first new token is
printed for both. Without `--document` the text is a guide to a museum that there is not.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_paged_cache import BlockStore, PagedCache, PagedCacheError
from hf_paged_cache.demo import small_models
from hf_paged_cache.prefill import CACHE_ARGUMENT
from hf_paged_cache.prefix.session import Session

TURNS = ("What is a page table?", "Who uses it?", "Why is it kept in memory?")
QUESTIONS = ("Where are the clocks?", "Who keeps the room of the looms?", "When does the room of the maps open?")
THINGS = (
    "looms", "clocks", "pumps", "printing presses", "sewing machines", "steam engines", "bicycles", "typewriters",
    "telescopes", "maps", "cameras", "radios", "water wheels", "kites", "locks", "scales", "organs", "telephones",
    "calculating machines", "boats", "lamps", "tools of the baker", "tools of the smith", "toys",
)  # fmt: skip
KEEPERS = ("Mrs. Abel", "Mr. Brandt", "Mrs. Castro", "Mr. Dahl", "Mrs. Egger")
LABEL_TOKENS = 10


def museum_guide() -> str:
    """The document, about a thousand tokens."""
    rooms = (
        f"Room {number} shows {things}. It opens at {8 + number % 4} o'clock and closes at {15 + number % 4} o'clock, "
        f"is on floor {number % 3}, and is kept by {KEEPERS[number % len(KEEPERS)]}, who came in {1990 + number}."
        for number, things in enumerate(THINGS, start=1)
    )
    return "A guide to the museum of machines.\n" + "\n".join(rooms)


class FirstToken(BaseStreamer):
    """Notes how long it takes to the first new token.

    Attributes:
        seconds: since it was made.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = time.perf_counter()
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._saw_prompt and not self.seconds:
            self.seconds = time.perf_counter() - self._start
        self._saw_prompt = True  # `generate` hands over the prompt first

    def end(self) -> None:
        pass


class Asker:
    """Asks a model, with a store and without one, and prints what it took.

    Args:
        store: the store, which knows the model.
        tokenizer: with a chat template.
        new_tokens: the most of an answer.
    """

    def __init__(self, store: BlockStore, tokenizer: PreTrainedTokenizerBase, new_tokens: int) -> None:
        self.store = store
        self._tokenizer = tokenizer
        self._settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}

    def chat(self, turns: Sequence[str]) -> None:
        """A conversation: every turn begins with all that was said before."""
        messages: list[dict[str, str]] = []
        with self.store.session() as session:
            for number, text in enumerate(turns, start=1):
                messages.append({"role": "user", "content": text})
                answer = self._ask(session, messages, f"turn {number}")
                messages.append({"role": "assistant", "content": answer})

    def questions(self, document: str, questions: Sequence[str]) -> None:
        """Questions that have nothing to do with each other, but for the document they begin with."""
        for number, text in enumerate(questions, start=1):
            with self.store.session() as session:
                self._ask(session, [{"role": "user", "content": f"{document}\n\n{text}"}], f"question {number}")

    def _ask(self, session: Session, messages: Sequence[dict[str, str]], what: str) -> str:
        model = self.store.model
        inputs = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        num_tokens = inputs["input_ids"].shape[1]

        without = FirstToken()
        cache = {CACHE_ARGUMENT: PagedCache(model.config)}
        expected = model.generate(**inputs, **cache, streamer=without, **self._settings)

        clock = FirstToken()
        output = session.generate(**inputs, streamer=clock, **self._settings)

        known = session.cache.stats().reused_tokens
        answer = self._tokenizer.decode(output[0, num_tokens:], skip_special_tokens=True).strip()
        print(f"{what}: {num_tokens} tokens, {known} of them known")
        print(f"  first token after {clock.seconds:.2f} s, without the store {without.seconds:.2f} s")
        print(f"  same tokens: {torch.equal(output, expected)}")
        print(f"  {answer}")
        return answer


def draw_tree(store: BlockStore, tokenizer: PreTrainedTokenizerBase, axes: Any) -> None:
    """Draws what a store knows: blocks of tokens from left to right, every branch on a line of its own."""
    runs, lines = store.nodes(), 0
    ends, rows = [0] * len(runs), [0] * len(runs)
    followed: set[int] = set()
    for place, run in enumerate(runs):
        start = 0 if run.parent is None else ends[run.parent]
        if run.parent is None or run.parent in followed:
            if run.parent is not None:
                axes.plot([start, start], [-rows[run.parent], -lines], color="tab:gray", linewidth=0.8, zorder=0)
            rows[place], lines = lines, lines + 1
        else:
            # The first that follows goes on in the same line.
            rows[place] = rows[run.parent]
            followed.add(run.parent)
        ends[place] = start + len(run.tokens)
    for place, (run, end, row) in enumerate(zip(runs, ends, rows, strict=True)):
        width, color = len(run.tokens), "tab:blue" if place in followed else "lightsteelblue"
        axes.barh(-row, width, left=end - width, height=0.6, color=color, edgecolor="white", linewidth=0.8)
        if place not in followed:
            axes.text(end, -row, f"  .. {_end_of(run.tokens, tokenizer)}", va="center", fontsize=7)
    axes.set_yticks([])
    axes.set_xlabel("tokens")
    axes.set_ylim(-lines + 0.4, 0.6)
    axes.margins(x=0.35)
    axes.set_xlim(left=0)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.set_title(f"{store.stats().nodes} blocks are known; nothing follows light ones", fontsize=9)


def _end_of(tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """The last words of a block, in one line."""
    text = tokenizer.decode(tokens[-LABEL_TOKENS:], skip_special_tokens=True)
    return " ".join(text.split()).replace("$", r"\$")


def _plot(store: BlockStore, tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.4), layout="constrained")
    draw_tree(store, tokenizer, figure.add_subplot())
    figure.savefig(file, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"folder or hub id; default {small_models.SMOLLM2.name}")
    parser.add_argument("--document", type=Path, metavar="FILE", help="text to ask about; default: a text of its own")
    parser.add_argument("--new-tokens", type=int, default=32, help="the most of an answer; default 32")
    parser.add_argument("--memory", default="1GiB", help="of the store; default 1GiB")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw what is known at the end")
    arguments = parser.parse_args(argv)
    if arguments.new_tokens < 1:
        parser.error(f"--new-tokens {arguments.new_tokens}: expected at least 1")
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    try:
        document = arguments.document.read_text() if arguments.document else museum_guide()
        model, tokenizer = small_models.load(arguments.model, "hf_paged")
        store = BlockStore(model, memory=arguments.memory)
    except (OSError, PagedCacheError) as error:
        parser.error(str(error))

    asker = Asker(store, tokenizer, arguments.new_tokens)
    asker.chat(TURNS)
    asker.questions(document, QUESTIONS)
    print(asker.store)
    if arguments.plot is not None:
        _plot(asker.store, tokenizer, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
