"""The kernels for CPUs, compiled by Numba. Each function has the contract of the one in `hf_paged_kernels.dispatch`."""

from hf_paged_kernels.cpu_kernels.attention import paged_attention, unsupported_reason
from hf_paged_kernels.cpu_kernels.threads import can_run_parallel
from hf_paged_kernels.cpu_kernels.warmup import warm_up
from hf_paged_kernels.cpu_kernels.write import can_write, write_kv

__all__ = ["can_run_parallel", "can_write", "paged_attention", "unsupported_reason", "warm_up", "write_kv"]
