"""The prefix index: which blocks hold the keys and values of which tokens. It knows tokens and block ids, no tensors.

A radix tree. The key of a node is the tokens of one block, which follow those of its parents. Nodes are found by these
tokens themselves, so no collision of hashes can serve a wrong block:

    root -- [The cat sat on] -- [the mat and saw] -- [the dog]        block_size = 4
                             \\- [the hat of my aunt ..

Only nodes of `block_size` tokens have children. A shorter node ends what was cached when it came. It gives way to a
longer one that begins with its tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

TOKEN_BYTES = 4

# Big-endian, so that the order of the bytes is that of the tokens, and equal beginnings stand next to each other.
_TOKEN = np.dtype(">i4")


# Of the numbers of a node, from the lowest bits on: how many kinds of blocks there are, their ids, place + 1.
_COUNT_BITS, _NUMBER_BITS = 8, 32
_COUNT, _NUMBER = 2**_COUNT_BITS - 1, 2**_NUMBER_BITS - 1


class PrefixNode:
    """Up to `block_size` tokens, and their blocks.

    Attributes:
        parent: the node before; `None` for a root.
        key: the tokens, `TOKEN_BYTES` each.
        blocks: for each kind of block its id; 0 where there is none.
        children: the nodes after. Most nodes have one, which stands here itself.
        saved: place of its blocks in a file that they can be read from; -1 for none.
    """

    # There are many nodes, and one number takes a third of what a tuple of ids and a slot for the place do.
    __slots__ = ("_numbers", "children", "key", "parent")

    def __init__(self, parent: "PrefixNode | None", key: bytes, num_kinds: int) -> None:
        self.parent = parent
        self.key = key
        self.children: PrefixNode | _Children | None = None
        self._numbers = num_kinds  # without blocks, and in no file

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(self.block_of(kind) for kind in range(self._numbers & _COUNT))

    def block_of(self, kind: int) -> int:
        """The block of one kind; 0 if there is none."""
        return self._numbers >> _COUNT_BITS + _NUMBER_BITS * kind & _NUMBER

    def set_block(self, kind: int, block_id: int) -> None:
        """Changes the block of one kind."""
        shift = _COUNT_BITS + _NUMBER_BITS * kind
        self._numbers = self._numbers & ~(_NUMBER << shift) | block_id << shift

    @property
    def saved(self) -> int:
        return (self._numbers >> self._saved_shift) - 1

    @saved.setter
    def saved(self, place: int) -> None:
        shift = self._saved_shift
        self._numbers = self._numbers & (1 << shift) - 1 | place + 1 << shift

    @property
    def _saved_shift(self) -> int:
        return _COUNT_BITS + _NUMBER_BITS * (self._numbers & _COUNT)

    @property
    def num_tokens(self) -> int:
        return len(self.key) // TOKEN_BYTES

    def child(self, key: bytes) -> "PrefixNode | None":
        """The child with exactly this key."""
        children = self.children
        if isinstance(children, _Children):
            return children.by_key.get(key)
        return children if children is not None and children.key == key else None

    def nearest(self, key: bytes) -> "tuple[PrefixNode | None, int]":
        """The child that shares the longest beginning with `key`, and how many tokens that is."""
        best, most = None, 0
        for child in self._neighbours(key):
            common = _common_tokens(child.key, key)
            if common > most:
                best, most = child, common
        return best, most

    def add(self, child: "PrefixNode") -> None:
        if self.children is None:
            self.children = child
        else:
            if not isinstance(self.children, _Children):
                self.children = _Children(self.children)
            self.children.add(child)

    def remove(self, child: "PrefixNode") -> None:
        if isinstance(self.children, _Children):
            self.children.remove(child)
            if len(self.children.keys) == 1:
                self.children = self.children.by_key[self.children.keys[0]]
        else:
            self.children = None

    def __iter__(self) -> Iterator["PrefixNode"]:
        """The children, in the order of their tokens."""
        if isinstance(self.children, _Children):
            yield from (self.children.by_key[key] for key in self.children.keys)
        elif self.children is not None:
            yield self.children

    def _neighbours(self, key: bytes) -> "list[PrefixNode]":
        """The children next to `key` in the order of tokens; one of them shares the longest beginning."""
        children = self.children
        if not isinstance(children, _Children):
            return [] if children is None else [children]
        place = bisect_left(children.keys, key)
        return [children.by_key[near] for near in children.keys[max(place - 1, 0) : place + 1]]


class _Children:
    """Several children: by their keys, and in the order of these."""

    __slots__ = ("by_key", "keys")

    def __init__(self, first: PrefixNode) -> None:
        self.by_key = {first.key: first}
        self.keys = [first.key]

    def add(self, child: PrefixNode) -> None:
        self.by_key[child.key] = child
        insort(self.keys, child.key)

    def remove(self, child: PrefixNode) -> None:
        del self.by_key[child.key]
        del self.keys[bisect_left(self.keys, child.key)]


class Match(NamedTuple):
    """What is cached of a sequence of tokens.

    Attributes:
        nodes: the nodes that it begins with. The last one may have more tokens than it shares with the sequence.
        num_tokens: tokens that are shared.
    """

    nodes: list[PrefixNode]
    num_tokens: int


class Insertion(NamedTuple):
    """What inserting a sequence has changed.

    Attributes:
        nodes: those of the sequence.
        taken: `(kind, block id)` of the blocks that are in the index since.
        dropped: those that are not any more, as a longer node took their place.
    """

    nodes: list[PrefixNode]
    taken: list[tuple[int, int]]
    dropped: list[tuple[int, int]]


class PrefixIndex:
    """Trees of tokens and their blocks.

    A node has a block of each kind: one in every layer group, and an exact one besides where a codec has those.

    Args:
        block_size: tokens a node, at most.
        num_kinds: kinds of blocks.
        required: kinds without which a node, and all that follow it, cannot be read. Of other kinds only some nodes
            may have blocks: those within a window, say.
    """

    def __init__(self, block_size: int, num_kinds: int, required: Sequence[int]) -> None:
        self.block_size = block_size
        self.num_nodes = 0
        self._required = frozenset(required)
        # By kind and block id.
        self._nodes: list[list[PrefixNode | None]] = [[] for _ in range(num_kinds)]
        self._num_kinds = num_kinds

    def new_root(self) -> PrefixNode:
        """The beginning of a tree of its own."""
        return PrefixNode(None, b"", self._num_kinds)

    def match(self, root: PrefixNode, tokens: np.ndarray) -> Match:
        """The longest beginning of `tokens`, int `[n]`, that is cached under `root`."""
        data, key_bytes = _as_bytes(tokens), self.block_size * TOKEN_BYTES
        nodes, node, start = [], root, 0
        while (child := node.child(data[start : start + key_bytes])) is not None:
            nodes.append(child)
            node, start = child, start + len(child.key)
        nearest, common = node.nearest(data[start : start + key_bytes])
        if nearest is not None:
            nodes.append(nearest)
        return Match(nodes, start // TOKEN_BYTES + common)

    def insert(self, root: PrefixNode, tokens: np.ndarray, blocks: np.ndarray) -> Insertion:
        """Adds a sequence. A node that is there already keeps its blocks.

        Args:
            root: the beginning of the tree.
            tokens: int `[n]`.
            blocks: int `[num_kinds, ceil(n / block_size)]`, the blocks of its nodes; 0 for none.
        """
        data, key_bytes = _as_bytes(tokens), self.block_size * TOKEN_BYTES
        result, node = Insertion([], [], []), root
        for start, own in zip(range(0, len(data), key_bytes), blocks.T.tolist(), strict=True):
            key = data[start : start + key_bytes]
            node = node.child(key) or self._grown(node, key, result) or self._new(node, key)
            for kind, block_id in enumerate(own):
                # A node that is longer than what was asked for keeps its blocks to itself.
                if block_id and not node.block_of(kind) and len(node.key) == len(key):
                    self.set_block(node, kind, block_id)
                    result.taken.append((kind, block_id))
            result.nodes.append(node)
        return result

    def node_of(self, kind: int, block_id: int) -> PrefixNode | None:
        """The node whose block this is."""
        nodes = self._nodes[kind]
        return nodes[block_id] if block_id < len(nodes) else None

    def set_block(self, node: PrefixNode, kind: int, block_id: int) -> None:
        """Gives a node a block of a kind that it has none of."""
        node.set_block(kind, block_id)
        nodes = self._nodes[kind]
        if block_id >= len(nodes):
            nodes.extend([None] * (block_id + 1 - len(nodes)))
        nodes[block_id] = node

    def add_saved(self, parent: PrefixNode, tokens: np.ndarray, place: int) -> PrefixNode:
        """Adds a node after `parent` whose blocks are at a place in a file: int `[n]` tokens, new to `parent`."""
        node = self._new(parent, _as_bytes(tokens))
        node.saved = place
        return node

    def nodes_after(self, root: PrefixNode) -> Iterator[PrefixNode]:
        """All nodes of a tree, each after its parent, and those of a branch one after the other."""
        waiting = [*root][::-1]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend([*node][::-1])

    def remove_block(self, kind: int, block_id: int) -> list[tuple[int, int]]:
        """Forgets a block whose memory is wanted for something else.

        Returns:
            `(kind, block id)` of the others that nobody finds any more without it.
        """
        node = self.node_of(kind, block_id)
        if node is None:
            return []
        self._unregister(node, kind)
        # What is in a file can be read again.
        if node.saved < 0 and (kind in self._required or node.num_tokens < self.block_size):
            return self.remove(node)
        self._prune(node)
        return []

    def remove(self, node: PrefixNode) -> list[tuple[int, int]]:
        """Forgets a node and all that follow it; for a root, only those.

        Returns:
            `(kind, block id)` of their blocks.
        """
        dropped, waiting = [], [node]
        while waiting:
            gone = waiting.pop()
            waiting.extend(gone)
            dropped += self._drop_blocks(gone)
            gone.children = None
            self.num_nodes -= gone.parent is not None
        if node.parent is not None:
            node.parent.remove(node)
            self._prune(node.parent)
        return dropped

    def _new(self, parent: PrefixNode, key: bytes) -> PrefixNode:
        node = PrefixNode(parent, key, self._num_kinds)
        parent.add(node)
        self.num_nodes += 1
        return node

    def _grown(self, parent: PrefixNode, key: bytes, result: Insertion) -> PrefixNode | None:
        """The child that `key` continues, or that continues `key`; `None` if there is none."""
        nearest, common = parent.nearest(key)
        if nearest is None or common * TOKEN_BYTES not in (len(nearest.key), len(key)):
            return None
        if len(nearest.key) < len(key):
            result.dropped.extend(self._drop_blocks(nearest))
            parent.remove(nearest)
            nearest.key, nearest.saved = key, -1
            parent.add(nearest)
        return nearest

    def _prune(self, node: PrefixNode) -> None:
        """Removes nodes at the end of a branch that have nothing left."""
        while node.parent is not None and node.children is None and node.saved < 0 and not any(node.blocks):
            node.parent.remove(node)
            self.num_nodes -= 1
            node = node.parent

    def _unregister(self, node: PrefixNode, kind: int) -> None:
        self._nodes[kind][node.block_of(kind)] = None
        node.set_block(kind, 0)

    def _drop_blocks(self, node: PrefixNode) -> list[tuple[int, int]]:
        dropped = [(kind, block_id) for kind, block_id in enumerate(node.blocks) if block_id]
        for kind, _ in dropped:
            self._unregister(node, kind)
        return dropped


def _as_bytes(tokens: np.ndarray) -> bytes:
    return np.ascontiguousarray(tokens, dtype=_TOKEN).tobytes()


def tokens_of(key: bytes) -> np.ndarray:
    """The tokens of a key, int64 `[num_tokens]`."""
    return np.frombuffer(key, dtype=_TOKEN).astype(np.int64)


def _common_tokens(first: bytes, second: bytes) -> int:
    """Tokens that both begin with."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length // TOKEN_BYTES
    differ = np.frombuffer(first, np.uint8, length) != np.frombuffer(second, np.uint8, length)
    return int(differ.argmax()) // TOKEN_BYTES
