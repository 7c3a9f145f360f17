"""The blocks of one layer group as memory: the pools of its layers, and how they grow together."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hf_paged_kernels import MixedBlocks, copy_blocks, dequantize_blocks, quantize_blocks

from hf_paged_cache.blocks.allocator import BlockAllocator
from hf_paged_cache.blocks.exact import Moves, Pairs
from hf_paged_cache.codecs import Codec, Geometry
from hf_paged_cache.errors import OutOfBlocksError
from hf_paged_cache.ledger import Ledger
from hf_paged_cache.memory.budget import MemoryBudget
from hf_paged_cache.memory.layer_pool import LayerPool, planes_by_name

# Without a limit a pool grows by this part of it at least. That bounds what is allocated and not used, and still copies
# a token only 128 times on average: one part in thirty of what the steps read in the meantime.
GROWTH = 128


class GroupPool:
    """The blocks of a layer group: one allocator, and the pool of each layer, all with the same block ids.

    A cache and its forks share it; each has a block table of its own over it. Whoever changes a table, or writes to the
    blocks, holds `lock`: forks may be used in several threads.

    Args:
        codec_of: how the tokens of a layer are stored, by its index.
        block_size: tokens a block.
        expected_layers: layers that will join. Their pools appear with the first keys, so until then the bytes of a
            block are reckoned from the layers that are there.
        budget: the bytes of all groups together.
        max_blocks: blocks that the group may hold, allocated at once; `None` for no such limit.
        is_only_group: nothing else shares the budget, so that all of it is allocated at once.
        exact_pool: the exact blocks of layers whose codec quantizes whole blocks.
        has_null_block: whether memory is held for id 0. Without it a block lies one place lower than its id says.
    """

    def __init__(
        self,
        codec_of: Callable[[int], Codec],
        block_size: int,
        expected_layers: int,
        budget: MemoryBudget,
        *,
        max_blocks: int | None = None,
        is_only_group: bool = True,
        exact_pool: "GroupPool | None" = None,
        has_null_block: bool = True,
    ) -> None:
        self.allocator = BlockAllocator(ledger=budget.ledger)
        self.layers: dict[int, LayerPool] = {}
        self.copies = 0
        self.exact_pool = exact_pool
        self.block_size = block_size
        self._codec_of = codec_of
        self._expected_layers = expected_layers
        self._budget = budget
        self._max_blocks = max_blocks
        self._is_only_group = is_only_group
        self._ids_without_memory = 0 if has_null_block else 1
        self._promised = 0
        budget.register(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._budget.register(self)

    def __del__(self) -> None:
        if hasattr(self, "_promised"):
            self._budget.remove(self.num_bytes)
            self._budget.promise(-self._promised)

    @property
    def lock(self) -> threading.RLock:
        """Held while blocks are handed out, given back, written, copied or moved."""
        return self._budget.lock

    @property
    def ledger(self) -> Ledger:
        """Knows the changes in progress of all that shares the lock."""
        return self._budget.ledger

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit to the blocks of the group."""
        return self._max_blocks is not None or self._budget.limit is not None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        present = [layer.block_bytes for layer in self.layers.values()]
        missing = max(self._expected_layers - len(present), 0)
        return sum(present) + missing * (present[-1] if present else 0)

    def block_bytes_of(self, layer_idx: int, geometry: Geometry) -> int:
        """Bytes of one block of a layer with keys and values of a geometry, its exact block included."""
        codec = self._codec_of(layer_idx)
        exact_bytes = 0 if codec.exact_policy is None else self.exact_pool.block_bytes_of(layer_idx, geometry)
        return codec.block_bytes(geometry, self.block_size) + exact_bytes

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers.values())

    @property
    def promised(self) -> int:
        """Bytes that are kept free for layers that are to join."""
        return self._promised

    @property
    def is_quantized(self) -> bool:
        """Whether some layer holds codes."""
        return any(not layer.codec.is_exact for layer in self.layers.values())

    def layer(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> LayerPool:
        """The pool of a layer, made for the shape of `key` and `value` when it is first asked for.

        Raises:
            OutOfBlocksError: the memory limit leaves no room for the layer.
        """
        pool = self.layers.get(layer_idx)
        return self.layer_of(layer_idx, Geometry.of(key, value)) if pool is None else pool

    def layer_of(self, layer_idx: int, geometry: Geometry) -> LayerPool:
        """The pool of a layer, made for keys and values of a geometry when it is first asked for.

        Raises:
            OutOfBlocksError: the memory limit leaves no room for the layer.
        """
        pool = self.layers.get(layer_idx)
        if pool is None:
            codec = self._codec_of(layer_idx)
            exact_pool = None if codec.exact_policy is None else self.exact_pool.layer_of(layer_idx, geometry)
            num_blocks = self._num_stored(self.allocator.num_blocks)
            num_bytes = num_blocks * codec.block_bytes(geometry, self.block_size)
            if self._budget.remaining is not None and num_bytes > self._budget.remaining + self._promised:
                raise self._out_of_blocks(num_blocks)
            opened = self.ledger.open(self)
            pool = LayerPool(codec, geometry, self.block_size, num_blocks, self._budget, exact_pool)
            self.layers[layer_idx] = pool
            self._promise()
            self._close(opened)
        return pool

    def take(self, count: int) -> np.ndarray:
        """Takes `count` blocks for the change in progress, int32 `[count]`: free ones, then new ones, then evicted
        ones.

        Raises:
            OutOfBlocksError: the limits do not allow that many. Nothing has changed then.
        """
        self._have_free(count)
        return self.allocator.take(count)

    def allocate(self, count: int) -> np.ndarray:
        """`take` for a holder that is no table, until `allocator.release`."""
        self._have_free(count)
        return self.allocator.allocate(count)

    def give_back_memory(self) -> None:
        """Frees the tensors if no block is held or cached. Layers may have other shapes and dtypes afterwards."""
        if self.allocator.shrink():
            opened = self.ledger.open(self)
            self._budget.remove(self.num_bytes)
            self.layers.clear()
            self._promise()
            self._close(opened)
            if self.exact_pool is not None:  # whose blocks belong to such as were held here
                self.exact_pool.give_back_memory()

    def settle(self) -> None:
        """Counts anew what the layers hold, after a change that was interrupted."""
        for layer in self.layers.values():
            layer.settle()
        self._promised = self._bytes_to_promise()
        self._budget.count()

    def hold_only_tables(self) -> None:
        """Lets go of the blocks that no table holds: of a copy that came without the other holders."""
        self.allocator.hold_only_tables()
        if self.exact_pool is not None:
            self.exact_pool.hold_only_tables()

    def check_room(self, count: int, exact_count: int = 0, *, let_go: tuple[int, int] = (0, 0)) -> None:
        """Checks that `take(count)` would succeed, after `exact_pool.take(exact_count)`.

        Args:
            count, exact_count: blocks and exact blocks.
            let_go: blocks and exact blocks that become available before.

        Raises:
            OutOfBlocksError: it would not.
        """
        reserved = 0
        if exact_count:
            self.exact_pool.check_room(exact_count, let_go=(let_go[1], 0))
            missing_exact = exact_count - self.exact_pool.allocator.num_available - let_go[1]
            reserved = max(missing_exact, 0) * self.exact_pool.block_bytes
        missing = count - self.allocator.num_available - let_go[0]
        if missing <= 0:
            return
        allowed = self._allowed_blocks(reserved)
        if allowed is not None and self.allocator.num_blocks + missing > allowed:
            raise self._out_of_blocks(count)

    def move(self, moves: Moves) -> None:
        """Moves whole blocks in every layer, as the layer stores them."""
        plain = [layer for layer in self.layers.values() if layer.exact_pool is None]
        if moves.copies and plain:
            copy_blocks([layer.blocks for layer in plain], moves.copies, backend=plain[0].codec.backend)
        self.copies += len(moves.copies)
        if moves.dequantized:
            dequantize_blocks(self._mixed(), moves.dequantized)
        if moves.exact_copies:
            self.exact_pool.move(Moves(moves.exact_copies, [], []))

    def quantize(self, pairs: Pairs) -> None:
        """Quantizes exact blocks `(exact block, block id)` in every layer that has them.

        Doing so before it is due changes nothing: codes are read by rows that hold no exact block, and those of a block
        that some row reads so are what they were.
        """
        if pairs:
            quantize_blocks(self._mixed(), pairs)

    def quantizes_blocks(self, layer_idx: int) -> bool:
        """Whether a layer has codes of full blocks only."""
        return self._codec_of(layer_idx).exact_policy is not None

    def block_planes(self, layer_idx: int) -> frozenset[str]:
        """The planes of a layer that say something about a block, and nothing about single tokens of it."""
        return self._codec_of(layer_idx).block_planes

    def empty_planes(self, layer_idx: int, geometry: Geometry, num_blocks: int) -> dict[str, torch.Tensor]:
        """The planes of a layer with so many blocks by name: shapes and dtypes, without memory."""
        on_no_device = replace(geometry, device=torch.device("meta"))
        return planes_by_name(self._codec_of(layer_idx).allocate(on_no_device, self.block_size, num_blocks))

    def read_blocks(self, layer_idx: int, name: str, head: int, block_ids: np.ndarray) -> torch.Tensor:
        """Bytes of blocks, int32 `[n]`, in one head of a plane of a layer: uint8 `[n, ...]`, on the CPU, a copy."""
        plane = self.layers[layer_idx].planes_by_name[name]
        return plane[head].view(torch.uint8).index_select(0, self._places(block_ids, plane)).cpu()

    def write_blocks(self, layer_idx: int, name: str, blocks: torch.Tensor, block_ids: np.ndarray) -> None:
        """Fills blocks, int32 `[n]`, that nobody reads yet, in a plane of a layer with `[num_kv_heads, n, ...]`."""
        plane = self.layers[layer_idx].planes_by_name[name]
        filling = blocks.to(plane.device).view(torch.uint8)
        plane.view(torch.uint8).index_copy_(1, self._places(block_ids, plane), filling)

    def _places(self, block_ids: np.ndarray, plane: torch.Tensor) -> torch.Tensor:
        """Where blocks lie in a plane, int64 `[n]`."""
        return torch.from_numpy(block_ids.astype(np.int64) - self._ids_without_memory).to(plane.device)

    def _mixed(self) -> list[MixedBlocks]:
        return [layer.blocks for layer in self.layers.values() if layer.exact_pool is not None]

    def _have_free(self, count: int) -> None:
        missing = count - self.allocator.num_free
        if missing > 0:
            self._grow(count, missing)

    def _grow(self, needed: int, missing: int) -> None:
        """Adds `missing` free blocks, or as many as the limits allow if cached ones can make up for the others."""
        self.check_room(needed)
        present, allowed = self.allocator.num_blocks, self._allowed_blocks()
        if allowed is not None and (self._max_blocks is not None or self._is_only_group):
            target = allowed
        else:
            target = present + max(missing, present // GROWTH)
            target = target if allowed is None else min(target, allowed)
        if target <= present:
            return
        num_blocks = self._num_stored(target)
        opened = self.ledger.open(self)
        for layer in self.layers.values():
            if layer.num_blocks < num_blocks:  # else moved by an attempt that ran out of memory at a later layer
                layer.grow(num_blocks)
        self.allocator.grow(target)
        self._promise()
        self._close(opened)

    def _close(self, opened: bool) -> None:
        if opened:
            self.ledger.close(self)

    def _promise(self) -> None:
        """Keeps room for the layers that are to join, with as many blocks as the others have."""
        promised = self._bytes_to_promise()
        self._budget.promise(promised - self._promised)
        self._promised = promised

    def _bytes_to_promise(self) -> int:
        missing_bytes = self.block_bytes - sum(layer.block_bytes for layer in self.layers.values())
        return self._num_stored(self.allocator.num_blocks) * missing_bytes

    def _num_stored(self, num_ids: int) -> int:
        """Blocks of memory for so many ids. While there is only the null block there is nothing to hold."""
        return num_ids - self._ids_without_memory if num_ids > 1 else 0

    def _allowed_blocks(self, reserved: int = 0) -> int | None:
        """Blocks that the group may hold now, the null block included, if others get `reserved` bytes of what remains;
        `None` for no limit."""
        limits = (self._max_blocks + 1 if self._max_blocks is not None else None, self._blocks_by_memory(reserved))
        return min((limit for limit in limits if limit is not None), default=None)

    def _blocks_by_memory(self, reserved: int = 0) -> int | None:
        if self._budget.remaining is None or not self.block_bytes:
            return None
        # While a plane is moved its old tensor is still there.
        moving = max(plane.nbytes for layer in self.layers.values() for plane in layer.planes)
        room = self._budget.remaining - reserved + self._promised + self.num_bytes - moving
        return room // self.block_bytes + self._ids_without_memory

    def _out_of_blocks(self, needed: int) -> OutOfBlocksError:
        by_memory = self._blocks_by_memory()
        if self._max_blocks is not None and (by_memory is None or self._max_blocks < by_memory):
            limit = f"num_blocks={self._max_blocks} allows no more"
        else:
            limit = f"memory={self._budget.limit:,} bytes allows no more ({self._budget.allocated:,} are allocated)"
        # The pool may be smaller than the limits allow; what they leave to be added is free.
        present = self.allocator.num_blocks
        to_add = max((self._allowed_blocks() or 0) - present, 0)
        return OutOfBlocksError(
            needed=needed,
            free=self.allocator.num_available + to_add,
            total=present - 1 + to_add,
            block_bytes=self.block_bytes,
            limit=limit,
        )
