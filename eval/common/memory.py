"""Bytes that a cache holds, and bytes that a piece of code holds at the same time while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from transformers import Cache

_LEAVES = (str, bytes, int, float, bool, type(None), type, ModuleType, torch.dtype, torch.device)


def _dense_tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _dense_tensors(getattr(value, name), seen)
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _dense_tensors(item, seen)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _dense_tensors(item, seen)
    else:
        yield from _dense_tensors(getattr(value, "__dict__", None), seen)
        for name in getattr(type(value), "__slots__", ()):
            yield from _dense_tensors(getattr(value, name, None), seen)


def held_storages(cache: Cache) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors that can be reached from the cache's layers, by address: a tensor that is a view
    keeps all of its storage alive, and shared storage is counted once."""
    storages = (tensor.untyped_storage() for tensor in _dense_tensors(cache.layers, set()))
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache after a call.

    used: of stored keys and values. allocated: with what is set aside to grow. peak: the most that was allocated at one
    time. block_size: tokens a block. A cache without `stats()` allocates what it uses and only ever grows, so there the
    three sizes are the same, and it has no blocks: 0.
    """

    used: int
    allocated: int
    peak: int
    block_size: int


def cache_bytes(cache: Cache) -> CacheBytes:
    """Reads the bytes from `cache.stats()` where there is one, and else adds up the storages that it holds."""
    if hasattr(cache, "stats"):
        stats = cache.stats()
        return CacheBytes(stats.bytes_used, stats.bytes_allocated, stats.bytes_peak, stats.block_size)
    held = sum(storage.nbytes() for storage in held_storages(cache).values())
    return CacheBytes(held, held, held, block_size=0)


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of tensors that are alive at the same time: those made inside the `with` block, and those
    that the given cache held before it. `peak` is the most there were after any operator, `current` what is left.

    Buffers that an operator makes and frees inside itself are not seen.
    """

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        for storage in held_storages(cache).values():
            self._follow(storage)
        self.peak = self.current

    def _follow(self, storage: torch.UntypedStorage) -> None:
        reference = StorageWeakRef(storage)
        self._live[reference.cdata] = (reference, storage.nbytes())

    @property
    def current(self) -> int:
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            # The subclass goes first: the operators it is made of come back here one by one.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        # A result that shares the storage of an argument is a view of it, or was written in place.
        arguments = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in arguments:
                self._follow(tensor.untyped_storage())
        self.peak = max(self.peak, self.current)
        return result
