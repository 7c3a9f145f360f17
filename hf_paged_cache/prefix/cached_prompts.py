"""What a store has cached, by model and salt: trees of tokens, with names in the place of those of images."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hf_paged_cache.errors import OutOfBlocksError
from hf_paged_cache.groups import LayerGroup
from hf_paged_cache.prefix.cached_blocks import CachedBlocks
from hf_paged_cache.prefix.extra_keys import Name, Names, Spans, before_unknown, real_tokens
from hf_paged_cache.prefix.identity import Identity, Namespace
from hf_paged_cache.prefix.prompts import Prompts
from hf_paged_cache.prefix.requests import Request
from hf_paged_cache.prefix.saved_blocks import HeldBlocks
from hf_paged_cache.prefix.store_file import StoreFile
from hf_paged_cache.prefix.store_stats import CachedNode
from hf_paged_cache.prefix.tree import Match, PrefixNode, tokens_of


class HeldPrompts(NamedTuple):
    """What one model has committed, held so that it can be saved.

    Attributes:
        blocks: its blocks.
        salts: the salt of each tree.
        names: what numbers below zero stand for.
    """

    blocks: HeldBlocks
    salts: list[str | None]
    names: Mapping[int, Name]


class CachedPrompts:
    """The prompts and answers that a store has cached. Whoever calls a method holds the lock of the pools.

    Args:
        blocks: what keeps their blocks.

    Attributes:
        trees: the prefix tree of each namespace.
        names: of what tokens stand for.
    """

    def __init__(self, blocks: CachedBlocks) -> None:
        self.trees: dict[Namespace, PrefixNode] = {}
        self.names = Names()
        self._blocks = blocks

    def match(self, namespace: Namespace, prompts: Prompts) -> list[Match]:
        """What is cached of each row of a batch."""
        tree = self._tree(namespace)
        named = (self.names.named(*row) for row in zip(prompts.rows, prompts.spans, strict=True))
        return [self._blocks.index.match(tree, tokens) for tokens in named]

    def begin(
        self, groups: Sequence[LayerGroup], request: Request, matches: Sequence[Match]
    ) -> tuple[int, np.ndarray, str]:
        """Lets the groups of an empty cache begin with what is cached of the prompts.

        Returns:
            How many columns that is; how many of them are padding in each row, int32 `[num_rows]`; and in words why
            something that is cached is left out, if it is.
        """
        num_columns, why = self._columns(request, matches), ""
        try:
            padding = self._adopt(groups, request.prompts, matches, num_columns)
        except OutOfBlocksError:
            why = "there is no room for what would have to be read from the file"
            num_columns = self._columns(request, matches, in_memory=True)
            padding = self._adopt(groups, request.prompts, matches, num_columns)
        return num_columns, padding, why

    def add(
        self,
        groups: Sequence[LayerGroup],
        namespace: Namespace,
        rows: Sequence[np.ndarray],
        spans: Sequence[Spans],
        placeholders: Sequence[int],
    ) -> int:
        """Caches rows, each up to the first token that stands for something nobody has named.

        Args:
            groups: of the cache.
            namespace: under which they are found.
            rows: int64 `[n]`, the first tokens that each row holds.
            spans: of each row, what some of them stand for.
            placeholders: tokens that always stand for something.

        Returns:
            Tokens of all rows that are cached now.
        """
        tree, num_tokens = self._tree(namespace), 0
        for row, (tokens, named_spans) in enumerate(zip(rows, spans, strict=True)):
            named = self.names.learn(before_unknown(tokens, named_spans, placeholders), named_spans)
            if len(named):
                self._blocks.add(groups, row, tree, named)
            num_tokens += len(named)
        self._blocks.let_go_of_past(groups)
        if self.names.may_be_unused:
            self.names.keep(self._blocks.names_under(self.trees.values()))
        return num_tokens

    def nodes(self) -> list[CachedNode]:
        """What is cached, block by block: parents come first."""
        nodes: list[CachedNode] = []
        for namespace, root in self.trees.items():
            places: dict[PrefixNode | None, int | None] = {root: None}
            for node in self._blocks.index.nodes_after(root):
                places[node] = len(nodes)
                tokens, keys = real_tokens(tokens_of(node.key), self.names)
                is_held = self._blocks.is_held(node)
                nodes.append(CachedNode(tokens, places[node.parent], is_held, namespace.salt, keys))
        return nodes

    def clear(self) -> None:
        """Forgets everything. Blocks that caches hold stay theirs."""
        for root in self.trees.values():
            self._blocks.remove(root)
        self.trees.clear()
        self.names = Names()
        self._blocks.detach()

    def hold(self, identity: Identity) -> HeldPrompts:
        """Holds what a model has committed."""
        trees = {space: root for space, root in self.trees.items() if space.identity == identity}
        used = self._blocks.names_under(trees.values())
        names = {number: name for number, name in self.names.items() if number in used}
        return HeldPrompts(self._blocks.hold(list(trees.values())), [space.salt for space in trees], names)

    def attach(self, file: StoreFile, identity: Identity, device_of: Callable[[int], torch.device]) -> None:
        """Adds what a file of the model has, see `CachedBlocks.attach`."""
        self.trees = {Namespace(identity, salt): self._blocks.index.new_root() for salt in file.salts}
        self.names = Names(file.names.items())
        self._blocks.attach(file, list(self.trees.values()), device_of)

    def _columns(self, request: Request, matches: Sequence[Match], *, in_memory: bool = False) -> int:
        """How many columns a cache is to begin with."""
        num_cached = self._blocks.common_columns(request.prompts, matches, in_memory=in_memory)
        limit = request.columns_to_begin_with(num_cached)
        if limit == num_cached:
            return num_cached
        return self._blocks.common_columns(request.prompts, matches, limit, in_memory=in_memory)

    def _adopt(
        self, groups: Sequence[LayerGroup], prompts: Prompts, matches: Sequence[Match], num_columns: int
    ) -> np.ndarray:
        """Lets the groups begin with the first columns; how many of them are padding in each row."""
        padding = np.minimum(prompts.padding, num_columns).astype(np.int32)
        if num_columns:
            self._blocks.begin(groups, matches, num_columns, padding)
        return padding

    def _tree(self, namespace: Namespace) -> PrefixNode:
        if namespace not in self.trees:
            self.trees = {other: root for other, root in self.trees.items() if root.children is not None}
            self.trees[namespace] = self._blocks.index.new_root()
        return self.trees[namespace]
