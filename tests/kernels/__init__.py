"""Tests of `kernels/hf_paged_kernels`."""
