"""Cached blocks: the prefix index over the pools of all layer groups."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from hf_paged_cache.blocks.allocator import BlockAllocator, Clock
from hf_paged_cache.groups import LayerGroup
from hf_paged_cache.memory.group_pool import GroupPool
from hf_paged_cache.prefix.prompts import Prompts
from hf_paged_cache.prefix.saved_blocks import HeldBlocks, SavedBlocks
from hf_paged_cache.prefix.store_file import StoreFile
from hf_paged_cache.prefix.tree import Match, PrefixIndex, PrefixNode, tokens_of


class _Kinds(NamedTuple):
    """The kinds of blocks that a node has in a layer group.

    Attributes:
        block: its block.
        exact: its exact block; `None` where a codec has none.
        window: tokens that the layers look back; `None` for all.
    """

    block: int
    exact: int | None
    window: int | None


class CachedBlocks:
    """Keeps blocks when rows let go of them, and finds them again by their tokens.

    Whoever calls a method holds the lock of the pools.

    Args:
        groups: the layer groups of an empty cache, whose pools hold the blocks.
        block_size: tokens a block.

    Attributes:
        index: the nodes and their blocks.
    """

    def __init__(self, groups: Sequence[LayerGroup], block_size: int) -> None:
        self._block_size = block_size
        self._pools: list[GroupPool] = []
        self._groups: list[_Kinds] = []
        for group in groups:
            pools = [pool for pool in (group.pool, group.pool.exact_pool) if pool is not None]
            first = len(self._pools)
            self._groups.append(_Kinds(first, first + 1 if len(pools) > 1 else None, group.table.window))
            self._pools += pools
        required = [kinds.block for kinds in self._groups if kinds.window is None]
        self.index = PrefixIndex(block_size, len(self._pools), required)
        self._saved: SavedBlocks | None = None
        clock = Clock()
        for kind, allocator in enumerate(self.allocators):
            allocator.on_evict = _Forget(self, kind)
            allocator.clock = clock

    @property
    def allocators(self) -> list[BlockAllocator]:
        """Of each kind of block."""
        return [pool.allocator for pool in self._pools]

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached blocks."""
        return sum(pool.allocator.num_cached * pool.block_bytes for pool in self._pools)

    def common_columns(
        self, prompts: Prompts, matches: Sequence[Match], limit: int | None = None, *, in_memory: bool = False
    ) -> int:
        """The last column up to which all rows are cached, and which cuts no image. The last column of the prompts is
        left to `generate`.

        Args:
            prompts: the prompts.
            matches: what is cached of each row; none for nothing.
            limit: columns that it may be at most.
            in_memory: leave out what would have to be read from a file first.
        """
        if not matches:
            return 0
        num_columns, wanted = prompts.num_columns - 1, None
        num_columns = num_columns if limit is None else min(num_columns, limit)
        while num_columns != wanted:
            wanted = num_columns
            for row, (match, pad) in enumerate(zip(matches, prompts.padding.tolist(), strict=True)):
                if pad < num_columns:
                    usable = self.usable_tokens(match, num_columns - pad, in_memory=in_memory)
                    num_columns = pad + prompts.uncut(row, usable)
        return num_columns if any(pad < num_columns for pad in prompts.padding.tolist()) else 0

    def usable_tokens(self, match: Match, limit: int, *, in_memory: bool = False) -> int:
        """The most tokens of a match, up to `limit`, after which every layer group has what a next token reads.

        With `in_memory`, without what would have to be read from a file first.
        """
        length = min(match.num_tokens, limit)
        while length > 0:
            readable = min(self._readable_tokens(kinds, match.nodes, length, in_memory) for kinds in self._groups)
            if readable == length:
                return length
            length = readable
        return 0

    def begin(
        self, groups: Sequence[LayerGroup], matches: Sequence[Match], num_columns: int, padding: np.ndarray
    ) -> None:
        """Lets the groups of an empty cache begin with cached blocks.

        Args:
            groups: of a cache on the same pools.
            matches: of each row; `usable_tokens` allows its part of `num_columns`.
            num_columns: columns that all rows have then.
            padding: int32 `[num_rows]`, leading columns of each row that are not tokens, at most `num_columns`.

        Raises:
            OutOfBlocksError: there is no room for what has to be read from a file. The cache is still empty.
            StoreFileError: the model computes keys of another dtype or shape than the file has.
        """
        lengths = num_columns - padding
        width = max(1, -(-int(lengths.max()) // self._block_size))
        rows = [
            match.nodes[: -(-length // self._block_size)]
            for match, length in zip(matches, lengths.tolist(), strict=True)
        ]
        is_read = np.zeros((len(self._pools), len(rows), width), dtype=bool)
        block = np.arange(width)[None]
        for kinds, group in zip(self._groups, groups, strict=True):
            first = np.array([self._first_block(kinds, length) for length in lengths.tolist()])
            is_read[kinds.block] = (block >= first[:, None]) & (block * self._block_size < lengths[:, None])
            if kinds.exact is not None:
                is_read[kinds.exact] = is_read[kinds.block] & ~group.table.exact_blocks.are_quantized(lengths, width)
        with self._in_memory(rows, is_read):
            tables = np.zeros(is_read.shape, dtype=np.int32)
            for row, nodes in enumerate(rows):
                if nodes:
                    tables[:, row, : len(nodes)] = np.array([node.blocks for node in nodes]).T
            tables[~is_read] = 0
            changes = []
            for kinds, group in zip(self._groups, groups, strict=True):
                exact_ids = None if kinds.exact is None else tables[kinds.exact]
                changes += group.adopted(num_columns, padding, tables[kinds.block], exact_ids)
            ledger = self._pools[0].ledger
            with ledger:
                ledger.commit(changes)

    def add(self, groups: Sequence[LayerGroup], row: int, root: PrefixNode, tokens: np.ndarray) -> None:
        """Caches the blocks of a row.

        Codecs that quantize whole blocks make the codes of full ones here. Where other blocks are cached for the same
        tokens, the row holds those from now on. So no node is given up while one after it is held.

        Args:
            groups: of a cache on the same pools.
            row: the row.
            root: the tree to add to.
            tokens: int `[n]`, the first tokens that the row holds.
        """
        num_nodes, num_full = -(-len(tokens) // self._block_size), len(tokens) // self._block_size
        blocks = np.zeros((len(self._pools), num_nodes), dtype=np.int64)
        for kinds, group in zip(self._groups, groups, strict=True):
            held = group.table.block_ids[row, :num_nodes]
            blocks[kinds.block, : len(held)] = held
            if kinds.exact is not None:
                exact = group.table.exact_blocks
                held = group.table.exact_ids[row, :num_nodes]
                blocks[kinds.exact, : len(held)] = held
                self._quantize(kinds, group, row, blocks[:, :num_full])
                # Who goes on from here reads codes of these, as the row does.
                is_quantized = exact.are_quantized(np.array([len(tokens)]), num_nodes)[0]
                blocks[kinds.exact, is_quantized] = 0
        added = self.index.insert(root, tokens, blocks)
        self._forget(added.dropped)
        for kind, block_id in added.taken:
            self.allocators[kind].mark_cached([block_id])
        for kinds, group in zip(self._groups, groups, strict=True):
            cached = np.array([node.block_of(kinds.block) for node in added.nodes[:num_full]], dtype=np.int32)
            own = blocks[kinds.block, :num_full]
            others = np.flatnonzero((cached != 0) & (own != 0) & (cached != own))
            if others.size:
                group.exchange((np.full_like(others, row), others), cached[others])

    def let_go_of_past(self, groups: Sequence[LayerGroup]) -> None:
        """Lets the rows of a cache give back what has left their windows, now that it is cached."""
        for group in groups:
            group.restrict_to_window()

    def _quantize(self, kinds: _Kinds, group: LayerGroup, row: int, blocks: np.ndarray) -> None:
        """Makes the codes of full blocks `[num_kinds, n]` of a row that are exact and not cached yet."""
        is_cached = [self.index.node_of(kinds.block, block_id) is not None for block_id in blocks[kinds.block].tolist()]
        exact = np.flatnonzero((blocks[kinds.exact] != 0) & ~np.array(is_cached, dtype=bool))
        group.quantize((np.full_like(exact, row), exact))

    def attach(self, file: StoreFile, roots: Sequence[PrefixNode], device_of: Callable[[int], torch.device]) -> None:
        """Adds what a file has. Its blocks are read when they are first wanted.

        Args:
            file: the file, of the same model.
            roots: an empty tree for each of its trees.
            device_of: where the keys of a layer are, by its index.

        Raises:
            StoreFileError: the file has other planes than the codecs of the layers.
        """
        self._saved = SavedBlocks(file, self._pools, self._kinds_of_blocks(), device_of)
        nodes: list[PrefixNode] = []
        saved = file.nodes
        columns = (saved.parent.tolist(), saved.tree.tolist(), saved.num_tokens.tolist())
        for place, (parent, tree, num_tokens) in enumerate(zip(*columns, strict=True)):
            node = roots[tree] if parent < 0 else nodes[parent]
            nodes.append(self.index.add_saved(node, saved.tokens[place, :num_tokens], place))

    def detach(self) -> None:
        """Lets go of the file, after all nodes were forgotten."""
        self._saved = None

    def hold(self, roots: Sequence[PrefixNode]) -> HeldBlocks:
        """Holds all blocks under some roots, so that they can be saved without the lock.

        Raises:
            StoreFileError: the model computes keys of another dtype or shape than the file has that blocks are in.
        """
        return HeldBlocks(self.index, roots, self._pools, self._kinds_of_blocks(), self._saved)

    def names_under(self, roots: Iterable[PrefixNode]) -> set[int]:
        """The numbers below zero that stand for names in the nodes under some roots."""
        keys = b"".join(node.key for root in roots for node in self.index.nodes_after(root))
        tokens = tokens_of(keys)
        return set(tokens[tokens < 0].tolist())

    def is_held(self, node: PrefixNode) -> bool:
        """Whether some row holds a block of a node."""
        return any(
            block_id and allocator.references(np.array(block_id)) > 0
            for block_id, allocator in zip(node.blocks, self.allocators, strict=True)
        )

    def remove(self, node: PrefixNode) -> None:
        """Forgets a node and all that follow it; of a root, all that follow it."""
        self._forget(self.index.remove(node))

    def evict(self, num_bytes: int) -> int:
        """Forgets what was let go of longest ago, of all layers, until so many bytes of blocks are free for others.

        Returns:
            Bytes that have become free; fewer than asked for if rows hold the rest.
        """
        before = self._free_bytes()
        while (freed := self._free_bytes() - before) < num_bytes:
            evictable = [allocator for allocator in self.allocators if allocator.num_evictable]
            if not evictable:
                break
            min(evictable, key=lambda allocator: allocator.oldest).evict()
        return freed

    def _free_bytes(self) -> int:
        return sum(pool.allocator.num_free * pool.block_bytes for pool in self._pools)

    def _first_block(self, kinds: _Kinds, length: int) -> int:
        """The first block that a token after `length` others reads in a group."""
        return 0 if kinds.window is None else max(length - kinds.window + 1, 0) // self._block_size

    def _readable_tokens(self, kinds: _Kinds, nodes: Sequence[PrefixNode], length: int, in_memory: bool) -> int:
        """`length`, or how many tokens come before the last block that a group lacks for it."""
        for block in range((length - 1) // self._block_size, self._first_block(kinds, length) - 1, -1):
            if not self._has(kinds, nodes[block], in_memory):
                return block * self._block_size
        return length

    def _has(self, kinds: _Kinds, node: PrefixNode, in_memory: bool) -> bool:
        """Whether a group can read a node. Codes are made of full blocks only, so others need an exact block."""
        is_readable = kinds.exact is None or node.num_tokens == self._block_size
        is_readable = is_readable or self._is_cached(kinds.exact, node, in_memory)
        return is_readable and self._is_cached(kinds.block, node, in_memory)

    def _is_cached(self, kind: int, node: PrefixNode, in_memory: bool) -> bool:
        """Whether a node has a block of a kind: in memory, or also in the file."""
        return node.block_of(kind) != 0 or (not in_memory and self._is_saved(kind, node))

    @contextmanager
    def _in_memory(self, rows: Sequence[Sequence[PrefixNode]], is_read: np.ndarray) -> Iterator[None]:
        """Has blocks in memory, read from the file if need be, and holds them meanwhile.

        Args:
            rows: nodes of each row.
            is_read: bool `[kinds, num_rows, width]`, their blocks that are wanted, as far as they are cached.

        Raises:
            OutOfBlocksError: there is no room.
        """
        held: list[tuple[BlockAllocator, np.ndarray]] = []
        try:
            missing = []
            # What is there is held first, so that room for the rest is not made by giving it up.
            for kind, allocator in enumerate(self.allocators):
                wanted = zip(rows, is_read[kind], strict=True)
                nodes = dict.fromkeys(nodes[place] for nodes, read in wanted for place in np.flatnonzero(read).tolist())
                present = np.array([node.block_of(kind) for node in nodes], dtype=np.int32)
                allocator.acquire(present)
                held.append((allocator, present))
                missing.append([node for node in nodes if not node.block_of(kind) and self._is_saved(kind, node)])
            if any(missing):
                self._read_in(missing, held)
            yield
        finally:
            for allocator, block_ids in held:
                allocator.release(block_ids)

    def _read_in(self, missing: Sequence[Sequence[PrefixNode]], held: list[tuple[BlockAllocator, np.ndarray]]) -> None:
        """Reads the blocks of the nodes in `missing`, for each kind, and adds them to what is held."""
        self._saved.make_layers()
        taken: dict[int, np.ndarray] = {}
        for kind in reversed(range(len(self._pools))):  # exact blocks first, as where rows grow
            if missing[kind]:
                taken[kind] = self._pools[kind].allocate(len(missing[kind]))
                held.append((self.allocators[kind], taken[kind]))
        for kind, block_ids in taken.items():
            self._saved.read(kind, missing[kind], block_ids)
        # Cached only now: after a failure they are free blocks.
        for kind, block_ids in taken.items():
            for node, block_id in zip(missing[kind], block_ids.tolist(), strict=True):
                self.index.set_block(node, kind, block_id)
            self.allocators[kind].mark_cached(block_ids.tolist())

    def _is_saved(self, kind: int, node: PrefixNode) -> bool:
        """Whether a node has a block of a kind in the file."""
        return self._saved is not None and self._saved.places(node)[kind] >= 0

    def _kinds_of_blocks(self) -> list[tuple[int | None, bool]]:
        """For each kind the window of its layers, and whether it is the exact one."""
        return [
            (kinds.window, is_exact)
            for kinds in self._groups
            for is_exact in ((False,) if kinds.exact is None else (False, True))
        ]

    def _forget(self, blocks: Sequence[tuple[int, int]]) -> None:
        for kind, block_id in blocks:
            self.allocators[kind].forget([block_id])


class _Forget:
    """What an allocator calls when it takes back a block.

    It knows the index weakly, so that a store that is given up does not stay because of its pools.
    """

    def __init__(self, cached: CachedBlocks, kind: int) -> None:
        self._cached = weakref.ref(cached)
        self._kind = kind

    def __call__(self, block_id: int) -> None:
        cached = self._cached()
        if cached is not None:
            cached._forget(cached.index.remove_block(self._kind, block_id))
