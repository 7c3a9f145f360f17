"""The prefix index: which token runs have keys and values in which blocks. It knows tokens and block ids, no tensors.

A radix tree. A node is a run of one block's tokens that follows the runs of its parents, and is found by those tokens
themselves, so no collision of hashes can serve a wrong block:

    root -- [The cat sat on] -- [the mat and saw] -- [the dog]        block_size = 4
                             \\- [the hat of my aunt ..

Only runs of `block_size` tokens have children. A shorter one, the end of what was known when it came, gives way to a
longer one that begins with it.
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
    """A run of tokens, and its blocks.

    Attributes:
        parent: the run before; `None` for a root.
        run: its tokens, `TOKEN_BYTES` each.
        blocks: for each kind of block its id; 0 where there is none.
        children: the runs after; in a form of its own, as most nodes have one.
        saved: place of its blocks in a file that they can be read from; -1 for none.
    """

    # There are many nodes, and one number takes a third of what a tuple of ids and a slot for the place do.
    __slots__ = ("_numbers", "children", "parent", "run")

    def __init__(self, parent: "PrefixNode | None", run: bytes, num_kinds: int) -> None:
        self.parent = parent
        self.run = run
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
        return len(self.run) // TOKEN_BYTES

    def child(self, run: bytes) -> "PrefixNode | None":
        """The child with exactly this run."""
        children = self.children
        if isinstance(children, _Children):
            return children.by_run.get(run)
        return children if children is not None and children.run == run else None

    def nearest(self, run: bytes) -> "tuple[PrefixNode | None, int]":
        """The child that shares the longest beginning with `run`, and how many tokens that is."""
        best, most = None, 0
        for child in self._neighbours(run):
            common = _common_tokens(child.run, run)
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
            if len(self.children.runs) == 1:
                self.children = self.children.by_run[self.children.runs[0]]
        else:
            self.children = None

    def __iter__(self) -> Iterator["PrefixNode"]:
        """The children, in the order of their tokens."""
        if isinstance(self.children, _Children):
            yield from (self.children.by_run[run] for run in self.children.runs)
        elif self.children is not None:
            yield self.children

    def _neighbours(self, run: bytes) -> "list[PrefixNode]":
        """The children next to `run` in the order of tokens; one of them shares the longest beginning."""
        children = self.children
        if not isinstance(children, _Children):
            return [] if children is None else [children]
        place = bisect_left(children.runs, run)
        return [children.by_run[near] for near in children.runs[max(place - 1, 0) : place + 1]]


class _Children:
    """Several children: by their runs, and in the order of their tokens."""

    __slots__ = ("by_run", "runs")

    def __init__(self, first: PrefixNode) -> None:
        self.by_run = {first.run: first}
        self.runs = [first.run]

    def add(self, child: PrefixNode) -> None:
        self.by_run[child.run] = child
        insort(self.runs, child.run)

    def remove(self, child: PrefixNode) -> None:
        del self.by_run[child.run]
        del self.runs[bisect_left(self.runs, child.run)]


class Match(NamedTuple):
    """What is known of a sequence of tokens.

    Attributes:
        nodes: the runs that it begins with. The last one may have more tokens than it shares with the sequence.
        num_tokens: tokens that are shared.
    """

    nodes: list[PrefixNode]
    num_tokens: int


class Insertion(NamedTuple):
    """What inserting a sequence has changed.

    Attributes:
        nodes: its runs.
        taken: `(kind, block id)` of the blocks that are in the index since.
        dropped: those that are not any more, as a longer run took their place.
    """

    nodes: list[PrefixNode]
    taken: list[tuple[int, int]]
    dropped: list[tuple[int, int]]


class PrefixIndex:
    """Token runs and their blocks.

    A run has a block of each kind: in every layer group one, and an exact one besides where a codec has those.

    Args:
        block_size: tokens a run.
        num_kinds: kinds of blocks.
        required: kinds without which a run, and all that follow it, cannot be read. Of others there may be blocks of
            some runs only: those of a window, say.
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
        """The longest beginning of `tokens`, int `[n]`, that is known under `root`."""
        data, run_bytes = _as_bytes(tokens), self.block_size * TOKEN_BYTES
        nodes, node, start = [], root, 0
        while (child := node.child(data[start : start + run_bytes])) is not None:
            nodes.append(child)
            node, start = child, start + len(child.run)
        nearest, common = node.nearest(data[start : start + run_bytes])
        if nearest is not None:
            nodes.append(nearest)
        return Match(nodes, start // TOKEN_BYTES + common)

    def insert(self, root: PrefixNode, tokens: np.ndarray, blocks: np.ndarray) -> Insertion:
        """Makes the runs of a sequence known. Blocks that are known for them already stay.

        Args:
            root: the beginning of the tree.
            tokens: int `[n]`.
            blocks: int `[num_kinds, ceil(n / block_size)]`, the blocks of its runs; 0 for none.
        """
        data, run_bytes = _as_bytes(tokens), self.block_size * TOKEN_BYTES
        result, node = Insertion([], [], []), root
        for start, own in zip(range(0, len(data), run_bytes), blocks.T.tolist(), strict=True):
            run = data[start : start + run_bytes]
            node = node.child(run) or self._grown(node, run, result) or self._new(node, run)
            for kind, block_id in enumerate(own):
                # What a longer run has is known of it; what a shorter one has is its own.
                if block_id and not node.block_of(kind) and len(node.run) == len(run):
                    self.set_block(node, kind, block_id)
                    result.taken.append((kind, block_id))
            result.nodes.append(node)
        return result

    def node_of(self, kind: int, block_id: int) -> PrefixNode | None:
        """The run whose block this is."""
        nodes = self._nodes[kind]
        return nodes[block_id] if block_id < len(nodes) else None

    def set_block(self, node: PrefixNode, kind: int, block_id: int) -> None:
        """Gives a run a block of a kind that it has none of."""
        node.set_block(kind, block_id)
        nodes = self._nodes[kind]
        if block_id >= len(nodes):
            nodes.extend([None] * (block_id + 1 - len(nodes)))
        nodes[block_id] = node

    def add_saved(self, parent: PrefixNode, tokens: np.ndarray, place: int) -> PrefixNode:
        """Makes a run known that is in a file, at this place, after `parent`: int `[n]` tokens, new to it."""
        node = self._new(parent, _as_bytes(tokens))
        node.saved = place
        return node

    def runs_after(self, root: PrefixNode) -> Iterator[PrefixNode]:
        """All runs of a tree, each after the one that it follows, and those of a branch one after the other."""
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
        """Forgets a run and all that follow it; for a root, only those.

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

    def _new(self, parent: PrefixNode, run: bytes) -> PrefixNode:
        node = PrefixNode(parent, run, self._num_kinds)
        parent.add(node)
        self.num_nodes += 1
        return node

    def _grown(self, parent: PrefixNode, run: bytes, result: Insertion) -> PrefixNode | None:
        """The child that `run` continues, or that continues `run`; `None` if there is none."""
        nearest, common = parent.nearest(run)
        if nearest is None or common * TOKEN_BYTES not in (len(nearest.run), len(run)):
            return None
        if len(nearest.run) < len(run):
            result.dropped.extend(self._drop_blocks(nearest))
            parent.remove(nearest)
            nearest.run, nearest.saved = run, -1
            parent.add(nearest)
        return nearest

    def _prune(self, node: PrefixNode) -> None:
        """Removes runs at the end of a branch that have nothing left."""
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


def tokens_of(run: bytes) -> np.ndarray:
    """The tokens of a run, int64 `[num_tokens]`."""
    return np.frombuffer(run, dtype=_TOKEN).astype(np.int64)


def _common_tokens(first: bytes, second: bytes) -> int:
    """Tokens that both begin with."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length // TOKEN_BYTES
    differ = np.frombuffer(first, np.uint8, length) != np.frombuffer(second, np.uint8, length)
    return int(differ.argmax()) // TOKEN_BYTES
