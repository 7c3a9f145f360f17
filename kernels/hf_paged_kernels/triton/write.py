"""Writing new tokens into their slots, and copying blocks, each in one launch."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from hf_paged_kernels.formats.blocks import Blocks
from hf_paged_kernels.formats.grouped import MixedBlocks
from hf_paged_kernels.step import StepMetadata, upload
from hf_paged_kernels.torch.write import quantize_new_blocks
from hf_paged_kernels.triton.codes import outlying, scaled_codes, with_sign, without_offset
from hf_paged_kernels.triton.device import device_guard, with_dense_dims
from hf_paged_kernels.triton.formats import format_of, planes_of

# Values that a program of the write kernel moves, and words that one of the copy kernel does.
VALUES_PER_PROGRAM = 4096
WORDS_PER_PROGRAM = 1024
WORD_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def store_tokens(
    blocks_ptr,
    scales_ptr,
    offsets_ptr,
    states_ptr,
    slots,
    stored,
    batch,
    token,
    strides,
    kv_head,
    num_slots,
    FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Stores `[tokens, DIM]` of one head in its slots, as they are or as 8-bit codes, see
    `hf_paged_kernels.formats.scaled`."""
    dims = tl.arange(0, WIDTH)
    inside = stored[:, None] & (dims < DIM)[None, :]
    sources = batch.to(tl.int64) * strides[0] + kv_head.to(tl.int64) * strides[1] + token.to(tl.int64) * strides[2]
    states = tl.load(states_ptr + sources[:, None] + dims[None, :], mask=inside, other=0.0)
    targets = kv_head.to(tl.int64) * num_slots + slots
    if FORMAT[0] != "raw":
        states = states.to(tl.float32)
        if offsets_ptr is not None:
            # Where the first token of the block is also new, its offset is made from it, once more by each program that
            # needs it: another program may not have stored it yet.
            place = slots % BLOCK_SIZE
            is_new = stored & (token >= place)
            first_keys = tl.load(
                states_ptr + (sources - place * strides[2])[:, None] + dims[None, :],
                mask=is_new[:, None] & inside,
                other=0.0,
            )
            block_offsets = (targets // BLOCK_SIZE * DIM)[:, None] + dims[None, :]
            known = tl.load(offsets_ptr + block_offsets, mask=inside & (token < place)[:, None], other=0.0)
            offset = outlying(first_keys.to(tl.float32), DIM, WIDTH)
            tl.store(offsets_ptr + block_offsets, offset.to(tl.bfloat16), mask=inside & (place == 0)[:, None])
            offset = tl.where(is_new[:, None], offset, known.to(tl.float32))
            states, is_plain = without_offset(states, offset)
            states, scale = scaled_codes(states, FORMAT)
            scale = with_sign(scale, is_plain)
        else:
            states, scale = scaled_codes(states, FORMAT)
        tl.store(scales_ptr + targets, scale, mask=stored)
    tl.store(blocks_ptr + (targets * DIM)[:, None] + dims[None, :], states, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "query_length"])
