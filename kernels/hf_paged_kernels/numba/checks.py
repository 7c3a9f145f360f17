"""What is checked before tensors become addresses: kernels read and write wherever those say."""

import torch

from hf_paged_kernels.formats.blocks import Blocks
from hf_paged_kernels.step import StepMetadata


def check_attention(
    query: torch.Tensor,
    blocks: Blocks,
    step: StepMetadata,
    new_kv: tuple[torch.Tensor, torch.Tensor] | None,
    key_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Checks the arguments of `paged_attention`.

    Raises:
        ValueError: they do not fit each other.
    """
    num_heads, num_kv_heads = query.shape[1], blocks.num_kv_heads
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads")
    _expect("query", query, (step.batch, num_heads, step.query_length, blocks.dims[0]))
    if new_kv is not None:
        check_new(*new_kv, blocks, step)
    if sinks is not None:
        _expect("sinks", sinks, (num_heads,))
    if key_mask is not None:
        _expect("key_mask", key_mask, (step.batch, max(key_mask.shape[-1], step.max_seq_len)))
        if key_mask.dtype != torch.bool:
            raise ValueError(f"key_mask has dtype {key_mask.dtype}: expected bool")


def check_new(key: torch.Tensor, value: torch.Tensor, blocks: Blocks, step: StepMetadata) -> None:
    """Checks the keys and values of the new tokens of a step.

    Raises:
        ValueError: they are not `[batch, num_kv_heads, query_length, dim]`.
    """
    batch, num_kv_heads, query_length, (key_dim, value_dim) = (
        step.batch, blocks.num_kv_heads, step.query_length, blocks.dims
    )  # fmt: skip
    _expect("key", key, (batch, num_kv_heads, query_length, key_dim))
    _expect("value", value, (batch, num_kv_heads, query_length, value_dim))


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or not tensor.is_cpu:
        raise ValueError(f"{name} is {list(tensor.shape)} on {tensor.device}: expected {list(shape)} on cpu")
