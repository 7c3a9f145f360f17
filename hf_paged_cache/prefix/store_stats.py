"""What a `BlockStore` holds, and what it was asked for, in numbers."""

from dataclasses import dataclass

import numpy as np

from hf_paged_cache.prefix.prompts import Prompts
from hf_paged_cache.prefix.provenance import StoreProvenance


@dataclass(frozen=True, eq=False)
class CachedNode:
    """Tokens of one cached block.

    Attributes:
        tokens: int64 `[n]`.
        parent: place in the list of the node before it; `None` at the beginning of a prompt.
        is_held: whether a cache, a session or a pin holds its block, so that it is not given up.
        salt: under which it is found.
        extra_keys: keys of what some of the tokens stand for, such as images.
    """

    tokens: np.ndarray
    parent: int | None
    is_held: bool
    salt: str | None
    extra_keys: tuple[str, ...]


@dataclass(frozen=True)
class StoreStats:
    """A snapshot of a store.

    Attributes:
        lookups: prompts that were looked up, each row of a batch by itself.
        lookup_tokens: tokens of them.
        hit_tokens: those that were not computed, as they were cached, or shared with another row.
        hit_ratio: `hit_tokens / lookup_tokens`.
        committed_tokens: tokens that `commit` was given.
        nodes: nodes of up to `block_size` tokens, those in a file included.
        blocks_cached: cached blocks in memory, exact ones included.
        bytes_cached: bytes of those.
        bytes_allocated: bytes of the pools.
        reclaimed_blocks: blocks that were given up for others.
        copies: blocks that were copied because a cache wrote into one that is cached or shared.
        why: why nothing is ever reused with this model; empty if it is.
    """

    lookups: int
    lookup_tokens: int
    hit_tokens: int
    hit_ratio: float
    committed_tokens: int
    nodes: int
    blocks_cached: int
    bytes_cached: int
    bytes_allocated: int
    reclaimed_blocks: int
    copies: int
    why: str


@dataclass
class Counts:
    """What a store was asked for, see `StoreStats`."""

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    committed_tokens: int = 0

    def add_lookup(self, prompts: Prompts, provenance: StoreProvenance) -> None:
        """Counts the prompts that a cache was made for."""
        self.lookups += len(prompts.rows)
        self.lookup_tokens += sum(len(tokens) for tokens in prompts.rows)
        self.hit_tokens += provenance.reused_tokens
