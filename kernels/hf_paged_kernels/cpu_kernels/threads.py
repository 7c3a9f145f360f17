"""Runs a kernel in the threads that PyTorch uses, so that the two never compete for cores."""

import ctypes
from functools import cache

import torch


def run(function: int, argument: int, num_threads: int) -> None:
    """Calls a C function `void (void *)` in `num_threads` threads at once, or in fewer, and waits for all of them.

    Args:
        function: its address.
        argument: the address that each call is given.
        num_threads: at most `torch.get_num_threads()` are useful.
    """
    if num_threads > 1 and (parallel := _openmp()) is not None:
        parallel(function, argument, num_threads, 0)
    else:
        _as_function(function)(argument)


def can_run_parallel() -> bool:
    """Whether PyTorch's threads can be had."""
    return _openmp() is not None


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
