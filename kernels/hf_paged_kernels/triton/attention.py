"""`paged_attention` by the Triton kernels, with the contract of the reference."""

import math
from functools import lru_cache

import torch
import triton

from hf_paged_kernels.formats.blocks import Blocks, KVBlocks
from hf_paged_kernels.formats.grouped import MixedBlocks
from hf_paged_kernels.formats.scaled import ScaledBlocks
from hf_paged_kernels.step import StepMetadata
from hf_paged_kernels.triton.attend import attend_kernel
from hf_paged_kernels.triton.device import architecture, device_guard, with_dense_dims
from hf_paged_kernels.triton.formats import Format, format_of, largest_power_of_2, planes_of, tables_of
from hf_paged_kernels.triton.launch import MAX_DIM, UNSUPPORTED, Launch, phase_of, select
from hf_paged_kernels.triton.merge import merge_kernel
from hf_paged_kernels.triton.plan import Plan, planned
from hf_paged_kernels.triton.shared import attend_shared_kernel
from hf_paged_kernels.triton.softmax import score_factor

LN_2 = math.log(2)
# A dot product takes no fewer keys.
MIN_TILE = 16
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unsupported_reason(query: torch.Tensor, blocks: Blocks) -> str | None:
    """Why the kernels cannot do a call; `None` if they can."""
    if not isinstance(blocks, KVBlocks | ScaledBlocks | MixedBlocks):
        return type(blocks).__name__
    if isinstance(blocks, KVBlocks) and blocks.key.dtype != blocks.value.dtype:
        return f"keys in {blocks.key.dtype} with values in {blocks.value.dtype}"
    group = query.shape[1] // blocks.num_kv_heads
    return _reason(query.dtype, query.device, query.shape[2], group, format_of(blocks), blocks.block_size)


