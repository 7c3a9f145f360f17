"""`paged_attention` on the CPU: from tensors to the kernel's record."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_paged_kernels.formats.blocks import Blocks, KVBlocks, in_model_dtype
from hf_paged_kernels.numba import threads
from hf_paged_kernels.numba.attend import LINE, attend_codes, attend_exact
from hf_paged_kernels.numba.call import DTYPES, bits_of
from hf_paged_kernels.numba.checks import check_attention
from hf_paged_kernels.numba.compiled import Kernel
from hf_paged_kernels.numba.operands import NOTHING, address_of, operand
from hf_paged_kernels.numba.plan import Plan, make_plan
from hf_paged_kernels.numba.stored import Format, Stored, StoredPart, stored, unsupported_blocks
from hf_paged_kernels.numba.tiles import STRIP, TILE
from hf_paged_kernels.numba.workspace import Workspaces
from hf_paged_kernels.step import StepMetadata

_ALIGNMENT = 4 * LINE  # bytes of a cache line, and of the widest vector


def unsupported_reason(query: torch.Tensor, blocks: Blocks) -> str | None:
    """Why the kernel cannot do a call; `None` if it can."""
    if query.dtype not in DTYPES:
        return f"dtype {query.dtype}"
    return blocks.memo(unsupported_reason, lambda: unsupported_blocks(blocks) or _kernel_for(stored(blocks)).problem)


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As `hf_paged_kernels.paged_attention`. No gradients flow through it."""
    check_attention(query, blocks, step, new_kv, key_mask, sinks)
    num_heads, num_threads, layer = query.shape[1], torch.get_num_threads(), stored(blocks)
    # The entry holds `key_mask`, so that its id stays its own.
    prepared = step.memo(
        ("cpu", num_heads, layer.formats, window, new_kv is None, id(key_mask), num_threads),
        lambda: _prepare(step, num_heads, layer, window, new_kv is not None, key_mask, num_threads),
    )
    # Whatever the record has an address of has a name here, so that it stays until the kernel is done.
    _query, query_fields = operand(query if query.dtype == torch.float32 else query.float())
    key_fields = value_fields = NOTHING
    if new_kv is not None:
        _key, key_fields = _new(new_kv[0], layer.key)
        _value, value_fields = _new(new_kv[1], layer.value)
    wide_sinks = None if sinks is None else sinks.float().contiguous()
    out = torch.empty_strided(prepared.shape, prepared.strides, dtype=torch.float32, device="cpu")
    lse = torch.empty(prepared.shape[:3], dtype=torch.float32, device="cpu") if return_lse else None
    if step.has_empty_queries:
        _fill_for_nothing_seen(out, lse, wide_sinks)
    workspace = prepared.workspaces.take()
    record = array(
        "q",
        (
            *(0, 0),
            *prepared.step_fields,
            *workspace.fields,
            blocks.num_blocks,
            layer.num_exact_blocks,
            address_of(wide_sinks),
            *query_fields,
            out.data_ptr(),
            address_of(lse),
            bits_of(scale),
            bits_of(softcap or 0.0),
            *_addresses(layer.key),
            *key_fields,
            *layer.key.format,
            *_addresses(layer.value),
            *value_fields,
            *layer.value.format,
        ),
    )
    num_threads = num_threads if prepared.plan.is_worth_threads else 1
    threads.run(_kernel_for(layer).address, record.buffer_info()[0], num_threads)
    prepared.workspaces.give_back(workspace)
    if query.dtype != torch.float32:
        out = out.to(query.dtype) if isinstance(blocks, KVBlocks) else in_model_dtype(out, query.dtype)
    return (out, lse) if return_lse else out


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What calls for layers of the same kind have in common in a step.

    Attributes:
        plan: the pieces.
        step_fields: the section `STEP` of the record.
        kept: what its addresses belong to, and the key mask by whose identity calls find this.
        workspaces: memory for calls.
        shape, strides: of the output, `[batch, num_heads, query_length, value_dim]` with heads next to dims.
    """

    plan: Plan
    step_fields: Sequence[int]
    kept: object
    workspaces: "Workspaces[_Workspace]"
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class _Workspace:
    """Memory for a call: the section `WORKSPACE` of the record, and what its addresses belong to."""

    fields: Sequence[int]
    kept: object


def _prepare(
    step: StepMetadata,
    num_heads: int,
    layer: Stored,
    window: int | None,
    has_new: bool,
    key_mask: torch.Tensor | None,
    num_threads: int,
) -> _Prepared:
    key, value, num_kv_heads, is_mixed = layer.formats
    group = num_heads // num_kv_heads
    plan = make_plan(step, group, num_kv_heads, window, has_new=has_new, num_threads=num_threads)
    table = np.ascontiguousarray(step.block_table, dtype=np.int32)
    # Layers that have no exact blocks may share the step with those that do.
    exact_table = np.ascontiguousarray(step.exact.block_table, dtype=np.int32) if is_mixed else None
    mask = None if key_mask is None else key_mask.contiguous()
    fields = (
        plan.pieces.buffer_info()[0],
        plan.num_pieces,
        step.query_length,
        table.ctypes.data,
        0 if exact_table is None else exact_table.ctypes.data,
        table.shape[1],
        address_of(mask),
        0 if mask is None else mask.shape[1],
        window or 0,
        num_kv_heads,
        group,
        step.block_size,
    )
    row, token = value.dim, num_heads * value.dim
    return _Prepared(
        plan=plan,
        step_fields=fields,
        kept=(table, exact_table, mask, key_mask),
        workspaces=Workspaces(lambda: _make_workspace(plan, key, value, num_threads)),
        shape=(step.batch, num_heads, step.query_length, value.dim),
        strides=(step.query_length * token, row, token, 1),
    )


def _make_workspace(plan: Plan, key: Format, value: Format, num_threads: int) -> _Workspace:
    strip_floats = STRIP * max(key.width, value.width)
    scratch_floats = plan.max_rows * (2 + value.width + key.width + TILE) + LINE + strip_floats
    scratch_bytes = -(-scratch_floats * 4 // _ALIGNMENT) * _ALIGNMENT
    scratch = torch.empty(num_threads * scratch_bytes + _ALIGNMENT, dtype=torch.uint8, device="cpu")
    partials = finished = None
    if plan.num_partial_rows:
        partials = torch.empty(plan.num_partial_rows, 2 + value.width, dtype=torch.float32, device="cpu")
        finished = torch.zeros(plan.num_units, dtype=torch.int64, device="cpu")
    aligned = -(-scratch.data_ptr() // _ALIGNMENT) * _ALIGNMENT
    return _Workspace(
        (aligned, scratch_bytes, address_of(partials), address_of(finished)), (scratch, partials, finished)
    )


def _kernel_for(layer: Stored) -> Kernel:
    return attend_exact if layer.key.codes is None else attend_codes


def _new(states: torch.Tensor, part: StoredPart) -> tuple[torch.Tensor, Sequence[int]]:
    """New keys or values as an operand, in the dtype of those in blocks."""
    return operand(states if states.dtype == part.dtype else states.to(part.dtype))


def _addresses(part: StoredPart) -> Sequence[int]:
    """What the record says of keys or values first: where those in blocks are."""
    if part.codes is None:
        return part.exact.data_ptr(), 0, 0, 0, 0
    scales = part.scale.data_ptr(), address_of(part.zero), address_of(part.offset)
    return address_of(part.exact), part.codes.data_ptr(), *scales


def _fill_for_nothing_seen(out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None) -> None:
    """Gives queries that are leading padding, which no piece is about, the result of seeing nothing."""
    out.zero_()
    if lse is not None and sinks is None:
        lse.fill_(-torch.inf)
    elif lse is not None:
        lse.copy_(sinks[:, None])
