"""Compiles kernels ahead of the calls that need them."""

from collections.abc import Iterator

from hf_paged_kernels.numba.attend import attend_codes, attend_exact
from hf_paged_kernels.numba.compiled import Kernel
from hf_paged_kernels.numba.write import store_codes, store_exact

KERNELS = {
    "exact": (store_exact, attend_exact),
    "scaled": (store_codes, attend_codes),
    "grouped": (store_exact, attend_codes),
}
"""What caches use, by how they store tokens: exactly, as 8-bit codes at once, or as codes of full blocks."""


def warm_up(*storages: str) -> Iterator[Kernel]:
    """Loads or compiles the kernels for some of `KERNELS`, and gives each as soon as it is ready."""
    for kernel in dict.fromkeys(kernel for storage in storages for kernel in KERNELS[storage]):
        if kernel.problem is not None:
            raise RuntimeError(kernel.problem)
        yield kernel