@lru_cache(maxsize=256)
def _reason(
    dtype: torch.dtype, device: torch.device, query_length: int, group: int, stored: Format, block_size: int
) -> str | None:
    if dtype not in DTYPES or stored.dtype != dtype:
        return f"dtype {dtype} with blocks in {stored.dtype}"
    if stored.has_block_planes and largest_power_of_2(block_size) < MIN_TILE:
        return f"codes in blocks of {block_size} tokens, no multiple of {MIN_TILE}"
    if stored.width > MAX_DIM:
        return f"a head_dim of {stored.width}, above {MAX_DIM}"
    arch = architecture(device)
    if arch in UNSUPPORTED:
        return f"a card of {arch}, below sm_80"
    try:
        select(arch, phase_of(query_length), stored.width, stored.bits, group)
    except LookupError:
        width = f"a head_dim of {stored.width}" + (" in codes" if stored.bits <= 8 else "")
        return f"{group} query heads a KV head with {width}, which do not fit in one program"
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
    num_splits: int | None = None,
    launch: Launch | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As `hf_paged_kernels.torch.reference.paged_attention`, in float32 sums.

    Args:
        num_splits: programs that share the keys of a row; `None` for as many as fill the card.
        launch: tiles, warps and stages; `None` for what the table has for this card.
    """
    query = with_dense_dims(query)
    sinks = None if sinks is None else sinks.contiguous()
    plan = planned(
        query,
        blocks,
        step,
        window=window,
        has_key_mask=key_mask is not None,
        has_new=new_kv is not None,
        num_splits=num_splits,
        launch=launch,
    )
    call = _Call(query, blocks, step, plan, score_factor(scale, softcap), window or 0, softcap or 0.0)
    shape = (query.shape[0], query.shape[2], query.shape[1])
    out = query.new_empty(*shape, blocks.dims[1])
    lse = torch.empty(shape, dtype=torch.float32, device=query.device) if return_lse else None
    with device_guard(query.device):
        if plan.all_splits == 1:
            call.attend(out, lse, sinks, new_kv, key_mask)
        else:
            partial = torch.empty(*shape, plan.all_splits, out.shape[-1], dtype=torch.float32, device=query.device)
            partial_lse = torch.empty(partial.shape[:-1], dtype=torch.float32, device=query.device)
            if plan.shared is not None:
                call.attend_shared(partial, partial_lse)
            call.attend(partial, partial_lse, None, new_kv, key_mask)
            _merge(partial, partial_lse, sinks, out, lse)
    out = out.transpose(1, 2)
    return out if lse is None else (out, lse.transpose(1, 2) * LN_2)


class _Call:
    """One call of `paged_attention`: what its launches have in common."""

    def __init__(
        self,
        query: torch.Tensor,
        blocks: Blocks,
        step: StepMetadata,
        plan: Plan,
        scale_log2: float,
        window: int,
        softcap: float,
    ) -> None:
        self.query, self.plan, self.num_kv_heads = query, plan, blocks.num_kv_heads
        self.planes = planes_of(blocks)
        self.tables = tables_of(step, query.device, is_grouped=plan.constants["FORMAT"][0] == "grouped")
        self.scale_log2, self.window, self.softcap = scale_log2, window, softcap

    def attend(
        self,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None,
        key_mask: torch.Tensor | None,
    ) -> None:
        """What each row sees for itself, as results or as the last partial results."""
        query, plan, planes, tables = self.query, self.plan, self.planes, self.tables
        new_key, new_value = (None, None) if new_kv is None else map(with_dense_dims, new_kv)
        mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
        attend_kernel[(plan.query_tiles * plan.num_splits, self.num_kv_heads, query.shape[0])](
            query,
            planes.key,
            planes.value,
            planes.codes,
            new_key,
            new_value,
            tables.table,
            tables.seq_lens,
            tables.quantized_table,
            tables.quantized_ranges,
            plan.shared.first_tokens if plan.shared else None,
            mask,
            sinks,
            out,
            lse,
            self.scale_log2,
            planes.num_slots,
            planes.num_quantized_slots,
            tables.table.shape[1],
            0 if mask is None else mask.shape[1],
            query.shape[2],
            plan.split_length,
            plan.num_splits,
            plan.all_splits,
            query.stride()[:3],
            None if new_key is None else new_key.stride()[:3],
            None if new_value is None else new_value.stride()[:3],
            ROWS=plan.rows,
            WINDOW=self.window,
            SOFTCAP=self.softcap,
            IS_PARTIAL=plan.all_splits > 1,
            ONE_QUERY=query.shape[2] == 1,
            **plan.constants,
        )

    def attend_shared(self, partial: torch.Tensor, partial_lse: torch.Tensor) -> None:
        """What rows see together, as the first partial results."""
        query, planes, shared = self.query, self.planes, self.plan.shared
        if not shared.reaches_all:
            partial_lse[..., : shared.num_splits] = -torch.inf
        attend_shared_kernel[(len(shared.runs.tile_rows) * shared.num_splits, self.num_kv_heads)](
            query,
            planes.key,
            planes.value,
            self.tables.table,
            shared.tile_rows,
            shared.tile_lengths,
            partial,
            partial_lse,
            self.scale_log2,
            planes.num_slots,
            self.tables.table.shape[1],
            query.shape[2],
            shared.split_length,
            shared.num_splits,
            self.plan.all_splits,
            query.stride()[:3],
            SEQUENCES=shared.sequences,
            ROWS=shared.rows,
            SOFTCAP=self.softcap,
            **self.plan.constants,
        )


def _merge(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    batch, query_length, num_heads, num_splits, value_dim = partial.shape
    merge_kernel[(batch * query_length * num_heads,)](
        partial,
        partial_lse,
        sinks,
        out,
        lse,
        num_splits,
        NUM_HEADS=num_heads,
        SPLITS=max(8, triton.next_power_of_2(num_splits)),
        VALUE_DIM=value_dim,
        WIDTH=triton.next_power_of_2(value_dim),
        num_warps=4,
    )
