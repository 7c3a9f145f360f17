"""`GroupPool`: memory of the layers of a group, how it grows, and limits that are exact to the block and the byte."""

import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hf_paged_cache.blocks.exact import Moves
from hf_paged_cache.blocks.tables import BlockTable
from hf_paged_cache.codecs import Codec, Geometry, RawCodec, make_codec
from hf_paged_cache.errors import InvalidArgumentError, OutOfBlocksError
from hf_paged_cache.memory.budget import MemoryBudget
from hf_paged_cache.memory.group_pool import GROWTH, GroupPool
from hf_paged_cache.memory.layer_pool import LayerPool
from tests.support.small_tables import extend

SIZE = 4


def states(heads: int = 2, key_dim: int = 8, value_dim: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, heads, 1, key_dim), torch.zeros(1, heads, 1, value_dim or key_dim)


def always(codec: Codec) -> Callable[[int], Codec]:
    """The same codec for every layer."""
    return lambda layer_idx: codec


def make_pool(num_layers: int = 1, *, limit: int | None = None, **options: object) -> GroupPool:
    pool = GroupPool(always(RawCodec()), SIZE, num_layers, MemoryBudget(limit), **options)
    for layer_idx in range(num_layers):
        pool.layer(layer_idx, *states())
    return pool


def table_over(pool: GroupPool, window: int | None = None) -> BlockTable:
    return BlockTable(pool.allocator, SIZE, window, pool.take)


def exhaust(pool: GroupPool, count: int) -> None:
    """Takes blocks, `count` at a time, until there are none."""
    while True:
        pool.allocate(count)


BLOCK_BYTES = 2 * SIZE * (8 + 8) * 4  # of one layer of `make_pool`


class TestLayerPool:
    def test_what_is_written_is_read_through_growth(self):
        geometry = Geometry(2, 8, 6, torch.float32, torch.float32, torch.device("cpu"))
        layer = LayerPool(RawCodec(), geometry, SIZE, 5, MemoryBudget())
        pool = make_pool()
        step, _ = extend(table_over(pool), 2, 6)
        key, value = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 6)
        layer.write(key, value, step)
        for num_blocks in (5, 6, 20):
            layer.grow(num_blocks)
            assert layer.blocks.num_blocks == num_blocks
            assert layer.num_bytes == num_blocks * layer.block_bytes == sum(p.nbytes for p in layer.blocks.planes)
            assert torch.equal(layer.codec.read(layer.blocks, "key", step, 0, 6), key)
            assert torch.equal(layer.codec.read(layer.blocks, "value", step, 0, 6), value)

    def test_no_graph_is_kept(self):
        pool = make_pool()
        step, _ = extend(table_over(pool), 1, 3)
        key = torch.randn(1, 2, 3, 8, requires_grad=True)
        pool.layers[0].write(key, key * 2, step)
        layer = pool.layers[0]
        assert not layer.codec.read(layer.blocks, "key", step, 0, 3).requires_grad

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    def test_block_bytes_are_those_of_the_tensors(self, dtype):
        geometry = Geometry(3, 192, 128, dtype, torch.float16, torch.device("cpu"))
        blocks = RawCodec().allocate(geometry, 16, 7)
        assert RawCodec().block_bytes(geometry, 16) * 7 == sum(plane.nbytes for plane in blocks.planes)
        assert (blocks.key.dtype, blocks.value.dtype) == (dtype, torch.float16)

    def test_geometry_says_what_it_is_and_what_fits(self):
        key, value = states(key_dim=8, value_dim=6)
        geometry = Geometry.of(key, value)
        assert str(geometry) == "2 KV heads of 8/6, float32, cpu"
        assert str(Geometry.of(key, key)) == "2 KV heads of 8, float32, cpu"
        assert geometry.fits(torch.zeros(5, 2, 9, 8), torch.zeros(5, 2, 9, 6))
        for other in [(key[:, :1], value[:, :1]), (key, key), (value, value), (key.half(), value), (key, value.half())]:
            assert not geometry.fits(*other)

    def test_a_codec_is_picked_by_name(self):
        assert make_codec("raw").is_exact
        with pytest.raises(InvalidArgumentError, match="unknown kv='int3': expected one of 'raw'"):
            make_codec("int3")


