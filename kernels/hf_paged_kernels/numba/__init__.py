"""The kernels for CPUs, compiled by Numba. Each function has the contract of the one in `hf_paged_kernels.api`."""

from hf_paged_kernels.numba.attention import paged_attention, unsupported_reason
from hf_paged_kernels.numba.threads import can_run_parallel
from hf_paged_kernels.numba.warmup import warm_up
from hf_paged_kernels.numba.write import can_write, write_kv

__all__ = ["can_run_parallel", "can_write", "paged_attention", "unsupported_reason", "warm_up", "write_kv"]
