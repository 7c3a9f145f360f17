"""Counts what the kernels of a decode loop are compiled for: `python -m tests.kernels.decode_loop TOKENS BATCH`.

Prints a JSON object, kernel to number of variants. A process of its own, since in tests the kernels are interpreted.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import numpy as np
import torch
from hf_paged_kernels import KVBlocks, StepMetadata
from hf_paged_kernels.triton import paged_attention, plan, write_kv

from eval.kernels.compiled import counting_variants

BLOCK_SIZE = 64
KV_HEADS, GROUP, DIM = 2, 4, 128


def step(tokens: int, batch: int) -> StepMetadata:
    """Rows of `tokens` tokens that share nothing, the last of them new."""
    width = -(-tokens // BLOCK_SIZE)
    table = 1 + np.arange(batch * width, dtype=np.int32).reshape(width, batch).T
    return StepMetadata(
        block_table=table,
        seq_lens=np.full(batch, tokens, dtype=np.int32),
        padding=np.zeros(batch, dtype=np.int32),
        slots=(table[:, -1:] * BLOCK_SIZE + (tokens - 1) % BLOCK_SIZE).astype(np.int32),
        num_columns=tokens,
        block_size=BLOCK_SIZE,
        new_tokens_stored=True,
    )


def states(num_heads: int, batch: int) -> torch.Tensor:
    return torch.empty(batch, 1, num_heads, DIM, dtype=torch.bfloat16).transpose(1, 2)


def main() -> None:
    tokens, batch = map(int, sys.argv[1:])
    plan.processors = lambda device: 132
    num_blocks = 1 + batch * -(-tokens // BLOCK_SIZE)
    blocks = KVBlocks(*(torch.empty(KV_HEADS, num_blocks, BLOCK_SIZE, DIM, dtype=torch.bfloat16) for _ in range(2)))
    with counting_variants("sm_90") as variants:
        for length in range(1, tokens + 1):
            now, new = step(length, batch), states(KV_HEADS, batch)
            write_kv(blocks, new, new, now)
            paged_attention(states(KV_HEADS * GROUP, batch), blocks, now, scale=0.1)
    print(json.dumps({kernel: len(keys) for kernel, keys in variants.items()}))


if __name__ == "__main__":
    main()
