"""Command line arguments: their kinds, and the options that several commands share."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_paged_cache import PagedCacheError
from hf_paged_cache.demo import small_models


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


def parser_of(prog: str, description: str | None) -> argparse.ArgumentParser:
    """A parser whose help keeps the lines of a command's docstring."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=prog, description=description, formatter_class=formatter)


def add_model(parser: argparse.ArgumentParser, default: str = small_models.SMOLLM2.name) -> None:
    """Adds `--model`; `default` says what is taken if it is not given."""
    parser.add_argument("--model", help=f"folder or hub id; default {default}")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds `--dtype`, for `load_model`."""
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as the model is loaded")


def add_chosen(parser: argparse.ArgumentParser, option: str, known: Iterable[str]) -> None:
    """Adds an option with names out of `known`, by default all."""
    names = [*known]
    parser.add_argument(option, type=chosen_from(names), default=names, help=f"from {','.join(names)}; default all")


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Adds `--threads`, for `set_threads`."""
    parser.add_argument("--threads", type=positive, help="threads of torch on the CPU; default: torch's choice")


def add_quick(parser: argparse.ArgumentParser, what: str = "small defaults instead") -> None:
    """Adds `--quick`, with which `what` is done."""
    parser.add_argument("--quick", action="store_true", help=f"{what}, for a first look")


def add_files(parser: argparse.ArgumentParser) -> None:
    """Adds `--json` and `--markdown`, for `report.write_files`."""
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", type=new_file, metavar="FILE", help="write the tables")


def add_plot(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds `--plot`, which draws `what`, for `check_plot`."""
    parser.add_argument("--plot", type=new_file, metavar="FILE.png", help=f"draw {what}")


def default_of(defaults: Mapping[str, Any], name: str) -> str:
    """For the help of an option, what it is if it is not given."""
    value = defaults[name]
    return "default " + (",".join(map(str, value)) if isinstance(value, list) else str(value))


def fill(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Sets the options that were not given."""
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def check_plot(parser: argparse.ArgumentParser, arguments: argparse.Namespace, shown: Sequence[str]) -> None:
    """Refuses `--plot` if no section that it shows is measured, or if it cannot be drawn."""
    if arguments.plot is None:
        return
    if not {*shown} & {*arguments.sections}:
        parser.error(f"--plot shows the sections {' and '.join(shown)}: add one of them to --sections")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install "hf-paged-cache[eval]"')


def set_threads(arguments: argparse.Namespace) -> None:
    """Does what `--threads` says."""
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)


def load_model(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """The model that was asked for, its tokenizer, and its name. It is refused where it cannot be measured."""
    try:
        model, tokenizer = small_models.load(arguments.model, "sdpa")
    except PagedCacheError as error:
        parser.error(str(error))
    if model.config.is_encoder_decoder:
        parser.error("encoder-decoder models are not measured here: choose a decoder-only model")
    if getattr(arguments, "dtype", None) is not None:
        model.to(getattr(torch, arguments.dtype))
    return model, tokenizer, arguments.model or small_models.SMOLLM2.name


def check_positions(
    parser: argparse.ArgumentParser, model: PreTrainedModel, context: int, new_tokens: int, advice: str
) -> None:
    """Refuses sequences of `context` and `new_tokens` that are longer than the model's positions."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and context + new_tokens > positions:
        new = f" and {new_tokens} new ones" if new_tokens else ""
        parser.error(
            f"a context of {context} tokens{new} does not fit the model's {positions} positions: choose {advice}"
        )
