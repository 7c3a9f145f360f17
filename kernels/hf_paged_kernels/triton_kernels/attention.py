"""`paged_attention` by the Triton kernels, with the contract of the reference."""

import numpy as np
import torch
import triton

from hf_paged_kernels.layout import KVBlocks
from hf_paged_kernels.step import StepMetadata
from hf_paged_kernels.triton_kernels.attend import attend_kernel
from hf_paged_kernels.triton_kernels.device import architecture, device_guard, processors, with_dense_dims
from hf_paged_kernels.triton_kernels.launch import MAX_DIM, Launch, select
from hf_paged_kernels.triton_kernels.merge import merge_kernel

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
MAX_DECODE_QUERIES = 8
MAX_SPLITS = 64
# A split shorter than this spends more on its start and its merge than on its keys.
MIN_SPLIT_LENGTH = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unsupported_reason(query: torch.Tensor, blocks: KVBlocks) -> str | None:
    """Why the kernels cannot do a call; `None` if they can."""
    dims = (blocks.key.shape[-1], blocks.value.shape[-1])
    if query.dtype not in DTYPES or blocks.key.dtype != query.dtype or blocks.value.dtype != query.dtype:
        return f"dtype {query.dtype} with blocks in {blocks.key.dtype}"
    if max(dims) > MAX_DIM:
        return f"a head_dim of {max(dims)}, above {MAX_DIM}"
    if query.shape[1] // blocks.num_kv_heads > 128:
        return f"{query.shape[1] // blocks.num_kv_heads} query heads a KV head, above 128"
    return None


def paged_attention(
    query: torch.Tensor,
    blocks: KVBlocks,
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
    arch: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As `hf_paged_kernels.reference.paged_attention`, in float32 sums.

    Args:
        num_splits: programs that share the keys of a row; `None` for as many as fill the card.
        arch: the card to choose launches for; `None` for the one that the tensors are on.
    """
    batch, num_heads, query_length, key_dim = query.shape
    value_dim = blocks.value.shape[-1]
    group = num_heads // blocks.num_kv_heads
    device = query.device
    on_device = step.on(device)
    phase = "decode" if query_length <= MAX_DECODE_QUERIES else "extend"
    launch = select(arch or architecture(device), phase, max(key_dim, value_dim), query.element_size() * 8)
    rows = _rows(launch, phase, group, query_length)
    query_tiles = triton.cdiv(query_length, rows // group)
    if num_splits is None:
        num_splits = 1
        if phase == "decode":
            programs = batch * blocks.num_kv_heads * query_tiles
            num_splits = step.memo(("splits", window, programs), lambda: plan_splits(step, window, programs, device))
    num_splits, split_length = split_lengths(step, window, num_splits, launch.tile)

    out = query.new_empty(batch, query_length, num_heads, value_dim)
    lse = torch.empty(batch, query_length, num_heads, dtype=torch.float32, device=device) if return_lse else None
    target, target_lse = out, lse
    if num_splits > 1:
        target = torch.empty(*out.shape[:3], num_splits, value_dim, dtype=torch.float32, device=device)
        target_lse = torch.empty(target.shape[:-1], dtype=torch.float32, device=device)
    query = with_dense_dims(query)
    new_key, new_value = (None, None) if new_kv is None else map(with_dense_dims, new_kv)
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    scale_log2 = scale * LOG2_E if softcap is None else 2 * scale / softcap * LOG2_E
    with device_guard(device):
        attend_kernel[(query_tiles * num_splits, blocks.num_kv_heads, batch)](
            query,
            blocks.key,
            blocks.value,
            new_key,
            new_value,
            on_device.block_table,
            on_device.seq_lens,
            None,
            mask,
            sinks,
            target,
            target_lse,
            scale_log2,
            blocks.num_blocks * blocks.block_size,
            on_device.block_table.shape[1],
            0 if mask is None else mask.shape[1],
            query_length,
            split_length,
            num_splits,
            num_splits,
            query.stride()[:3],
            None if new_key is None else new_key.stride()[:3],
            None if new_value is None else new_value.stride()[:3],
            SHAPE=(key_dim, *parts(key_dim), value_dim, *parts(value_dim)),
            GROUP=group,
            BLOCK_SIZE=blocks.block_size,
            ROWS=rows,
            TILE=launch.tile,
            WINDOW=window or 0,
            SOFTCAP=softcap or 0.0,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            IS_PARTIAL=num_splits > 1,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
        if num_splits > 1:
            merge_kernel[(batch * query_length * num_heads,)](
                target,
                target_lse,
                sinks,
                out,
                lse,
                NUM_HEADS=num_heads,
                NUM_SPLITS=num_splits,
                SPLITS=triton.next_power_of_2(num_splits),
                VALUE_DIM=value_dim,
                WIDTH=triton.next_power_of_2(value_dim),
                num_warps=4,
            )
    out = out.transpose(1, 2)
    return out if lse is None else (out, lse.transpose(1, 2) * LN_2)


def parts(dim: int) -> tuple[int, int]:
    """A width as the two that kernels take: the largest power of two in it, and the rest, at least 16 if there is any.

    A dot product needs 16 elements at least; what stands beyond the width is masked.
    """
    main = max(16, 1 << (dim.bit_length() - 1))
    rest = dim - main
    return (main, 0) if rest <= 0 else (main, max(16, triton.next_power_of_2(rest)))


def plan_splits(step: StepMetadata, window: int | None, programs: int, device: torch.device) -> int:
    """Splits that fill the card once, from the host's lengths: no wait for the device."""
    if programs >= 0.8 * processors(device):
        return 1
    visible = step.max_seq_len if window is None else min(step.max_seq_len, window + step.query_length)
    return max(1, min(MAX_SPLITS, 2 * processors(device) // programs, visible // MIN_SPLIT_LENGTH))


def split_lengths(step: StepMetadata, window: int | None, num_splits: int, tile: int) -> tuple[int, int]:
    """The number of splits that have something to do, and the tokens of each, a multiple of `tile`.

    The first tile of a row begins at or before the first token that it sees.
    """
    last = step.seq_lens.astype(np.int64)
    first = np.zeros_like(last)
    if window is not None:
        first = np.maximum(last - step.query_length - window + 1, 0)
    tiles = int((-(-last // tile) - first // tile).max())
    tiles_each = max(1, -(-tiles // num_splits))
    return max(1, -(-tiles // tiles_each)), tiles_each * tile


def _rows(launch: Launch, phase: str, group: int, query_length: int) -> int:
    """Rows of a program: a power of two from 16 on that holds all heads of a group for at least one query."""
    wanted = group * query_length if phase == "decode" else launch.rows
    return max(16, triton.next_power_of_2(group), min(launch.rows, triton.next_power_of_2(wanted)))
