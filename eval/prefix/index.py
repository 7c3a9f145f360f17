"""The prefix index alone: how long it takes to look up, to insert and to evict, and its bytes. No model, no tensors."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from hf_paged_cache.prefix.tree import TOKEN_BYTES, PrefixIndex, PrefixNode

BLOCK_SIZE = 64
VOCABULARY = 49152
PARENTS = 4
PROMPTS_A_ROUND = 8

Row = dict[str, Any]
Sequences = Callable[[], Iterator[np.ndarray]]


def measure_index(num_blocks: int, prompt_tokens: int, repeats: int) -> list[Row]:
    """Measures an index of `num_blocks` blocks with prompts of `prompt_tokens`, in two shapes: sequences of that length
    with nothing in common, and all blocks as children of a few."""
    runs = prompt_tokens // BLOCK_SIZE
    num_chains = max(num_blocks // runs, 1)
    shapes: dict[str, tuple[str, Sequences]] = {
        "chains": (f"{num_chains:,} sequences of {runs:,}", partial(_chains, num_chains, runs)),
        "children": (f"{num_blocks:,} children of {PARENTS}", partial(_children, num_blocks)),
    }
    rows = []
    for name, (label, sequences) in shapes.items():
        known = [*itertools.islice(sequences(), PROMPTS_A_ROUND * repeats)]
        row = {"section": "index", "shape": name, "label": label, "prompt_tokens": runs * BLOCK_SIZE}
        rows.append(row | {"bytes_a_block": _bytes_a_block(sequences)} | _measure(sequences, known, runs))
    return rows


def _chains(count: int, runs: int) -> Iterator[np.ndarray]:
    """Random sequences of so many blocks."""
    numbers = np.random.default_rng(0)
    return (numbers.integers(0, VOCABULARY, runs * BLOCK_SIZE) for _ in range(count))


def _children(count: int) -> Iterator[np.ndarray]:
    """Sequences of one of a few blocks, and one of its many children."""
    numbers = np.random.default_rng(0)
    parents = numbers.integers(0, VOCABULARY, (PARENTS, BLOCK_SIZE))
    return (
        np.concatenate([parents[child % PARENTS], numbers.integers(0, VOCABULARY, BLOCK_SIZE)])
        for child in range(count)
    )


def _measure(sequences: Sequences, known: Sequence[np.ndarray], runs: int) -> Row:
    """Times prompts of `runs` blocks that begin with known sequences; inserts and evicts others that share a block."""
    index, root, next_block = _fill(sequences())
    figures: Row = {"blocks": index.num_nodes}
    seconds: dict[str, list[float]] = {"lookup": [], "insert": [], "evict": []}
    numbers = np.random.default_rng(1)
    for tokens in known:
        others = numbers.integers(0, VOCABULARY, runs * BLOCK_SIZE)
        prompt = np.concatenate([tokens, others[len(tokens) :]])
        start = time.perf_counter()
        match = index.match(root, prompt)
        seconds["lookup"].append(time.perf_counter() - start)

        fresh = np.concatenate([tokens[:BLOCK_SIZE], others[BLOCK_SIZE:]])
        block_ids = np.arange(next_block, next_block + runs)[None]
        start = time.perf_counter()
        added = index.insert(root, fresh, block_ids)
        seconds["insert"].append(time.perf_counter() - start)

        start = time.perf_counter()
        for kind, block_id in reversed(added.taken):  # the end of a sequence goes first
            index.remove_block(kind, block_id)
        seconds["evict"].append(time.perf_counter() - start)
        figures["cached_tokens"] = match.num_tokens
    for name, values in seconds.items():
        figures |= {f"{name}_ms": 1e3 * statistics.median(values), f"{name}_ms_min": 1e3 * min(values)}
    return figures


def _fill(sequences: Iterator[np.ndarray]) -> tuple[PrefixIndex, PrefixNode, int]:
    """An index with these sequences, its only tree, and the next block id."""
    index, next_block = PrefixIndex(BLOCK_SIZE, num_kinds=1, required=[0]), 1
    root = index.new_root()
    for tokens in sequences:
        num_runs = len(tokens) // BLOCK_SIZE
        added = index.insert(root, tokens, np.arange(next_block, next_block + num_runs)[None])
        next_block += len(added.taken)  # those of known runs go to the next sequence
    return index, root, next_block


def _bytes_a_block(sequences: Sequences) -> float:
    """Bytes of the index a block, its tokens left out."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index, _, _ = _fill(sequences())
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    return held / index.num_nodes - BLOCK_SIZE * TOKEN_BYTES
