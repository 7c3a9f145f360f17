"""How the kernels are compiled, and that machine code on disk is used only for the source it came from."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, types

from hf_paged_kernels.cpu_kernels.vectors import LANES

EXACT_FLAGS = {"nogil": True, "error_model": "numpy"}
# Sums may be reordered, products and sums fused. Infinity and NaN keep their meaning.
FLAGS = {**EXACT_FLAGS, "fastmath": {"contract", "reassoc", "nsz", "arcp"}}


def c_function(function: Callable[[int], None]) -> Any:
    """A function of one argument, an address, as a compiled C function `void (*)(int64)`, kept on disk."""
    signature = types.void(types.int64)
    try:
        return cfunc(signature, cache=True)(function)
    except (RuntimeError, OSError) as error:
        if isinstance(error, RuntimeError) and "cannot cache" not in str(error):
            raise
        return cfunc(signature)(function)  # no folder can be written to, or its disk is full


def checksum() -> int:
    """A number that changes with the source of the kernels and the width of their vectors.

    Numba looks machine code up by the file of a function and by the values that it closes over. What it calls in other
    files does not count, so this has to be such a value.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return zlib.crc32(b"".join(source.read_bytes() for source in sources), LANES)
