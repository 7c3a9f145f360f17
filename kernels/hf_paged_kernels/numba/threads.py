"""Runs a kernel in the threads that PyTorch uses, so that the two never compete for cores."""

import ctypes
import os
from functools import cache

import torch

_is_forked = False


def run(function: int, argument: int, num_threads: int) -> None:
    """Calls a C function `void (void *)` in some threads at once, or in this one alone, and waits for it.

    Args:
        function: its address. Each call takes its share of the work from memory that all of them see, so the number of
            calls does not matter.
        argument: the address that each call is given.
        num_threads: 1, or all of PyTorch's: GNU's library would end those that are left out, and make them anew for the
            next matrix product. No more are used, whatever their number is set to in the meantime.
    """
    parallel = _openmp() if num_threads > 1 and not _is_forked else None
    if parallel is None:
        _as_function(function)(argument)
    else:
        parallel(function, argument, num_threads, 0)


def can_run_parallel() -> bool:
    """Whether there is a way into PyTorch's threads, if it has more than one."""
    return _openmp() is not None or torch.get_num_threads() == 1


@cache
def _openmp() -> ctypes._CFuncPtr | None:
    """`GOMP_parallel` of the OpenMP library that PyTorch has loaded. LLVM's and Intel's offer it too."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


@cache
def _as_function(address: int) -> ctypes._CFuncPtr:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def _mark_forked() -> None:
    # A forked process has one thread only, and GNU's library waits forever for those it had.
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_forked)
