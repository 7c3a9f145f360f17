"""Between the pools of a store and a file: blocks that are saved, and blocks that can be read again."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from hf_paged_cache.codecs import Geometry
from hf_paged_cache.errors import StoreFileError
from hf_paged_cache.memory.group_pool import GroupPool
from hf_paged_cache.prefix.store_file import StoreFile, TensorToWrite
from hf_paged_cache.prefix.store_format import SavedKind, SavedNodes
from hf_paged_cache.prefix.tree import PrefixIndex, PrefixNode, tokens_of


class SavedBlocks:
    """Blocks of a file, which are read into pools when they are wanted.

    Args:
        file: the file, of the same model.
        pools: of each kind of blocks.
        kinds: for each kind the window of its layers, and whether it is the exact one.
        device_of: where the keys of a layer are, by its index.

    Raises:
        StoreFileError: the file has other planes than the codecs of the layers.
    """

    def __init__(
        self,
        file: StoreFile,
        pools: Sequence[GroupPool],
        kinds: Sequence[tuple[int | None, bool]],
        device_of: Callable[[int], torch.device],
    ) -> None:
        if [(kind.window, kind.is_exact) for kind in file.kinds] != [*kinds]:
            raise StoreFileError(f"{file.path} has blocks of other layer groups than the model. Save the store again")
        for kind, (pool, num_blocks) in enumerate(zip(pools, file.nodes.num_blocks, strict=True)):
            for layer_idx, geometry in file.kinds[kind].layers.items():
                for name, plane in pool.empty_planes(layer_idx, geometry, num_blocks).items():
                    file.check_plane(kind, layer_idx, name, plane)
        self.file = file
        self._pools = pools
        self._device_of = device_of

    def places(self, node: PrefixNode) -> Sequence[int]:
        """Where the blocks of a node stand in the file, for each kind; -1 for nowhere."""
        return (-1,) * len(self._pools) if node.saved < 0 else self.file.nodes.places[:, node.saved]

    def geometries(self) -> list[dict[int, Geometry]]:
        """For each kind the layers that have such blocks, in memory or in the file.

        Raises:
            StoreFileError: those in the file are of another dtype or shape.
        """
        geometries = geometries_of(self._pools)
        for kind, in_memory in enumerate(geometries):
            for layer_idx, saved in self.file.kinds[kind].layers.items():
                if layer_idx not in in_memory:
                    in_memory[layer_idx] = replace(saved, device=self._device_of(layer_idx))
                elif replace(saved, device=in_memory[layer_idx].device) != in_memory[layer_idx]:
                    raise StoreFileError(
                        f"layer {layer_idx} now has {in_memory[layer_idx]}, but {self.file.path} was saved with "
                        f"{saved}. Use the model as it was used then, autocast included, or a store of its own"
                    )
        return geometries

    def make_layers(self) -> None:
        """Makes the layers of the pools that the file has blocks of.

        Raises:
            StoreFileError: layers that are there are of another dtype or shape.
        """
        for saved_kind, pool, geometries in zip(self.file.kinds, self._pools, self.geometries(), strict=True):
            for layer_idx, geometry in geometries.items() if not saved_kind.is_exact else ():
                pool.layer_of(layer_idx, geometry)

    def read(self, kind: int, nodes: Sequence[PrefixNode], block_ids: np.ndarray) -> None:
        """Reads the blocks of nodes that are in the file into blocks of a pool.

        Args:
            kind: of the blocks.
            nodes: the nodes, at least one.
            block_ids: int32 `[len(nodes)]`
        """
        pool, places = self._pools[kind], self.file.nodes.places[kind, [node.saved for node in nodes]]
        for layer_idx, layer in pool.layers.items():
            for name in layer.planes_by_name:
                pool.write_blocks(layer_idx, name, self.file.read_plane(kind, layer_idx, name, places), block_ids)


def geometries_of(pools: Sequence[GroupPool]) -> list[dict[int, Geometry]]:
    """For each kind of blocks the layers that have such."""
    return [{layer_idx: layer.geometry for layer_idx, layer in pool.layers.items()} for pool in pools]


class HeldBlocks:
    """The blocks under some roots, held so that they can be saved while others use the pools.

    Those in memory keep their content until `release`: rows copy what others hold, and what is held is not given up.
    Whoever makes or releases it holds the lock of the pools.

    Args:
        index: the prefix index.
        roots: in it.
        pools: of each kind of blocks.
        kinds: for each kind the window of its layers, and whether it is the exact one.
        saved: where the others can be read.

    Attributes:
        nodes: the nodes, with the places that their blocks are to have.
        kinds: the kinds of blocks.
        tensors: the planes of all layers.

    Raises:
        StoreFileError: the model computes keys of another dtype or shape than the file has that blocks are in.
    """

    def __init__(
        self,
        index: PrefixIndex,
        roots: Sequence[PrefixNode],
        pools: Sequence[GroupPool],
        kinds: Sequence[tuple[int | None, bool]],
        saved: SavedBlocks | None,
    ) -> None:
        branches = [list(index.nodes_after(root)) for root in roots]
        nodes = [node for branch in branches for node in branch]
        number = dict.fromkeys(roots, -1) | {node: place for place, node in enumerate(nodes)}
        tokens = np.zeros((len(nodes), index.block_size), dtype=np.int32)
        for place, node in enumerate(nodes):
            tokens[place, : node.num_tokens] = tokens_of(node.key)
        shape = (len(nodes), len(pools))
        self._block_ids = np.array([node.blocks for node in nodes], dtype=np.int32).reshape(shape).T
        places = np.full(shape[::-1], -1, dtype=np.int64)
        if saved is not None:
            places = np.array([saved.places(node) for node in nodes], dtype=np.int64).reshape(shape).T
        is_there = (self._block_ids != 0) | (places >= 0)
        self.nodes = SavedNodes(
            tokens=tokens,
            num_tokens=np.array([node.num_tokens for node in nodes], dtype=np.int64),
            parent=np.array([number[node.parent] for node in nodes], dtype=np.int64),
            tree=np.arange(len(roots)).repeat([len(branch) for branch in branches]),
            places=np.where(is_there, np.cumsum(is_there, axis=1) - 1, -1),
        )
        geometries = geometries_of(pools) if saved is None else saved.geometries()
        self.kinds = [SavedKind(*about, layers) for about, layers in zip(kinds, geometries, strict=True)]
        self.tensors: list[TensorToWrite] = []
        for kind, (pool, chosen) in enumerate(zip(pools, is_there, strict=True)):
            file = None if saved is None else saved.file
            num_tokens, block_ids = self.nodes.num_tokens[chosen], self._block_ids[kind, chosen]
            blocks = _BlocksToWrite(pool, num_tokens, block_ids, file, kind, places[kind, chosen])
            self.tensors += blocks.tensors(self.kinds[kind])
        self._allocators = [pool.allocator for pool in pools]
        for allocator, ids in zip(self._allocators, self._block_ids, strict=True):
            allocator.acquire(ids)

    def release(self) -> None:
        """Lets go of the blocks."""
        for allocator, ids in zip(self._allocators, self._block_ids, strict=True):
            allocator.release(ids)


class _BlocksToWrite(NamedTuple):
    """The blocks of one kind that are about to be saved, in the order of their places in the file.

    Attributes:
        pool: what holds them.
        num_tokens: int64 `[n]`, tokens of each.
        block_ids: int32 `[n]`; 0 for a block that is only in another file.
        file: that file.
        kind: the kind of blocks there.
        places: int64 `[n]`, where they stand in that file.
    """

    pool: GroupPool
    num_tokens: np.ndarray
    block_ids: np.ndarray
    file: StoreFile | None
    kind: int
    places: np.ndarray

    def tensors(self, saved_kind: SavedKind) -> list[TensorToWrite]:
        """The planes of all layers."""
        return [
            TensorToWrite(
                saved_kind.plane_name(layer_idx, name),
                plane.dtype,
                tuple(plane.shape),
                partial(self._heads, layer_idx, name, plane),
            )
            for layer_idx, geometry in saved_kind.layers.items()
            for name, plane in self.pool.empty_planes(layer_idx, geometry, len(self.num_tokens)).items()
        ]

    def _heads(self, layer_idx: int, name: str, plane: torch.Tensor) -> Iterator[torch.Tensor]:
        """The bytes of a plane shaped like `plane`, uint8 `[n, ...]` of one head after the other."""
        in_memory = torch.from_numpy(self.block_ids != 0)
        unwritten = self._unwritten(layer_idx, name)
        for head in range(plane.shape[0] if len(unwritten) else 0):
            blocks = torch.empty(plane.shape[1:], dtype=plane.dtype, device="cpu").view(torch.uint8)
            if in_memory.any():
                blocks[in_memory] = self.pool.read_blocks(layer_idx, name, head, self.block_ids[self.block_ids != 0])
            if not in_memory.all():
                places = self.places[self.block_ids == 0]
                read = self.file.read_plane(self.kind, layer_idx, name, places, slice(head, head + 1))
                blocks[~in_memory] = read[0].view(torch.uint8)
            blocks.view(*unwritten.shape, -1)[unwritten] = 0
            yield blocks

    def _unwritten(self, layer_idx: int, name: str) -> torch.Tensor:
        """Where no token of a node is, and somebody else's prompt may have left something.

        Returns:
            bool `[n, block_size]`; `[n]` for codes, which are made of full blocks only, and for what the first token
            of a block decides.
        """
        block_size = self.pool.block_size
        if name in self.pool.block_planes(layer_idx):
            return torch.from_numpy(self.num_tokens == 0)
        if self.pool.quantizes_blocks(layer_idx):
            return torch.from_numpy(self.num_tokens < block_size)
        return torch.from_numpy(np.arange(block_size)[None] >= self.num_tokens[:, None])
