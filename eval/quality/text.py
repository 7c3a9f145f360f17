"""Text to measure on, and windows of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pydoc_data import topics

import torch
from transformers import PreTrainedTokenizerBase

# Short names of sets on the hub: repository, configuration, split, column.
DATASETS = {"wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test", "text")}


class TextError(ValueError):
    """A text cannot be had, or is too short."""


@dataclass(frozen=True)
class Text:
    """A text and where it is from."""

    name: str
    content: str

    @cached_property
    def sha256(self) -> str:
        """Of the text in UTF-8."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def python_text() -> Text:
    """The language reference that comes with Python; it differs between versions."""
    return Text("pydoc_data.topics of Python's standard library", "\n".join(topics.topics.values()))


def file_text(path: Path) -> Text:
    """A file in UTF-8.

    Raises:
        TextError: it cannot be read.
    """
    try:
        return Text(path.name, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path} cannot be read as text: {error}") from error


def dataset_text(name: str) -> Text:
    """The rows of a set on the hub, with empty lines between them.

    Args:
        name: `wikitext`, or `repository:configuration:split:column`.

    Raises:
        TextError: there is no such set, or the hub cannot be reached.
    """
    parts = DATASETS.get(name, tuple(name.split(":")))
    if len(parts) != 4:
        raise TextError(f"{name!r}: expected {', '.join(DATASETS)}, or repository:configuration:split:column")
    repository, configuration, split, column = parts
    try:
        from datasets import load_dataset

        rows = load_dataset(repository, configuration, split=split)[column]
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise TextError(f"the data set {name} cannot be loaded: {reason}. --text takes any file") from error
    return Text(f"{repository}, {configuration}, {split}", "\n\n".join(rows))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of the text alone."""
    # `verbose=False`: a whole text is longer than the model's context, what is read of it is not.
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text: a beginning-of-sequence token, for models that need one."""
    ids = tokenizer("a")["input_ids"]
    return ids[: ids.index(encode(tokenizer, "a")[0])]


def windows(tokenizer: PreTrainedTokenizerBase, text: Text, length: int, count: int) -> list[torch.Tensor]:
    """`count` pieces of the text that do not overlap, spread over it, each int64 `[1, length]`.

    Raises:
        TextError: the text is too short.
    """
    first = first_tokens(tokenizer)
    ids = encode(tokenizer, text.content)
    taken = length - len(first)
    if count * taken > len(ids):
        raise TextError(
            f"{text.name} has {len(ids):,} tokens, {count} windows of {length:,} are needed: take a longer text, or a "
            "smaller --limit"
        )
    starts = [window * (len(ids) - taken) // max(count - 1, 1) for window in range(count)]
    return [torch.tensor([first + ids[start : start + taken]]) for start in starts]
