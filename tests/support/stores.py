"""What tests of `BlockStore` do with one, and what must hold of it afterwards."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_paged_cache import BlockStore, KVQuant, PagedCache
from hf_paged_cache.prefill import CACHE_ARGUMENT
from hf_paged_cache.prefix.tree import PrefixNode

SIZE = 16
# With exact tokens few enough for prompts of a hundred to have codes in their middle.
INT4 = KVQuant("int4", exact_recent=16, exact_sinks=16)


def make_store(model: PreTrainedModel, **options: Any) -> BlockStore:
    """A store with blocks of `SIZE` tokens."""
    return BlockStore(model, **{"memory": "4MiB", "block_size": SIZE} | options)


def generate(model: PreTrainedModel, cache: PagedCache, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    """Six new tokens, greedily, unless told otherwise."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 6, "do_sample": False, **options}
    return model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **options)


def answer(store: BlockStore, ids: Tensor, **options: Any) -> tuple[list[int], int]:
    """What the model generates after `ids` with what the store knows, and how many tokens it reused."""
    cache = store.cache_for(ids, **options)
    return generate(store.model, cache, ids)[0, ids.shape[1] :].tolist(), cache.stats().reused_tokens


def learn(store: BlockStore, ids: Tensor, **options: Any) -> None:
    """Makes a prompt and an answer to it known."""
    cache = store.cache_for(ids, **options)
    store.commit(cache, generate(store.model, cache, ids))


def saved_and_loaded(store: BlockStore, path: Path) -> BlockStore:
    """What another process finds that has the same model."""
    store.save(path)
    return BlockStore.load(path, store.model, memory="4MiB")


def nodes_of(store: BlockStore) -> dict[tuple[Any, ...], PrefixNode]:
    """All nodes of a store by salt and all tokens, as they are named, up to their end."""
    found = {}
    for space, root in store._prompts.trees.items():
        for node in store._cached.index.nodes_after(root):
            keys, before = [], node
            while before.parent is not None:
                keys.append(before.key)
                before = before.parent
            found[space.salt, b"".join(reversed(keys))] = node
    return found


def check_conserved(*stores: BlockStore) -> None:
    """Every block is free, evictable or held, and what is cached is found by its id."""
    for store in stores:
        for kind, allocator in enumerate(store._cached.allocators):
            counts = (allocator.num_free, allocator.num_evictable, allocator.num_referenced)
            assert sum(counts) == allocator.num_blocks - 1
            assert len(set(allocator._free)) == allocator.num_free
            cached = {node.blocks[kind] for node in nodes_of(store).values()} - {0}
            assert cached == allocator._cached
            assert not cached & set(allocator._free)


def check_unheld(*stores: BlockStore) -> None:
    """No row holds a block, nor does a cache that is gone."""
    gc.collect()
    check_conserved(*stores)
    for store in stores:
        assert all(allocator.num_referenced == 0 for allocator in store._cached.allocators)
