"""Writing new tokens into their slots, and copying blocks, each in one launch."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from hf_paged_kernels.layout import KVBlocks
from hf_paged_kernels.step import StepMetadata, upload
from hf_paged_kernels.triton_kernels.device import device_guard, with_dense_dims

# Values that a program of the write kernel moves, and 8-byte words that one of the copy kernel does.
VALUES_PER_PROGRAM = 4096
WORDS_PER_PROGRAM = 1024


@triton.jit
def store_tokens(
    blocks_ptr,
    states_ptr,
    slots,
    stored,
    batch,
    token,
    strides,
    kv_head,
    num_slots,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Stores `[tokens, DIM]` of one head in its slots."""
    dims = tl.arange(0, WIDTH)
    inside = stored[:, None] & (dims < DIM)[None, :]
    sources = batch.to(tl.int64) * strides[0] + kv_head * strides[1] + token * strides[2]
    states = tl.load(states_ptr + sources[:, None] + dims[None, :], mask=inside, other=0.0)
    targets = (kv_head.to(tl.int64) * num_slots + slots) * DIM
    tl.store(blocks_ptr + targets[:, None] + dims[None, :], states, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "query_length"])
def write_kernel(
    key_ptr,  # [batch, num_kv_heads, query_length, KEY_DIM]
    value_ptr,  # [batch, num_kv_heads, query_length, VALUE_DIM]
    key_blocks_ptr,  # [num_kv_heads, num_slots, KEY_DIM]
    value_blocks_ptr,  # [num_kv_heads, num_slots, VALUE_DIM]
    slots_ptr,  # int32 [batch, query_length]; -1: not stored
    num_tokens,
    query_length,
    num_slots,
    key_strides,  # (batch, head, token)
    value_strides,
    KEY_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Stores keys and values of all new tokens. Grid: token tiles | KV heads."""
    index = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    kv_head = tl.program_id(1)
    slots = tl.load(slots_ptr + index, mask=index < num_tokens, other=-1).to(tl.int64)
    stored = slots >= 0
    batch, token = index // query_length, index % query_length
    store_tokens(
        key_blocks_ptr, key_ptr, slots, stored, batch, token, key_strides, kv_head, num_slots,
        KEY_DIM, KEY_WIDTH,
    )  # fmt: skip
    store_tokens(
        value_blocks_ptr, value_ptr, slots, stored, batch, token, value_strides, kv_head, num_slots,
        VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip


@triton.jit
def copy_kernel(
    runs_ptr,  # int64 [runs, 2]: address of the blocks of one head in one plane, 8-byte words a block
    pairs_ptr,  # int64 [pairs, 2]: source and target block
    WORDS: tl.constexpr,
):
    """Copies blocks in all planes. Grid: runs | pairs."""
    run, pair = tl.program_id(0), tl.program_id(1)
    base = tl.load(runs_ptr + 2 * run).to(tl.pointer_type(tl.int64))
    words = tl.load(runs_ptr + 2 * run + 1)
    source = base + tl.load(pairs_ptr + 2 * pair) * words
    target = base + tl.load(pairs_ptr + 2 * pair + 1) * words
    for start in range(0, words, WORDS):
        offsets = start + tl.arange(0, WORDS)
        tl.store(target + offsets, tl.load(source + offsets, mask=offsets < words), mask=offsets < words)


def write_kv(blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
    """As `hf_paged_kernels.write_kv`."""
    key, value = with_dense_dims(key), with_dense_dims(value)
    batch, num_kv_heads, query_length, key_dim = key.shape
    key_width, value_width = triton.next_power_of_2(key_dim), triton.next_power_of_2(value.shape[-1])
    num_tokens = batch * query_length
    tokens = min(triton.next_power_of_2(num_tokens), max(1, VALUES_PER_PROGRAM // max(key_width, value_width)))
    with device_guard(key.device):
        write_kernel[(triton.cdiv(num_tokens, tokens), num_kv_heads)](
            key,
            value,
            blocks.key,
            blocks.value,
            step.on(key.device).slot_mapping,
            num_tokens,
            query_length,
            blocks.num_blocks * blocks.block_size,
            key.stride()[:3],
            value.stride()[:3],
            KEY_DIM=key_dim,
            KEY_WIDTH=key_width,
            VALUE_DIM=value.shape[-1],
            VALUE_WIDTH=value_width,
            TOKENS=tokens,
            num_warps=4,
        )


def copy_blocks(layers: Sequence[KVBlocks], pairs: Sequence[tuple[int, int]]) -> None:
    """As `hf_paged_kernels.copy_blocks`, for layers on one device: one upload and one launch for all of them."""
    device = layers[0].key.device
    runs = np.concatenate([head_runs(plane) for blocks in layers for plane in blocks.planes])
    runs_there, pairs_there = upload((runs, np.array(pairs, dtype=np.int64)), device)
    with device_guard(device):
        copy_kernel[(len(runs), len(pairs))](runs_there, pairs_there, WORDS=WORDS_PER_PROGRAM, num_warps=4)


def head_runs(plane: torch.Tensor) -> np.ndarray:
    """int64 `[num_kv_heads, 2]`: the address of each head's blocks, and the 8-byte words of one block."""
    num_kv_heads, num_blocks, block_size, dim = plane.shape
    block_bytes = block_size * dim * plane.element_size()
    addresses = plane.data_ptr() + np.arange(num_kv_heads, dtype=np.int64) * (num_blocks * block_bytes)
    return np.stack([addresses, np.full(num_kv_heads, block_bytes // 8, dtype=np.int64)], axis=1)