class TestGrowth:
    def test_without_a_limit_it_grows_by_what_is_missing_or_a_small_part(self):
        pool = make_pool()
        assert len(pool.allocate(200)) == 200
        assert pool.allocator.num_blocks == 201
        pool.allocate(1)
        assert pool.allocator.num_blocks == 201 + 201 // GROWTH
        pool.allocate(30)
        assert pool.allocator.num_free == 0
        pool.allocate(0)
        assert pool.allocator.num_blocks == 1 + 200 + 1 + 30

    def test_the_peak_is_the_new_size_plus_one_plane(self, memory):
        """Measured on the tensors, with layers of unequal size."""
        pool = make_pool(num_layers=0)
        for layer_idx, key_dim in enumerate([8, 24, 8, 16]):
            pool.layer(layer_idx, *states(key_dim=key_dim))
        for count in (100, 3, 50, 1, 200):
            largest_before = max(plane.nbytes for layer in pool.layers.values() for plane in layer.planes)
            memory.peak = memory.alive
            pool.allocate(count)
            assert memory.alive == pool.num_bytes
            assert memory.peak <= pool.num_bytes + largest_before
        assert pool._budget.allocated == pool.num_bytes
        assert memory.peak <= pool._budget.peak

    def test_a_reader_in_another_thread_never_sees_a_layer_half_moved(self, monkeypatch):
        pool = make_pool()
        pool.allocate(5)
        layer, new_plane = pool.layers[0], RawCodec.new_plane
        seen: list[set[int]] = []
        readers: list[threading.Thread] = []

        def read() -> None:
            seen.append({plane.shape[1] for plane in layer.blocks.planes})

        def reads_meanwhile(*arguments):
            reader = threading.Thread(target=read)
            reader.start()
            readers.append(reader)
            reader.join(timeout=0.05)
            return new_plane(*arguments)

        monkeypatch.setattr(RawCodec, "new_plane", staticmethod(reads_meanwhile))
        with pool.lock:
            pool.allocate(20)
        for reader in readers:
            reader.join()
        assert seen == [{26}, {26}]

    @pytest.mark.parametrize("grows_exact", [False, True])
    def test_readers_get_the_same_blocks_until_codes_or_exact_blocks_grow(self, grows_exact):
        """And then no plane stays in memory that has been replaced."""
        geometry, budget = Geometry(2, 8, 8, torch.float32, torch.float32, torch.device("cpu")), MemoryBudget()
        exact = LayerPool(RawCodec(), geometry, 16, 2, budget)
        layer = LayerPool(make_codec("int4"), geometry, 16, 3, budget, exact)
        growing = exact if grows_exact else layer
        assert layer.blocks is layer.blocks
        replaced = [weakref.ref(plane) for plane in growing.planes]
        growing.grow(9)
        assert [plane() for plane in replaced] == [None] * len(replaced)
        assert layer.blocks.quantized.planes == layer.planes
        assert layer.blocks.exact.planes == exact.planes

    def test_all_layers_have_the_same_blocks(self):
        pool = make_pool(num_layers=3)
        pool.allocate(10)
        pool.layer(3, *states(heads=1, key_dim=5))
        assert {layer.blocks.num_blocks for layer in pool.layers.values()} == {11}
        assert pool.layer(3, *states(heads=1, key_dim=5)) is pool.layers[3]
        assert pool.num_bytes == pool._budget.allocated == 11 * pool.block_bytes

    def test_blocks_are_copied_in_every_layer(self):
        pool = make_pool(num_layers=2)
        pool.allocate(4)
        for layer in pool.layers.values():
            for plane in layer.blocks.planes:
                plane.copy_(torch.randn_like(plane))
        pool.move(Moves([(1, 3), (2, 4)], [], []))
        for layer in pool.layers.values():
            for plane in layer.blocks.planes:
                assert torch.equal(plane[:, 3:5], plane[:, 1:3])
        pool.move(Moves([], [], []))
        assert pool.copies == 2

    @pytest.mark.parametrize("value_dim", [16, 12])
    def test_a_failure_half_way_leaves_a_pool_that_can_be_used(self, memory, value_dim):
        """Memory runs out at the second layer, at its keys or at its values: nothing is lost or counted twice, and a
        later attempt succeeds."""
        pool = make_pool(num_layers=0)
        pool.layer(0, *states(key_dim=8))
        pool.layer(1, *states(key_dim=28 - value_dim, value_dim=value_dim))
        held = pool.allocate(5)
        for layer in pool.layers.values():
            layer.blocks.key[:, held] = layer.blocks.value[:, held] = 3.0
        memory.fail_at = (16, 7)
        with pytest.raises(MemoryError):
            pool.allocate(20)
        assert pool.allocator.num_referenced == 5
        assert pool.allocator.num_free == pool.allocator.num_blocks - 1 - 5
        assert [{plane.shape[1] for plane in layer.planes} for layer in pool.layers.values()] == [{26}, {6}]
        assert pool._budget.allocated == pool.num_bytes == memory.alive
        memory.fail_at = None
        pool.allocate(20)
        assert pool._budget.allocated == pool.num_bytes == memory.alive == pool.allocator.num_blocks * pool.block_bytes
        for layer in pool.layers.values():
            assert bool((layer.blocks.key[:, held] == 3).all())
            assert bool((layer.blocks.value[:, held] == 3).all())


