"""Which implementation does a call: Triton on GPUs, Numba on CPUs, or plain PyTorch, which runs everywhere."""

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Literal, get_args

import torch

from hf_paged_kernels.formats.blocks import Blocks
from hf_paged_kernels.step import StepMetadata
from hf_paged_kernels.torch import block_scores, reference, write

logger = logging.getLogger(__name__)

Backend = Literal["cpu", "reference", "triton"]
ENVIRONMENT = "HF_PAGED_KERNELS"


def paged_attention(
    query: torch.Tensor,
    blocks: Blocks,
    step: StepMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    key_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: Backend | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the new tokens of each row to that row's tokens.

    Query `i` of a row with `n` tokens is token `p = n - query_length + i` and sees the tokens `j <= p`, with a window
    `j > p - window`. A query that sees nothing (leading padding has `p < 0`) gives zeros.

    Args:
        query: `[batch, num_heads, query_length, key_dim]`; `num_heads` is a multiple of `num_kv_heads`.
        blocks: blocks of the layer, into which the new tokens have been written.
        step: the forward pass.
        scale: factor of the scores, before softcap.
        window: tokens that a query sees, itself included (as transformers counts `sliding_window`); `None` for all.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2).
        sinks: `[num_heads]`, a learned logit a head that takes part in the softmax and adds no value (gpt-oss).
        new_kv: keys and values of the new tokens, `[batch, num_kv_heads, query_length, dim]`, right-aligned: column
            `i` belongs to query `i`. They are then not read from the blocks. Required if
            `not step.new_tokens_stored`.
        key_mask: bool `[batch, max_seq_len]`, False for tokens that no query sees (holes in a 2-D mask).
        return_lse: also return the log-sum-exp of the scores, sinks included.
        backend: as in `choose`.

    Returns:
        `[batch, num_heads, query_length, value_dim]` in the dtype of `query`; with `return_lse` also the natural
        logarithm, float32 (float64 for a float64 query) `[batch, num_heads, query_length]`, -inf for a query that
        sees nothing.

    Raises:
        ValueError: window or softcap is not positive.
    """
    _check_options(window, softcap)
    options = {
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "new_kv": new_kv,
        "key_mask": key_mask,
        "return_lse": return_lse,
    }
    kernels = None if reference.is_plain_prefill(step, **options) else _implementation(query, blocks, backend)
    return (kernels or reference).paged_attention(query, blocks, step, scale=scale, **options)


def block_attention_scores(
    query: torch.Tensor,
    blocks: Blocks,
    step: StepMetadata,
    lse: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    key_mask: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """How much of the attention of a step each block gets, which tells blocks that matter from blocks that do not.

    A pass of its own over the keys, after `paged_attention` with `return_lse`; attention pays nothing for it.

    Args:
        query, blocks, step, scale, window, softcap, key_mask: as `paged_attention` had them.
        lse: the log-sum-exp that it returned, `[batch, num_heads, query_length]`.
        backend: as in `choose`.

    Returns:
        float32 (float64 for a float64 query) `[batch, num_kv_heads, max_blocks]`: the attention weights of a block's
        tokens, summed over the queries and over the heads that share the KV head. 0 where a row has no block. A row's
        blocks sum to its queries times the heads of a group, less what sinks take.

    Raises:
        ValueError: window or softcap is not positive, or some new tokens are not in the blocks, so that the sum would
            miss them.
    """
    _check_options(window, softcap)
    if not step.new_tokens_stored:
        raise ValueError(
            "block_attention_scores needs all new tokens in the blocks; a window left some out: ask for steps "
            "shorter than it"
        )
    options = {"scale": scale, "window": window, "softcap": softcap, "key_mask": key_mask}
    kernels = _implementation(query, blocks, backend, "block_attention_scores_unsupported_reason")
    return (kernels or block_scores).block_attention_scores(query, blocks, step, lse, **options)


def write_kv(
    blocks: Blocks,
    key: torch.Tensor,
    value: torch.Tensor,
    step: StepMetadata,
    *,
    backend: Backend | None = None,
) -> None:
    """Writes the new tokens of one layer into the slots that `step` gives them.

    Args:
        blocks: blocks of the layer; changed in place.
        key: `[batch, num_kv_heads, query_length, key_dim]`, in the model's dtype.
        value: `[batch, num_kv_heads, query_length, value_dim]`
        step: the forward pass. Tokens whose slot is -1 are passed over.
        backend: as in `choose`.
    """
    chosen = choose(key.device, backend)
    if chosen == "triton":
        module = _triton()
    elif chosen == "cpu" and _cpu().can_write(blocks, key, value):
        module = _cpu()
    else:
        module = write
    module.write_kv(blocks, key, value, step)


def copy_blocks(layers: Sequence[Blocks], pairs: Sequence[tuple[int, int]], *, backend: Backend | None = None) -> None:
    """Copies whole blocks, all planes of them, in every layer.

    Args:
        layers: blocks of layers with the same block ids; changed in place.
        pairs: `(source, target)` block ids. No target may be a source.
        backend: as in `choose`.
    """
    by_device: dict[torch.device, list[Blocks]] = {}
    for blocks in layers if pairs else ():
        by_device.setdefault(blocks.device, []).append(blocks)
    for device, on_device in by_device.items():
        module = _triton() if choose(device, backend) == "triton" else write
        module.copy_blocks(on_device, pairs)


def choose(device: torch.device, backend: Backend | None = None) -> Backend:
    """The implementation for tensors on `device`.

    Args:
        backend: the one that is wanted. `None`: the one that the environment variable `HF_PAGED_KERNELS` names (it is
            read once), or Triton on CUDA and ROCm devices and the kernels for CPUs on those, where Triton and Numba
            are installed, and plain PyTorch elsewhere.

    Raises:
        ValueError: there is none of that name, or it does not run here.
    """
    wanted = backend or _named_by_environment()
    if wanted is not None and wanted not in get_args(Backend):
        names = ", ".join(map(repr, get_args(Backend)))
        raise ValueError(f"backend {wanted!r} (argument, or {ENVIRONMENT} in the environment): expected one of {names}")
    if wanted == "triton":
        if not _has_triton():
            raise ValueError("the Triton kernels need triton: pip install triton, or use another backend")
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(f"the Triton kernels need tensors on a GPU, not on {device}: use backend='reference'")
        return "triton"
    if wanted == "cpu":
        if not _has_numba():
            raise ValueError("the kernels for CPUs need Numba: pip install numba, or use another backend")
        _cpu()
        if device.type != "cpu":
            raise ValueError(f"the kernels for CPUs need tensors on a CPU, not on {device}: use another backend")
        return "cpu"
    if wanted == "reference":
        return "reference"
    kind = _type_of(device)
    if kind == "cpu" and _has_numba() and _cpu_works() and _cpu().can_run_parallel():
        return "cpu"
    return "triton" if kind == "cuda" and _has_triton() else "reference"


def _check_options(window: int | None, softcap: float | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} tokens: expected at least 1, or None for all tokens")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"a softcap of {softcap}: expected more than 0, or None for no softcap")


def _implementation(
    query: torch.Tensor, blocks: Blocks, backend: Backend | None, unsupported_reason: str = "unsupported_reason"
) -> ModuleType | None:
    """The kernels that do a call, unless the function of theirs of that name objects; `None` for plain PyTorch."""
    chosen = choose(query.device, backend)
    kernels = _KERNELS[chosen]()
    find_reason = getattr(kernels, unsupported_reason, None)
    if find_reason is None:
        return None
    reason = find_reason(query, blocks)
    if reason is not None:
        _warn_once(f"The {chosen} kernels do not take {reason}: plain PyTorch attends instead, which is slower.")
        return None
    return kernels


@cache
def _named_by_environment() -> str | None:
    return os.environ.get(ENVIRONMENT) or None


@cache
def _type_of(device: torch.device) -> str:
    return device.type  # a string that PyTorch puts together for each question


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@cache
def _cpu_works() -> bool:
    """Whether the kernels for CPUs can be imported here. Each is compiled when a call needs it."""
    try:
        _cpu()
    except Exception as error:  # whatever ails an installation of Numba that nobody asked to be used
        _warn_once(f"Numba is installed, but does not work ({error}): plain PyTorch attends instead, which is slower.")
        return False
    return True


# Imported when first wanted: what a machine has no use for, it need not have.


@cache
def _triton() -> ModuleType:
    from hf_paged_kernels import triton

    return triton


@cache
def _cpu() -> ModuleType:
    from hf_paged_kernels import numba

    return numba


_KERNELS: dict[Backend, Callable[[], ModuleType | None]] = {"triton": _triton, "cpu": _cpu, "reference": lambda: None}


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)