def write_kernel(
    key_ptr,  # [batch, num_kv_heads, query_length, KEY_DIM]
    value_ptr,  # [batch, num_kv_heads, query_length, VALUE_DIM]
    key_blocks_ptr,  # [num_kv_heads, num_slots, KEY_DIM], in the model's dtype, or bytes of codes
    value_blocks_ptr,  # [num_kv_heads, num_slots, VALUE_DIM]
    key_scales_ptr,  # bfloat16 [num_kv_heads, num_slots]; None: no codes
    value_scales_ptr,
    key_offsets_ptr,  # bfloat16 [num_kv_heads, num_slots / BLOCK_SIZE, KEY_DIM]; None: no offsets
    slots_ptr,  # int32 [batch, query_length]; -1: not stored
    num_tokens,
    query_length,
    num_slots,
    key_strides,  # (batch, head, token)
    value_strides,
    FORMAT: tl.constexpr,  # as in `Format`
    BLOCK_SIZE: tl.constexpr,
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
        key_blocks_ptr, key_scales_ptr, key_offsets_ptr, key_ptr, slots, stored, batch, token, key_strides, kv_head,
        num_slots, FORMAT, BLOCK_SIZE, KEY_DIM, KEY_WIDTH,
    )  # fmt: skip
    store_tokens(
        value_blocks_ptr, value_scales_ptr, None, value_ptr, slots, stored, batch, token, value_strides, kv_head,
        num_slots, FORMAT, BLOCK_SIZE, VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip


@triton.jit
def copy_kernel(
    runs_ptr,  # int64 [runs, 2]: address of the blocks of one head in one plane, words a block
    pairs_ptr,  # int64 [pairs, 2]: source and target block
    WORD: tl.constexpr,  # type of a word
    WORDS: tl.constexpr,
):
    """Copies blocks in all planes. Grid: pairs | runs."""
    pair, run = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = tl.load(runs_ptr + 2 * run).to(tl.pointer_type(WORD))
    words = tl.load(runs_ptr + 2 * run + 1)
    source = base + tl.load(pairs_ptr + 2 * pair) * words
    target = base + tl.load(pairs_ptr + 2 * pair + 1) * words
    for start in range(0, words, WORDS):
        offsets = start + tl.arange(0, WORDS)
        tl.store(target + offsets, tl.load(source + offsets, mask=offsets < words), mask=offsets < words)


def write_kv(blocks: Blocks, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
    """As `hf_paged_kernels.write_kv`."""
    if isinstance(blocks, MixedBlocks):
        write_kv(blocks.exact, key, value, step.exact)
        # Once in the life of a block, so that plain PyTorch does.
        quantize_new_blocks(blocks, key, value, step)
        return
    key, value = with_dense_dims(key), with_dense_dims(value)
    batch, num_kv_heads, query_length, key_dim = key.shape
    key_width, value_width = triton.next_power_of_2(key_dim), triton.next_power_of_2(value.shape[-1])
    num_tokens = batch * query_length
    tokens = min(triton.next_power_of_2(num_tokens), max(1, VALUES_PER_PROGRAM // max(key_width, value_width)))
    planes = planes_of(blocks)
    key_scales, value_scales, key_offsets = (*(planes.codes or (None, None)), None)[:3]
    with device_guard(key.device):
        write_kernel[(triton.cdiv(num_tokens, tokens), num_kv_heads)](
            key,
            value,
            planes.key,
            planes.value,
            key_scales,
            value_scales,
            key_offsets,
            step.on(key.device).slot_mapping,
            num_tokens,
            query_length,
            planes.num_slots,
            key.stride()[:3],
            value.stride()[:3],
            FORMAT=format_of(blocks).constants,
            BLOCK_SIZE=blocks.block_size,
            KEY_DIM=key_dim,
            KEY_WIDTH=key_width,
            VALUE_DIM=value.shape[-1],
            VALUE_WIDTH=value_width,
            TOKENS=tokens,
            num_warps=4,
        )


def copy_blocks(layers: Sequence[Blocks], pairs: Sequence[tuple[int, int]]) -> None:
    """As `hf_paged_kernels.copy_blocks`, for layers on one device: one upload and one launch for all of them."""
    device = layers[0].device
    word_bytes, runs = head_runs([plane for blocks in layers for plane in blocks.planes])
    runs_there, pairs_there = upload((runs, np.array(pairs, dtype=np.int64)), device)
    with device_guard(device):
        copy_kernel[(len(pairs), len(runs))](
            runs_there, pairs_there, WORD=WORD_TYPES[word_bytes], WORDS=WORDS_PER_PROGRAM, num_warps=4
        )


def head_runs(planes: Sequence[torch.Tensor]) -> tuple[int, np.ndarray]:
    """What a copy of blocks goes through.

    Args:
        planes: contiguous, `[num_kv_heads, num_blocks, ...]`.

    Returns:
        The bytes of a word, the widest that all addresses and blocks are multiples of, and int64 `[runs, 2]`: the
        address of each head's blocks in each plane, and the words of one block.
    """
    addresses, num_kv_heads, num_blocks, block_bytes = np.array(
        [(p.data_ptr(), p.shape[0], p.shape[1], p.stride(1) * p.element_size()) for p in planes], dtype=np.int64
    ).T
    word_bytes = int(np.gcd.reduce([max(WORD_TYPES), *addresses, *block_bytes]))
    plane = np.arange(len(planes)).repeat(num_kv_heads)
    head = np.arange(len(plane)) - (num_kv_heads.cumsum() - num_kv_heads)[plane]
    starts = addresses[plane] + head * (num_blocks * block_bytes)[plane]
    return word_bytes, np.stack([starts, block_bytes[plane] // word_bytes], axis=1)