class TestLimits:
    @pytest.mark.parametrize("num_tokens", range(1, 3 * SIZE + 2))
    @pytest.mark.parametrize("rows", [1, 3])
    def test_num_blocks_is_exact_at_every_length(self, num_tokens, rows):
        needed = rows * -(-num_tokens // SIZE)
        enough = make_pool(max_blocks=needed)
        extend(table_over(enough), rows, num_tokens)
        assert enough.allocator.num_blocks == needed + 1

        short = make_pool(max_blocks=needed - 1)
        table = table_over(short)
        with pytest.raises(OutOfBlocksError) as error:
            extend(table, rows, num_tokens)
        assert error.value.needed == needed
        assert error.value.block_bytes == BLOCK_BYTES
        assert f"needs {needed} more ({needed * BLOCK_BYTES:,} bytes)" in str(error.value)
        assert f"num_blocks={needed - 1} allows no more" in str(error.value)
        assert (table.num_columns, short.allocator.num_blocks, short.num_bytes) == (0, 1, 0)
        if needed > rows:
            extend(table, rows, num_tokens - SIZE)

    @pytest.mark.parametrize("num_tokens", [1, 4, 5, 12, 13])
    @pytest.mark.parametrize("num_layers", [1, 3])
    def test_memory_is_exact_to_the_byte(self, num_tokens, num_layers):
        """The null block counts; of layers that have not come yet it is supposed that they are like the others."""
        needed = -(-num_tokens // SIZE)
        bytes_needed = (needed + 1) * num_layers * BLOCK_BYTES
        for limit, is_enough in ((bytes_needed, True), (bytes_needed - 1, False)):
            pool = GroupPool(always(RawCodec()), SIZE, num_layers, MemoryBudget(limit))
            pool.layer(0, *states())
            table = table_over(pool)
            if is_enough:
                extend(table, 1, num_tokens)
                for layer_idx in range(1, num_layers):
                    pool.layer(layer_idx, *states())
                assert pool.num_bytes == pool._budget.allocated == limit
                continue
            with pytest.raises(OutOfBlocksError, match=f"memory={limit:,} bytes allows no more") as error:
                extend(table, 1, num_tokens)
            assert (error.value.needed, error.value.block_bytes) == (needed, num_layers * BLOCK_BYTES)
            assert (table.num_columns, pool.allocator.num_blocks, pool.num_bytes) == (0, 1, 0)

    @pytest.mark.parametrize("num_layers", [1, 3])
    @pytest.mark.parametrize("is_only_group", [True, False])
    @pytest.mark.parametrize("count", [1, 3, 39])
    def test_memory_is_never_exceeded_not_even_while_growing(self, memory, num_layers, is_only_group, count):
        """Keys or values of one layer are held twice while they grow: of a single layer that is half of it."""
        limit = 40 * num_layers * BLOCK_BYTES + 17
        pool = make_pool(num_layers, limit=limit, is_only_group=is_only_group)
        with pytest.raises(OutOfBlocksError):
            exhaust(pool, count)
        assert pool.allocator.num_referenced >= (24 if num_layers == 1 else 33)
        assert pool._budget.peak <= limit
        assert memory.peak <= limit

    def test_all_that_a_limit_allows_is_allocated_at_once(self):
        """So that nothing is ever moved; only groups that share a budget grow step by step."""
        assert (pool := make_pool(max_blocks=30)).allocate(1).size == 1
        assert pool.allocator.num_blocks == 31
        assert (pool := make_pool(limit=31 * BLOCK_BYTES)).allocate(1).size == 1
        assert pool.allocator.num_blocks == 31
        assert (pool := make_pool(limit=31 * BLOCK_BYTES, is_only_group=False)).allocate(1).size == 1
        assert pool.allocator.num_blocks == 2

    def test_the_stricter_of_two_limits_holds_and_is_named(self):
        pool = make_pool(limit=11 * BLOCK_BYTES, max_blocks=5)
        with pytest.raises(OutOfBlocksError, match="num_blocks=5 allows no more"):
            pool.allocate(6)
        pool = make_pool(limit=5 * BLOCK_BYTES, max_blocks=100)
        with pytest.raises(OutOfBlocksError, match=f"memory={5 * BLOCK_BYTES:,} bytes allows no more"):
            pool.allocate(6)

    def test_known_blocks_are_evicted_when_the_pool_may_not_grow(self):
        pool = make_pool(max_blocks=6)
        held = pool.allocate(6)
        pool.allocator.mark_cached(held[:4].tolist())
        pool.allocator.release(held)
        pool.check_room(6)
        pool.allocate(5)
        assert pool.allocator.reclaimed_blocks == 3
        with pytest.raises(OutOfBlocksError) as error:
            pool.allocate(2)
        assert (error.value.needed, error.value.free, error.value.total) == (2, 1, 6)
        assert pool.allocator.reclaimed_blocks == 3

        unlimited = make_pool()
        held = unlimited.allocate(6)
        unlimited.allocator.mark_cached(held.tolist())
        unlimited.allocator.release(held)
        unlimited.allocate(6)
        assert (unlimited.allocator.num_blocks, unlimited.allocator.reclaimed_blocks) == (13, 0)

    @pytest.mark.parametrize("options", [{"max_blocks": 9}, {"limit": 10 * BLOCK_BYTES}, {}], ids=str)
    def test_check_room_says_what_allocate_would(self, options):
        pool = make_pool(**options)
        pool.allocate(4)
        assert pool.is_limited == bool(options)
        for count in range(12):
            if options and count > 5:
                with pytest.raises(OutOfBlocksError) as error:
                    pool.check_room(count)
                assert (error.value.needed, error.value.free) == (count, 5)
            else:
                pool.check_room(count)
        assert pool.allocator.num_referenced == 4

    def test_room_is_for_blocks_and_exact_blocks_together(self):
        """Two pools on one budget, in which each would find room alone."""
        budget = MemoryBudget(12 * BLOCK_BYTES)
        exact = GroupPool(always(RawCodec()), SIZE, 1, budget, is_only_group=False, has_null_block=False)
        pool = GroupPool(always(make_codec("int4")), SIZE, 1, budget, is_only_group=False, exact_pool=exact)
        pool.layer(0, *states())
        pool.check_room(20)
        pool.check_room(0, 8)
        pool.check_room(10, 4)
        with pytest.raises(OutOfBlocksError):
            pool.check_room(20, 8)
        exact.allocate(4)
        pool.allocate(10)
        assert budget.allocated <= budget.limit

    def test_a_layer_that_has_no_room_is_refused_and_not_counted(self):
        pool = make_pool(limit=20 * BLOCK_BYTES)
        pool.allocate(5)
        with pytest.raises(OutOfBlocksError, match="bytes allows no more"):
            pool.layer(1, *states(key_dim=800))
        assert list(pool.layers) == [0]
        assert pool._budget.allocated == pool.num_bytes


class TestSharing:
    def test_bytes_come_back_with_the_last_holder(self, memory):
        budget = MemoryBudget(100 * BLOCK_BYTES)
        pool = GroupPool(always(RawCodec()), SIZE, 1, budget)
        pool.layer(0, *states())
        table = table_over(pool)
        extend(table, 1, 9)
        fork = table.fork(2)
        del pool, table
        assert budget.allocated == memory.alive > 0
        del fork
        assert budget.allocated == memory.alive == 0
        assert budget.remaining == budget.limit

    def test_groups_share_one_budget(self):
        budget = MemoryBudget(20 * BLOCK_BYTES)
        first, second = (GroupPool(always(RawCodec()), SIZE, 1, budget, is_only_group=False) for _ in range(2))
        first.layer(0, *states())
        second.layer(0, *states())
        first.allocate(8)
        second.allocate(8)
        assert budget.allocated == first.num_bytes + second.num_bytes == 18 * BLOCK_BYTES
        with pytest.raises(OutOfBlocksError, match=rf"\({18 * BLOCK_BYTES:,} are allocated\)"):
            first.allocate(3)
        del second
        assert budget.allocated == 9 * BLOCK_BYTES
        first.allocate(2)

    def test_a_deleted_fork_frees_its_blocks_for_a_full_pool(self):
        pool = make_pool(max_blocks=4)
        table = table_over(pool)
        extend(table, 1, 6)
        fork = table.fork(2)
        with pytest.raises(OutOfBlocksError):
            extend(fork, 2, 8)
        del fork
        extend(table, 1, 10)
        assert np.unique(table.block_ids[0, :4]).size == 4
