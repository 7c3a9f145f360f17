"""Compiles the kernels for CPUs before the first call needs them: `hf-paged-cache warmup`."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hf_paged_cache.codecs import CODECS, make_codec
from hf_paged_cache.errors import UnsupportedError


class Warmed(NamedTuple):
    """A kernel that is ready.

    Attributes:
        name: what it does.
        seconds: what getting it ready took.
        was_compiled: it was not on disk before.
        folder: where it is kept; `None` if no folder can be written to.
    """

    name: str
    seconds: float
    was_compiled: bool
    folder: Path | None


def warm_up(*codecs: str) -> Iterator[Warmed]:
    """Compiles what caches with these codecs use, unless it is on disk, one kernel after the other.

    Args:
        codecs: names from `CODECS`; none for all of them.

    Raises:
        InvalidArgumentError: there is no codec of that name.
        UnsupportedError: nothing can be compiled here.
    """
    storages = dict.fromkeys(storage for kv in codecs or CODECS for storage in _storages(kv))
    try:
        # Numba is optional.
        from hf_paged_kernels import numba

        for kernel in numba.warm_up(*storages):
            yield Warmed(kernel.name, kernel.seconds, kernel.was_compiled, kernel.folder)
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"there is nothing to warm up: {error}. Plain PyTorch does the work of these kernels. "
            '`pip install "hf-paged-cache[cpu]"` brings Numba'
        ) from error


def _storages(kv: str) -> tuple[str, ...]:
    if make_codec(kv).exact_policy is not None:
        return "grouped", "exact"  # layers with a window stay exact
    return ("exact",) if kv == "raw" else ("scaled",)
