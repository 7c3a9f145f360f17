"""`paged_attention` on the CPU: from tensors to the kernel's record."""

from array import array

import numpy as np
import torch

from hf_paged_kernels.cpu_kernels import threads
from hf_paged_kernels.cpu_kernels.attend import LINE, work
from hf_paged_kernels.cpu_kernels.call import DTYPES, bits_of
from hf_paged_kernels.cpu_kernels.checks import check_attention, with_dense_rows
from hf_paged_kernels.cpu_kernels.plan import Plan, make_plan
from hf_paged_kernels.cpu_kernels.tiles import TILE
from hf_paged_kernels.cpu_kernels.vectors import LANES
from hf_paged_kernels.grouped import HotColdBlocks
from hf_paged_kernels.layout import Blocks, KVBlocks, in_model_dtype
from hf_paged_kernels.scaled import ScaledBlocks
from hf_paged_kernels.step import StepMetadata

_NOTHING_NEW = [0, 0, 0, 0]
_ALIGNMENT = 4 * LINE  # bytes of a cache line, and of the widest vector


def unsupported_reason(query: torch.Tensor, blocks: Blocks) -> str | None:
    """Why the kernel cannot do a call; `None` if it can."""
    if not isinstance(blocks, KVBlocks | ScaledBlocks | HotColdBlocks):
        return type(blocks).__name__
    for dtype in (query.dtype, *_dtypes_of(blocks)):
        if dtype not in DTYPES:
            return f"dtype {dtype}"
    return None


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
    batch, num_heads, query_length, key_dim = query.shape
    num_kv_heads, num_threads = blocks.num_kv_heads, torch.get_num_threads()
    is_hot_cold = isinstance(blocks, HotColdBlocks)
    # The entry holds `key_mask`, so that its id stays its own, and `_kept` what the fields are addresses of.
    plan, step_fields, _kept, _ = step.memo(
        ("cpu", num_heads, num_kv_heads, window, new_kv is None, id(key_mask), num_threads, is_hot_cold),
        lambda: _of_step(step, num_heads, num_kv_heads, window, new_kv is not None, key_mask, num_threads, is_hot_cold),
    )
    # Whatever the record has an address of has a name here, so that it stays until the kernel is done.
    wide_query = with_dense_rows(query.float())
    new_key = new_value = None
    if new_kv is not None:
        new_key, new_value = (
            with_dense_rows(states.to(dtype)) for states, dtype in zip(new_kv, _dtypes_of(blocks), strict=True)
        )
    wide_sinks = None if sinks is None else sinks.float().contiguous()
    value_dim = blocks.dims[1]
    key_width, value_width = -(-key_dim // LANES) * LANES, -(-value_dim // LANES) * LANES
    stored = _stored(blocks, False, key_dim, key_width), _stored(blocks, True, value_dim, value_width)
    tile_floats = TILE * max(key_width, value_width) + max(stored[0][-1], stored[1][-1])
    scratch_floats = plan.max_rows * (2 + value_width + key_width + TILE) + LINE + tile_floats
    scratch_bytes = -(-scratch_floats * 4 // _ALIGNMENT) * _ALIGNMENT
    on_cpu = {"dtype": torch.float32, "device": "cpu"}
    scratch = torch.empty(num_threads * scratch_bytes + _ALIGNMENT, dtype=torch.uint8, device="cpu")
    parts = finished = None
    if plan.num_partial_rows:
        parts = torch.empty(plan.num_partial_rows, 2 + value_width, **on_cpu)
        finished = torch.zeros(plan.num_units, dtype=torch.int64, device="cpu")
    shape = (batch, query_length, num_heads, value_dim)
    out = torch.zeros(shape, **on_cpu) if step.has_empty_queries else torch.empty(shape, **on_cpu)
    lse = None
    if return_lse:
        lse = torch.full((batch, num_heads, query_length), -torch.inf, **on_cpu)
        if step.has_empty_queries and wide_sinks is not None:
            lse.copy_(wide_sinks[:, None])

    layer_fields = [
        blocks.num_blocks,
        blocks.hot.num_blocks if is_hot_cold else 0,
        _address(wide_sinks),
        wide_query.data_ptr(),
        *wide_query.stride()[:3],
        out.data_ptr(),
        _address(lse),
        -(-scratch.data_ptr() // _ALIGNMENT) * _ALIGNMENT,
        scratch_bytes,
        _address(parts),
        _address(finished),
        bits_of(scale),
        bits_of(softcap or 0.0),
    ]
    record = array("q", [0, 0, *step_fields, *layer_fields])
    for fields, new in zip(stored, (new_key, new_value), strict=True):
        record.extend(fields)
        record.extend(_NOTHING_NEW if new is None else [new.data_ptr(), *new.stride()[:3]])
    threads.run(work.address, record.buffer_info()[0], in_parallel=plan.is_worth_threads)
    out = in_model_dtype(out, query.dtype) if not isinstance(blocks, KVBlocks) else out.to(query.dtype)
    out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _of_step(
    step: StepMetadata,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    has_new: bool,
    key_mask: torch.Tensor | None,
    num_threads: int,
    is_hot_cold: bool,
) -> tuple[Plan, list[int], object, torch.Tensor | None]:
    """The plan, the section `STEP` of the record, what its addresses belong to, and `key_mask`."""
    group = num_heads // num_kv_heads
    plan = make_plan(step, group, num_kv_heads, window, has_new=has_new, num_threads=num_threads)
    table = np.ascontiguousarray(step.block_table, dtype=np.int32)
    # Layers that have no hot blocks may share the step with those that do.
    hot_table = np.ascontiguousarray(step.hot.block_table, dtype=np.int32) if is_hot_cold else None
    mask = None if key_mask is None else key_mask.contiguous()
    fields = [
        plan.pieces.ctypes.data,
        len(plan.pieces),
        step.query_length,
        table.ctypes.data,
        0 if hot_table is None else hot_table.ctypes.data,
        table.shape[1],
        _address(mask),
        0 if mask is None else mask.shape[1],
        window or 0,
        num_kv_heads,
        group,
        step.block_size,
    ]
    return plan, fields, (plan, table, hot_table, mask), key_mask


def _stored(blocks: Blocks, is_value: bool, dim: int, width: int) -> tuple[int, ...]:
    """What the record says of the keys, or the values, in blocks: from `dim` to `scale_floats`."""
    if isinstance(blocks, KVBlocks):
        plane = blocks.value if is_value else blocks.key
        return dim, width, plane.data_ptr(), DTYPES[plane.dtype], 0, 0, 0, 0, 0, 0
    if isinstance(blocks, ScaledBlocks):
        codes, scale = (blocks.value, blocks.value_scale) if is_value else (blocks.key, blocks.key_scale)
        bits = 8 if blocks.code_dtype == torch.int8 else 0
        return dim, width, 0, DTYPES[blocks.dtype], codes.data_ptr(), scale.data_ptr(), 0, bits, 0, 0
    hot, cold = blocks.hot, blocks.cold
    if is_value:
        exact, codes, scale, zero, bits = hot.value, cold.value, cold.value_scale, cold.value_zero, cold.value_bits
        group = dim // scale.shape[-1]
    else:
        exact, codes, scale, zero, bits = hot.key, cold.key, cold.key_scale, cold.key_zero, cold.key_bits
        group = codes.shape[2] // scale.shape[2]
    pointers = (codes.data_ptr(), scale.data_ptr(), zero.data_ptr())
    scale_floats = 2 * (TILE * dim // group if is_value else width)
    return dim, width, exact.data_ptr(), DTYPES[exact.dtype], *pointers, bits, group, scale_floats


def _dtypes_of(blocks: Blocks) -> tuple[torch.dtype, torch.dtype]:
    """Of keys and of values that are no codes, new ones included."""
    if isinstance(blocks, ScaledBlocks):
        return blocks.dtype, blocks.dtype
    exact = blocks.hot if isinstance(blocks, HotColdBlocks) else blocks
    return exact.key.dtype, exact.value.dtype


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
