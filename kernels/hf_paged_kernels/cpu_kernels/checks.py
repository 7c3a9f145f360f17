"""What is checked before tensors become addresses: kernels read and write wherever those say."""

import torch

from hf_paged_kernels.layout import Blocks
from hf_paged_kernels.step import StepMetadata

_CPU = torch.device("cpu")


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
    key_dim, value_dim = blocks.dims
    num_heads = query.shape[1]
    if num_heads % blocks.num_kv_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of {blocks.num_kv_heads} KV heads")
    _expect("query", query, (step.batch, num_heads, step.query_length, key_dim))
    if new_kv is not None:
        check_new(new_kv, (step.batch, blocks.num_kv_heads, step.query_length), (key_dim, value_dim))
    if sinks is not None:
        _expect("sinks", sinks, (num_heads,))
    if key_mask is not None:
        _expect("key_mask", key_mask, (step.batch, max(key_mask.shape[-1], step.max_seq_len)))
        if key_mask.dtype != torch.bool:
            raise ValueError(f"key_mask has dtype {key_mask.dtype}: expected bool")


def check_new(new: tuple[torch.Tensor, torch.Tensor], shape: tuple[int, int, int], dims: tuple[int, int]) -> None:
    """Checks the keys and values of new tokens.

    Raises:
        ValueError: they are not `[*shape, dim]`.
    """
    for name, states, dim in zip(("key", "value"), new, dims, strict=True):
        _expect(name, states, (*shape, dim))


def with_dense_rows(states: torch.Tensor) -> torch.Tensor:
    """The tensor, copied only if the numbers of its last dimension do not follow each other."""
    return states if states.stride(-1) == 1 else states.contiguous()


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.device != _CPU:
        raise ValueError(f"{name} is {list(tensor.shape)} on {tensor.device}: expected {list(shape)} on cpu")
