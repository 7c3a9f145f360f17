"""Which blocks the rows of a table read exactly, under codecs that quantize whole blocks.

A block is quantized once, when it is full and the newest tokens have moved on. Until then its tokens are also in a hot
block, in the model's dtype; so are those of the first blocks (attention sinks), always.

    logical block    0        1      2      3      4      5
                   | sink |  codes, read by block id | hot window |     block_size 64, sink 64, window 64
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
        hot_copies: hot block to hot block.
        thaws: codes of a block to hot block, for a row that was cropped into the block and writes on.
    """

    copies: Pairs
    hot_copies: Pairs
    thaws: Pairs


@dataclass(frozen=True)
class HotPolicy:
    """How many tokens stay exact, in whole blocks.

    Attributes:
        window: newest tokens, at least.
        sink: first tokens of each row, at least.
    """

    window: int
    sink: int


class HotBlocks:
    """Where the hot blocks of a table come from, and which of its blocks have one.

    Args:
        policy: how many tokens stay exact.
        block_size: tokens a block.
        allocator: counts the references of hot blocks; other tables may share it.
        take: takes hot blocks, `allocator.take` unless something has to grow first.
    """

    def __init__(
        self,
        policy: HotPolicy,
        block_size: int,
        allocator: BlockAllocator,
        take: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        self.policy = policy
        self.allocator = allocator
        self.take = take or allocator.take
        self._block_size = block_size
        self._sink_blocks = -(-policy.sink // block_size)

    def are_cold(self, seq_lens: np.ndarray, width: int) -> np.ndarray:
        """Which blocks rows of these lengths read as codes, bool `[num_rows, width]`."""
        block = np.arange(width)[None]
        last = np.maximum(seq_lens - self.policy.window, 0) // self._block_size
        return (block >= self._sink_blocks) & (block < last[:, None])
