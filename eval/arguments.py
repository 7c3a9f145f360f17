"""Kinds of command line arguments that the scripts here share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positives(text: str) -> list[int]:
    """Such numbers, comma-separated, in ascending order."""
    return sorted({positive(item) for item in text.split(",")})


def chosen_from(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Comma-separated names out of `known`, in its order."""

    def parse(text: str) -> list[str]:
        chosen = [item.strip() for item in text.split(",")]
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown, choose from {', '.join(known)}")
        return [name for name in known if name in chosen]

    return parse


def new_file(text: str) -> Path:
    """A file to be written, in a folder that is there."""
    if not Path(text).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text} does not exist")
    return Path(text)


def fill(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Sets the options that were not given."""
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
