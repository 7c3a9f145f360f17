"""The same keys and values in every format that blocks have."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np
import torch
from hf_paged_kernels import Blocks, GroupedBlocks, KVBlocks, MixedBlocks, StepMetadata, write_kv

from hf_paged_cache.codecs import Geometry, make_codec

# Blocks that are quantized in one call: it needs several float32 copies of them.
CHUNK = 512


@dataclass(frozen=True, eq=False)
class Stored:
    """Keys and values in one format.

    Attributes:
        blocks: of one layer, as kernels take them.
        exact_table: int32 `[batch, width]`, the exact block of each logical block, or -1; `None` in formats with none.
        key, value: what the blocks read as, `[num_kv_heads, num_blocks, block_size, head_dim]`.
    """

    blocks: Blocks
    exact_table: np.ndarray | None
    key: torch.Tensor
    value: torch.Tensor


@cache
def token_bytes(kv: str, num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int) -> float:
    """Bytes that a token takes in one layer, scales included."""
    geometry = Geometry(num_kv_heads, head_dim, head_dim, dtype, dtype, torch.device("cpu"))
    return sum(plane.nbytes for plane in make_codec(kv).allocate(geometry, block_size, 1).planes) / block_size


def store(kv: str, exact: KVBlocks, table: np.ndarray) -> Stored:
    """Puts blocks into a format.

    Formats that quantize whole blocks keep the first and the last block of each row exact, as a cache does.

    Args:
        kv: a name from `hf_paged_cache.CODECS`.
        exact: the blocks in the model's dtype. Those that `table` does not name are NaN.
        table: int32 `[batch, width]`, their ids.
    """
    if kv == "raw":
        return Stored(exact, None, exact.key, exact.value)
    blocks = _allocate(kv, exact)
    if isinstance(blocks, GroupedBlocks):
        return _in_groups(blocks, exact, table)
    block_ids = np.unique(table)
    write_kv(blocks, *_as_rows(exact, block_ids), _whole_blocks(block_ids, exact.block_size), backend="reference")
    return Stored(blocks, None, *_as_read(blocks, exact, block_ids))


def clone(blocks: Blocks) -> Blocks:
    """The same content in memory of its own."""
    values = {field.name: getattr(blocks, field.name) for field in fields(blocks)}
    cloned = {name: value.clone() for name, value in values.items() if isinstance(value, torch.Tensor)}
    cloned |= {name: clone(value) for name, value in values.items() if isinstance(value, Blocks)}
    return replace(blocks, **cloned)


def _allocate(kv: str, exact: KVBlocks) -> Blocks:
    """Blocks of a format, with scales of NaN."""
    (key_dim, value_dim), dtype = exact.dims, exact.key.dtype
    geometry = Geometry(exact.num_kv_heads, key_dim, value_dim, dtype, dtype, exact.device)
    blocks = make_codec(kv).allocate(geometry, exact.block_size, exact.num_blocks)
    for plane in blocks.planes:
        if plane.is_floating_point():
            plane.fill_(math.nan)
    return blocks


def _in_groups(blocks: GroupedBlocks, exact: KVBlocks, table: np.ndarray) -> Stored:
    exact_table = np.full_like(table, -1)
    edges = np.unique([0, table.shape[1] - 1])
    exact_table[:, edges] = np.arange(len(table) * len(edges)).reshape(len(table), -1)
    exact_ids = torch.from_numpy(table[:, edges].reshape(-1).astype(np.int64)).to(exact.device)
    in_exact_blocks = KVBlocks(*(plane[:, exact_ids].contiguous() for plane in exact.planes))
    quantized = np.unique(table[:, 1:-1])
    for start in range(0, len(quantized), CHUNK):
        chunk = torch.from_numpy(quantized[start : start + CHUNK].astype(np.int64)).to(exact.device)
        blocks.quantize(exact.key[:, chunk], exact.value[:, chunk], chunk)
    return Stored(MixedBlocks(blocks, in_exact_blocks), exact_table, *_as_read(blocks, exact, quantized))


def _as_read(blocks: Blocks, exact: KVBlocks, block_ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with what the codes of some blocks say in their place."""
    ids = torch.from_numpy(block_ids.astype(np.int64)).to(exact.device)
    planes = [plane.clone() for plane in exact.planes]
    for part, plane in zip(("key", "value"), planes, strict=True):
        plane[:, ids] = blocks.read_blocks(part, ids)
    return planes[0], planes[1]


def _as_rows(exact: KVBlocks, block_ids: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Each block as a row of new tokens, `[n, num_kv_heads, block_size, dim]`."""
    ids = torch.from_numpy(block_ids.astype(np.int64)).to(exact.device)
    return tuple(plane[:, ids].transpose(0, 1) for plane in exact.planes)


def _whole_blocks(block_ids: np.ndarray, block_size: int) -> StepMetadata:
    """A step in which each row fills one block."""
    num_rows = len(block_ids)
    return StepMetadata(
        block_table=block_ids[:, None].astype(np.int32),
        seq_lens=np.full(num_rows, block_size, dtype=np.int32),
        padding=np.zeros(num_rows, dtype=np.int32),
        slots=(block_ids[:, None] * block_size + np.arange(block_size)).astype(np.int32),
        num_columns=block_size,
        block_size=block_size,
        new_tokens_stored=True,
    )
