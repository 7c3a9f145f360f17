"""Block tables small enough to be read: blocks of 4 tokens, masks that are drawn."""

import numpy as np
from hf_paged_kernels import StepMetadata

from hf_paged_cache.blocks.allocator import BlockAllocator
from hf_paged_cache.blocks.exact import Moves
from hf_paged_cache.blocks.tables import BlockTable

SIZE = 4


def make_table(num_blocks: int = 100, window: int | None = None) -> tuple[BlockTable, BlockAllocator]:
    allocator = BlockAllocator(num_blocks + 1)
    return BlockTable(allocator, SIZE, window), allocator


def extend(
    table: BlockTable, num_rows: int, num_new: int, attended: np.ndarray | None = None, *, record_past: bool = False
) -> tuple[StepMetadata, Moves]:
    """Extends a table, and commits that at once; what is refused is taken back."""
    with table.ledger:
        extension = table.extend(num_rows, num_new, attended, record_past=record_past)
        table.commit(extension.state)
    return extension.step, extension.moves


def mask(*rows: str) -> np.ndarray:
    """The attention mask of new columns: `mask("..xx", "xxxx")`."""
    return np.array([[mark == "x" for mark in row] for row in rows])


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // SIZE)


def state(table: BlockTable) -> tuple:
    return (
        table.block_ids[:, : blocks_of(table.num_columns)].tolist(),
        table.padding.tolist(),
        table.num_columns,
        table.first_kept_column,
        table.generation,
    )


def slots(step: StepMetadata) -> list[list[int]]:
    return step.slots.tolist()
