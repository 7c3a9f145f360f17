"""What a cache holds, in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_paged_cache.blocks.tables import BlockTable
from hf_paged_cache.groups import LayerGroup
from hf_paged_cache.memory.budget import MemoryBudget
from hf_paged_cache.provenance import Provenance


@dataclass(frozen=True)
class CacheStats:
    """A snapshot of a cache. Blocks and bytes are of its pools, which its forks share.

    Attributes:
        rows: sequences of this cache.
        tokens: columns that every row has, padding included (`get_seq_length`).
        block_size: tokens a block.
        blocks_total: blocks of all layer groups, null blocks left out. Exact blocks, which codecs that quantize whole
            blocks have besides, are counted in bytes only.
        blocks_used: blocks that some row holds, also of a fork.
        blocks_free: blocks that hold nothing.
        blocks_evictable: cached blocks that no row holds.
        bytes_allocated: bytes of the tensors.
        bytes_used: bytes of the used blocks.
        bytes_peak: most bytes that were allocated at one time, copies made while growing included.
        tail_waste_bytes: bytes of this cache's used blocks in which no token of its rows lies.
        copies: blocks copied because a row wrote into a block that others hold (copy-on-write).
        reclaimed_blocks: evictable blocks that were taken back.
        tokens_quantized: tokens in used blocks that this cache's rows read as codes, in all layer groups; one that
            several rows share counts once.
        reused_tokens: tokens of all rows that came from a `BlockStore`, and were not computed for this cache.
        why: what kept the store from giving more of what it may know, in words; empty if nothing did.
    """

    rows: int
    tokens: int
    block_size: int
    blocks_total: int
    blocks_used: int
    blocks_free: int
    blocks_evictable: int
    bytes_allocated: int
    bytes_used: int
    bytes_peak: int
    tail_waste_bytes: int
    copies: int
    reclaimed_blocks: int
    tokens_quantized: int
    reused_tokens: int
    why: str


def collect(
    groups: Sequence[LayerGroup],
    lead: BlockTable | None,
    block_size: int,
    budget: MemoryBudget,
    provenance: Provenance | None,
) -> CacheStats:
    """The numbers of a cache with these groups, whose rows and columns are those of the table `lead`."""
    pools = {id(group.pool): group.pool for group in groups}.values()
    exact_pools = [pool.exact_pool for pool in pools if pool.exact_pool is not None]
    allocators = [pool.allocator for pool in pools]
    return CacheStats(
        rows=lead.num_rows if lead else 0,
        tokens=lead.num_columns if lead else 0,
        block_size=block_size,
        blocks_total=sum(allocator.num_blocks - 1 for allocator in allocators),
        blocks_used=sum(allocator.num_referenced for allocator in allocators),
        blocks_free=sum(allocator.num_free for allocator in allocators),
        blocks_evictable=sum(allocator.num_evictable for allocator in allocators),
        bytes_allocated=sum(pool.num_bytes for pool in (*pools, *exact_pools)),
        bytes_used=sum(pool.allocator.num_referenced * pool.block_bytes for pool in (*pools, *exact_pools)),
        bytes_peak=budget.peak,
        tail_waste_bytes=sum(group.table.wasted_slots * group.pool.block_bytes // block_size for group in groups),
        copies=sum(pool.copies for pool in pools),
        reclaimed_blocks=sum(allocator.reclaimed_blocks for allocator in allocators),
        tokens_quantized=sum(group.table.num_quantized_tokens for group in groups if group.pool.is_quantized),
        reused_tokens=provenance.reused_tokens if provenance else 0,
        why=provenance.why if provenance else "",
    )


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` for a person: `"1.5 MiB"`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
