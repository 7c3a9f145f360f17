"""Which blocks the rows of a table read exactly, under codecs that quantize whole blocks.

A block is quantized once, when it is full and the newest tokens have moved on. Until then an exact block holds its
tokens too, in the model's dtype. The first blocks (attention sinks) always have one.

    logical block    0        1      2      3      4      5
                   | sink |  codes, read by block id | exact window |     block_size 64, sinks 64, recent 64
    tokens         0      64                        256          350

A row's choice follows from its own length alone, so forks that share a block may read it in different ways: what a row
sees does not depend on who else holds its blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hf_paged_cache.blocks.allocator import BlockAllocator

Pairs = list[tuple[int, int]]


class Moves(NamedTuple):
    """What has to be moved before a step is written, as `(source, target)` pairs.

    Attributes:
        copies: block to block, in layers that store by block id.
        exact_copies: exact block to exact block.
        dequantized: codes of a block to exact block, for a row that was cropped into the block and writes on.
    """

    copies: Pairs
    exact_copies: Pairs
    dequantized: Pairs


@dataclass(frozen=True)
class ExactPolicy:
    """How many tokens stay exact, in whole blocks.

    Attributes:
        recent: newest tokens, at least.
        sinks: first tokens of each row, at least.
    """

    recent: int
    sinks: int


class ExactBlocks:
    """Where the exact blocks of a table come from, and which of its blocks have one.

    Args:
        policy: how many tokens stay exact.
        block_size: tokens a block.
        allocator: counts the references of exact blocks; other tables may share it.
        take: takes exact blocks, `allocator.take` unless something has to grow first.
    """

    def __init__(
        self,
        policy: ExactPolicy,
        block_size: int,
        allocator: BlockAllocator,
        take: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        self.policy = policy
        self.allocator = allocator
        self.take = take or allocator.take
        self._block_size = block_size
        self._sink_blocks = -(-policy.sinks // block_size)

    def are_quantized(self, seq_lens: np.ndarray, width: int) -> np.ndarray:
        """Which blocks rows of these lengths read as codes, bool `[num_rows, width]`."""
        block = np.arange(width)[None]
        last = np.maximum(seq_lens - self.policy.recent, 0) // self._block_size
        return (block >= self._sink_blocks) & (block < last[:, None])
