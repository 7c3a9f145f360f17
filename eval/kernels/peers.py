"""The implementations of decode attention that are compared: ours on blocks, and those that others offer.

Each is a `Contender`, so that a further backend, storage format or library is one entry more.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from hf_paged_kernels import Backend, paged_attention, write_kv
from hf_paged_kernels.api import choose
from torch.nn.attention import SDPBackend, sdpa_kernel

from eval.kernels.problems import BLOCK_SIZE, Problem
from eval.kernels.timing import Call

Kind = Literal["paged", "sdpa", "flex", "flash-attn", "flashinfer"]

PEERS: tuple[Kind, ...] = get_args(Kind)[1:]
FLASH_ATTENTION_PAGE = 256
FLEX_QUERY_BLOCK = 128
FLASHINFER_WORKSPACE_BYTES = 2**27
SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Contender:
    """One implementation.

    Attributes:
        name: in tables.
        kind: what it is an example of.
        prepare: from a problem, one call for each of its layers, which returns
            `[batch, num_heads, query_length, head_dim]`. What can be done once a step or before is done here.
        refusal: why it cannot do a problem, or `None`.
        write: from a problem, a call that stores the new tokens of one layer; `None` for those that store nothing.
    """

    name: str
    kind: Kind
    prepare: Callable[[Problem], list[Call]]
    refusal: Callable[[Problem], str | None]
    write: Callable[[Problem], Call] | None = None


def contenders(kinds: Sequence[Kind]) -> list[Contender]:
    """Every backend of ours, and the peers of these kinds."""
    ours = [
        Contender(
            _paged_name(backend),
            "paged",
            partial(_paged, backend),
            partial(_paged_refusal, backend),
            partial(_paged_write, backend),
        )
        for backend in get_args(Backend)
    ]
    peers = [
        Contender("sdpa", "sdpa", partial(_sdpa, _grouped_heads), _no_refusal),
        Contender("sdpa, heads repeated", "sdpa", partial(_sdpa, _repeated_heads), _needs_groups),
        Contender("sdpa, heads as queries", "sdpa", partial(_sdpa, _heads_as_queries), _needs_groups),
        Contender("sdpa, flash", "sdpa", partial(_sdpa, _flash), _needs_gpu),
        Contender("flex_attention, paged", "flex", _flex, _needs_raw),
        Contender(
            "flash-attn 2", "flash-attn", partial(_flash_attn, "flash_attn", "block_table"), _needs("flash_attn")
        ),
        Contender(
            "flash-attn 3",
            "flash-attn",
            partial(_flash_attn, "flash_attn_interface", "page_table"),
            _needs("flash_attn_interface"),
        ),
        Contender("flashinfer", "flashinfer", partial(_flashinfer, False), _needs("flashinfer")),
        Contender("flashinfer, tensor cores", "flashinfer", partial(_flashinfer, True), _needs("flashinfer")),
    ]
    return ours + [peer for peer in peers if peer.kind in kinds]


def _paged_name(backend: Backend) -> str:
    is_interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return f"paged, {backend}" + (" (interpreted)" if is_interpreted else "")


def _paged_refusal(backend: Backend, problem: Problem) -> str | None:
    try:
        choose(problem.device, backend)
    except ValueError as error:
        return str(error)
    if backend == "triton":
        from hf_paged_kernels.triton import unsupported_reason

        return unsupported_reason(problem.query, problem.layers[0])
    return None


def _paged(backend: Backend, problem: Problem) -> list[Call]:
    attend = partial(paged_attention, step=problem.step, scale=problem.scale, backend=backend)
    return [partial(attend, problem.query, blocks) for blocks in problem.layers]


def _paged_write(backend: Backend, problem: Problem) -> Call:
    new = torch.zeros_like(problem.query[:, : problem.shape.heads.num_kv_heads])
    return partial(write_kv, problem.layers[0], new, new, problem.step, backend=backend)


def _no_refusal(problem: Problem) -> str | None:
    return None


def _needs_groups(problem: Problem) -> str | None:
    return None if problem.shape.heads.group > 1 else "is the same as sdpa where every query head has its KV head"


def _needs_raw(problem: Problem) -> str | None:
    return None if problem.shape.kv == "raw" else "reads no codes"


def _needs_gpu(problem: Problem) -> str | None:
    return None if problem.device.type == "cuda" else "needs a GPU"


def _needs(module: str) -> Callable[[Problem], str | None]:
    def refusal(problem: Problem) -> str | None:
        if problem.device.type != "cuda":
            return "needs a GPU"
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
        if problem.shape.dtype not in SIXTEEN_BIT:
            return "takes float16 and bfloat16 only"
        return _needs_raw(problem)

    return refusal


def _sdpa(attend: Callable[..., torch.Tensor], problem: Problem) -> list[Call]:
    return [partial(attend, problem.query, key, value, scale=problem.scale) for key, value in problem.contiguous]


def _grouped_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=query.shape[1] != key.shape[1])


def _repeated_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """As models do it with a mask: the copy is part of each call."""
    group = query.shape[1] // key.shape[1]
    repeated = (states.repeat_interleave(group, dim=1) for states in (key, value))
    return F.scaled_dot_product_attention(query, *repeated, scale=scale)


def _heads_as_queries(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """The heads of a group share each read of a key; only for single queries, which see all keys."""
    grouped = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    return F.scaled_dot_product_attention(grouped, key, value, scale=scale).reshape(query.shape)


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _grouped_heads(query, key, value, scale)


def _flex(problem: Problem) -> list[Call]:
    """flex_attention over our own blocks, by torch's page table for it; whole blocks are read without a mask."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    shape, device = problem.shape, problem.device
    width = problem.table.shape[1]
    pages = PagedAttention(problem.layers[0].num_blocks, BLOCK_SIZE, shape.batch, device=device)
    # `reserve` takes pages from the end of this list.
    pages.empty_pages = problem.table[::-1].reshape(-1).tolist()
    for row in range(shape.batch):
        pages.reserve(torch.tensor(row, device=device), torch.tensor(shape.context, device=device))
    whole = torch.full((shape.batch, 1, 1), shape.context // BLOCK_SIZE, dtype=torch.int32, device=device)
    logical = torch.arange(width, dtype=torch.int32, device=device).expand(shape.batch, 1, 1, width).contiguous()
    mask = BlockMask.from_kv_blocks(
        width - whole,
        logical.flip(-1),  # the unfinished block, if there is one, is the last
        whole,
        logical,
        BLOCK_SIZE=(FLEX_QUERY_BLOCK, BLOCK_SIZE),
        seq_lengths=(1, shape.context),
    )
    lengths = torch.full((shape.batch,), shape.context, device=device)
    mask = pages.convert_logical_block_mask(mask, kv_len=lengths)
    # Compiled for each shape: beyond a number of them torch would go on without compiling.
    torch.compiler.reset()
    attend = torch.compile(flex_attention, dynamic=False)
    options = {"block_mask": mask, "scale": problem.scale, "enable_gqa": shape.heads.group > 1}
    return [
        partial(attend, problem.query, *(plane[None] for plane in blocks.token_planes), **options)
        for blocks in problem.layers
    ]


def _flash_attn(module: str, table_argument: str, problem: Problem) -> list[Call]:
    attend = importlib.import_module(module).flash_attn_with_kvcache
    shape = problem.shape
    table, layers = _in_pages(problem, FLASH_ATTENTION_PAGE, heads_first=False)
    options = {
        "cache_seqlens": torch.full((shape.batch,), shape.context, dtype=torch.int32, device=problem.device),
        "softmax_scale": problem.scale,
        table_argument: table,
    }
    query = problem.query.transpose(1, 2)

    def call(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(query, key, value, **options).transpose(1, 2)

    return [partial(call, key, value) for key, value in layers]


def _flashinfer(use_tensor_cores: bool, problem: Problem) -> list[Call]:
    flashinfer = importlib.import_module("flashinfer")
    shape, device = problem.shape, problem.device
    table, layers = _in_pages(problem, BLOCK_SIZE, heads_first=True)
    width = table.shape[1]
    workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=use_tensor_cores)
    wrapper.plan(
        torch.arange(0, shape.batch * width + 1, width, dtype=torch.int32, device=device),
        table.flatten(),
        torch.full((shape.batch,), (shape.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=device),
        shape.heads.num_heads,
        shape.heads.num_kv_heads,
        shape.heads.head_dim,
        BLOCK_SIZE,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
        sm_scale=problem.scale,
    )
    query = problem.query.squeeze(2)

    def call(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return wrapper.run(query, (key, value)).unsqueeze(2)

    return [partial(call, key, value) for key, value in layers]


def _in_pages(
    problem: Problem, page_size: int, *, heads_first: bool
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The problem in another library's pages, in random order.

    Returns:
        The table, int32 `[batch, width]`, and the keys and values of each layer: `[pages, page_size, num_kv_heads,
        head_dim]`, or with the heads before the tokens of a page.
    """
    shape = problem.shape
    width = -(-shape.context // page_size)
    order = np.random.default_rng(1).permutation(shape.batch * width)
    place = torch.from_numpy(order).to(problem.device)

    def in_pages(states: torch.Tensor) -> torch.Tensor:
        padded = F.pad(states, (0, 0, 0, width * page_size - shape.context))
        pages = padded.unflatten(2, (width, page_size)).transpose(1, 2)  # [batch, width, heads, page_size, head_dim]
        pages = (pages if heads_first else pages.transpose(2, 3)).flatten(0, 1)
        placed = torch.empty(pages.shape, dtype=pages.dtype, device=pages.device)
        placed[place] = pages
        return placed

    layers = [(in_pages(key), in_pages(value)) for key, value in problem.contiguous]
    return place.to(torch.int32).view(shape.batch, width), layers
