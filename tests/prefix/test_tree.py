"""The prefix index: which tokens are cached, and in which blocks. Nodes of 4 tokens, ids that can be read."""

import random
import tracemalloc

import numpy as np
import pytest

from hf_paged_cache.prefix.tree import PrefixIndex, PrefixNode, tokens_of

SIZE = 4


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(SIZE, num_kinds=1, required=[0])


def add(index: PrefixIndex, root: PrefixNode, tokens: list[int], *blocks: int) -> tuple[list[int], list[int]]:
    """Makes tokens known in blocks; the ids that were taken, and those that were dropped."""
    added = index.insert(root, np.array(tokens), np.array([blocks]))
    return [block for _, block in added.taken], [block for _, block in added.dropped]


def found(index: PrefixIndex, root: PrefixNode, tokens: list[int]) -> tuple[list[int], int]:
    """The blocks of the runs that a sequence begins with, and the tokens shared."""
    match = index.match(root, np.array(tokens))
    return [node.blocks[0] for node in match.nodes], match.num_tokens


def test_the_longest_known_beginning_is_found_to_the_token(index):
    root = index.new_root()
    assert add(index, root, [1, 2, 3, 4, 5, 6, 7, 8, 9], 11, 12, 13) == ([11, 12, 13], [])

    assert found(index, root, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == ([11, 12, 13], 9)
    assert found(index, root, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == ([11, 12, 13], 9)
    assert found(index, root, [1, 2, 3, 4, 5, 6, 99]) == ([11, 12], 6)
    assert found(index, root, [1, 2, 3, 4]) == ([11], 4)
    assert found(index, root, [1, 2, 3]) == ([11], 3)
    assert found(index, root, [2, 2, 3, 4]) == ([], 0)
    assert found(index, root, []) == ([], 0)


def test_of_several_branches_the_one_that_shares_most_is_found(index):
    root = index.new_root()
    for block, last in enumerate(([5, 1, 1, 1], [5, 6, 1, 1], [5, 6, 7, 1], [5, 6, 7, 9], [300, 0, 0, 0]), 2):
        add(index, root, [1, 2, 3, 4, *last], 1, block)
    assert found(index, root, [1, 2, 3, 4, 5, 6, 7, 8]) == ([1, 4], 7)
    assert found(index, root, [1, 2, 3, 4, 5, 6, 0, 8]) == ([1, 3], 6)
    assert found(index, root, [1, 2, 3, 4, 300, 1]) == ([1, 6], 5)


def test_what_is_known_keeps_its_block(index):
    root = index.new_root()
    add(index, root, [1, 2, 3, 4, 5], 11, 12)
    assert add(index, root, [1, 2, 3, 4, 5], 21, 22) == ([], [])
    assert add(index, root, [1, 2, 3, 4, 5], 11, 12) == ([], [])
    assert found(index, root, [1, 2, 3, 4, 5]) == ([11, 12], 5)


def test_an_end_gives_way_to_a_longer_one_and_not_to_a_shorter(index):
    root = index.new_root()
    add(index, root, [1, 2, 3, 4, 5], 11, 12)
    assert add(index, root, [1, 2, 3, 4, 5, 6], 11, 22) == ([22], [12])
    assert add(index, root, [1, 2, 3, 4, 5], 11, 32) == ([], [])
    assert add(index, root, [1, 2, 3, 4, 5, 6, 7, 8, 9], 11, 42, 43) == ([42, 43], [22])
    assert found(index, root, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == ([11, 42, 43], 9)
    assert index.node_of(0, 12) is index.node_of(0, 22) is None
    assert index.num_nodes == 3


def test_what_loses_its_block_takes_what_follows_along(index):
    root = index.new_root()
    add(index, root, [*range(12)], 11, 12, 13)
    add(index, root, [0, 1, 2, 3, 9, 9, 9, 9], 11, 14)
    assert index.remove_block(0, 12) == [(0, 13)]
    assert found(index, root, [*range(12)]) == ([11], 4)
    assert index.remove_block(0, 14) == []
    assert index.remove_block(0, 11) == []
    assert (index.num_nodes, root.children) == (0, None)
    assert index.remove_block(0, 99) == []


def test_trees_know_nothing_of_each_other(index):
    ours, theirs = index.new_root(), index.new_root()
    add(index, ours, [1, 2, 3, 4], 11)
    assert found(index, theirs, [1, 2, 3, 4]) == ([], 0)
    add(index, theirs, [1, 2, 3, 4], 12)
    assert index.remove(ours) == [(0, 11)]
    assert found(index, theirs, [1, 2, 3, 4]) == ([12], 4)


def test_blocks_of_a_window_may_be_missing_and_come_back():
    index = PrefixIndex(SIZE, num_kinds=2, required=[0])
    root, tokens = index.new_root(), np.arange(12)
    index.insert(root, tokens, np.array([[11, 12, 13], [0, 22, 23]]))
    assert index.remove_block(1, 22) == []
    assert [node.blocks for node in index.match(root, tokens).nodes] == [(11, 0), (12, 0), (13, 23)]
    added = index.insert(root, tokens, np.array([[31, 32, 33], [41, 42, 43]]))
    assert added.taken == [(1, 41), (1, 42)]
    assert sorted(index.remove_block(0, 12)) == [(0, 13), (1, 23), (1, 42)]


def test_runs_without_any_block_go():
    index = PrefixIndex(SIZE, num_kinds=1, required=[])
    root = index.new_root()
    index.insert(root, np.arange(12), np.array([[0, 12, 13]]))
    assert index.remove_block(0, 12) == []
    assert found(index, root, [*range(12)]) == ([0, 0, 13], 12)
    assert index.remove_block(0, 13) == []
    assert (index.num_nodes, root.children) == (0, None)


def test_token_ids_of_any_size_are_told_apart(index):
    root = index.new_root()
    add(index, root, [1, 0, 0, 2**31 - 1], 11)
    assert found(index, root, [1, 0, 0, 2**31 - 2]) == ([11], 3)
    assert found(index, root, [256, 0, 0, 0]) == ([], 0)
    assert tokens_of(index.match(root, np.array([1])).nodes[0].key).tolist() == [1, 0, 0, 2**31 - 1]


def test_it_finds_what_a_plain_list_of_sequences_finds():
    """Random insertions and reclaimed_blocks, against the longest common beginning with what is still there."""
    generator = random.Random(0)
    index = PrefixIndex(SIZE, num_kinds=1, required=[0])
    root, next_block = index.new_root(), 1
    content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end

    def longest(tokens: list[int]) -> int:
        def common(known: tuple[int, ...]) -> int:
            return next((i for i, pair in enumerate(zip(known, tokens, strict=False)) if pair[0] != pair[1]),
                        min(len(known), len(tokens)))  # fmt: skip

        return max((common(known) for known in content.values()), default=0)

    for _ in range(2000):
        tokens = [generator.randrange(3) for _ in range(generator.randrange(1, 14))]
        assert index.match(root, np.array(tokens)).num_tokens == longest(tokens)
        if generator.random() < 0.5:
            runs = -(-len(tokens) // SIZE)
            taken, dropped = add(index, root, tokens, *range(next_block, next_block + runs))
            for block in dropped:
                del content[block]
            content |= {block: tuple(tokens[: (block - next_block + 1) * SIZE]) for block in taken}
            next_block += runs
        elif content:
            block = generator.choice([*content])
            for gone in (block, *(other for _, other in index.remove_block(0, block))):
                del content[gone]
        assert index.num_nodes == len(content)
    assert len(content) > 20


def test_the_numbers_of_a_node_leave_each_other_alone():
    node = PrefixNode(None, b"", num_kinds=3)
    assert (node.blocks, node.saved) == ((0, 0, 0), -1)
    most = 2**31 - 1  # as block tables hold them
    node.set_block(1, most)
    node.saved = 2**40
    node.set_block(0, 7)
    node.set_block(2, most)
    assert (node.blocks, node.saved) == ((7, most, most), 2**40)
    node.set_block(1, 0)
    node.saved = -1
    assert (node.blocks, node.saved) == ((7, 0, most), -1)


@pytest.mark.parametrize("length", [128, 8, 1])
def test_a_run_takes_less_than_200_bytes_beside_its_tokens(length):
    """20,000 runs of 64 tokens, in chains of 128, of 8 and of 1 from one root."""
    chains = 20_000 // length
    tokens = np.random.default_rng(0).integers(0, 50_000, (chains, length * 64))
    tracemalloc.start()
    index = PrefixIndex(64, num_kinds=1, required=[0])
    root = index.new_root()
    for chain in range(chains):
        index.insert(root, tokens[chain], np.arange(chain * length, (chain + 1) * length)[None] + 1)
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert index.num_nodes == chains * length
    assert num_bytes / index.num_nodes - 64 * 4 < 200
