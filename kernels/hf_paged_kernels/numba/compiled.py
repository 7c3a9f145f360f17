"""How the kernels are compiled, when, and that machine code on disk is used only for the source it came from."""

import logging
import threading
import zlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

from numba import cfunc, types
from numba.core import event

from hf_paged_kernels.numba.machine import LANES

logger = logging.getLogger(__name__)

EXACT_FLAGS = {"nogil": True, "error_model": "numpy"}
# Sums may be reordered, products and sums fused. Infinity and NaN keep their meaning.
FLAGS = {**EXACT_FLAGS, "fastmath": {"contract", "reassoc", "nsz", "arcp"}}

_lock = threading.RLock()


class Kernel:
    """A C function `void (*)(int64)` of an address, loaded from disk or compiled when it is first asked for.

    Args:
        name: what it does, for messages.
        usual_seconds: what compiling it takes on a processor of 2023.
        make: makes the function; called with a number that it has to close over, see `checksum`.
    """

    def __init__(self, name: str, usual_seconds: int, make: Callable[[int], Callable[[int], None]]) -> None:
        self.name = name
        self.usual_seconds = usual_seconds
        self.seconds = 0.0
        self.was_compiled = False
        self._make = make

    @cached_property
    def address(self) -> int:
        """Where its machine code is.

        Raises:
            Exception: whatever keeps Numba from compiling it.
        """
        if self.problem is not None:
            raise RuntimeError(self.problem)
        return self._function.address

    @cached_property
    def problem(self) -> str | None:
        """Why there is no such function here; `None` if there is one, compiled by now."""
        with _lock:
            if "_function" in vars(self):
                return None
            start = perf_counter()
            try:
                with event.install_listener("numba:compile", _PendingMask(self)):
                    self._function = c_function(self._make(checksum()))
            except Exception as error:  # whatever ails an installation of Numba
                return f"calls here: Numba cannot compile {self.name} ({type(error).__name__}: {str(error).strip()})"
            finally:
                self.seconds = perf_counter() - start
            return None

    @property
    def folder(self) -> Path | None:
        """Where its machine code is kept; `None` if it is not."""
        path = getattr(self._function._cache, "cache_path", None)
        return None if path is None else Path(path)


class _PendingMask(event.Listener):
    """Says that a kernel is being compiled, before it is: loading one from disk is no such event."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def on_start(self, event: Any) -> None:
        if not self._kernel.was_compiled:
            self._kernel.was_compiled = True
            logger.warning(
                "Compiling the CPU kernel for %s: about %d s, once, then it is kept on disk. "
                "`hf-paged-cache warmup` does it ahead of time.",
                self._kernel.name,
                self._kernel.usual_seconds,
            )

    def on_end(self, event: Any) -> None:
        pass


def c_function(function: Callable[[int], None]) -> Any:
    """A function of one argument, an address, as a compiled C function `void (*)(int64)`, kept on disk."""
    signature = types.void(types.int64)
    try:
        return cfunc(signature, cache=True)(function)
    except Exception:  # no folder can be written to, its disk is full, what it holds is damaged; or no code can be made
        return cfunc(signature)(function)


def checksum() -> int:
    """A number that changes with the source of the kernels and the width of their vectors.

    Numba looks machine code up by the file of a function and by the values that it closes over. What it calls in other
    files does not count, so this has to be such a value.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return zlib.crc32(b"".join(source.read_bytes() for source in sources), LANES)
