"""Whatever is done with a store in whatever order, each cache reads back what a model would have computed for it.

Keys and values are no model's here: those of a token are drawn from a generator that is seeded with all tokens up to
it, so that a block served for another prefix, or at another place, shows. There are three words, so that sequences
begin alike all the time, and so little memory that blocks are given up all the time.

A sequence holds images too, 100 and 101: each run of them is an image of its own, which the store is only told by its
key, as all of them have the same placeholder token.
"""

from __future__ import annotations

import tempfile
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from hf_paged_cache import BlockStore, InvalidArgumentError, OutOfBlocksError, PagedCache
from tests.blocks.test_conservation import PROFILE
from tests.conftest import SIZES

SIZE, WINDOW, NUM_BLOCKS = 16, 20, 20
CONFIG = Gemma3TextConfig(
    **{**SIZES, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1},
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=WINDOW,
)
BLOCK_BYTES = 2 * SIZE * SIZES["head_dim"] * 4  # of one layer
WORDS, IMAGE, IMAGES = [8, 9, 10], 11, [100, 101]
CONFIG.image_token_id = IMAGE
TOKENS = st.lists(st.sampled_from([*WORDS, *WORDS, *IMAGES]), min_size=1, max_size=20)


def states(tokens: list[int]) -> Tensor:
    """The keys of the last token of a sequence, which follow from all of it: `[head_dim]`."""
    return torch.from_numpy(np.random.default_rng(tokens).standard_normal(SIZES["head_dim"]).astype(np.float32))


def ids_of(*rows: list[int]) -> Tensor:
    """What the store is given of sequences."""
    return torch.tensor([[IMAGE if token in IMAGES else token for token in row] for row in rows])


def images_of(row: list[int]) -> dict[int, str]:
    """The keys of the images of a sequence, by where they begin."""
    runs = [[*run] for is_image, run in groupby(enumerate(row), lambda entry: entry[1] in IMAGES) if is_image]
    return {run[0][0]: str([token for _, token in run]) for run in runs}


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Gemma3ForCausalLM(CONFIG).eval()
        self.model.config._attn_implementation = "hf_paged"
        self.store = BlockStore(self.model, memory=2 * NUM_BLOCKS * BLOCK_BYTES, block_size=SIZE)
        self.stores = [self.store]
        self.live: list[tuple[BlockStore, PagedCache, list[list[int]]]] = []
        self.seen: list[list[int]] = [[8] * 30]  # sequences to begin like
        self.known: dict[tuple[int, ...], Tensor] = {}
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        self.folder.cleanup()

    # What a user does.

    @precondition(lambda self: len(self.live) < 4)
    @rule(
        end=TOKENS,
        kept=st.integers(0, 60),
        copies=st.integers(1, 2),
        new=st.integers(0, 25),
        others=st.booleans(),
        data=st.data(),
    )
    def look_up_and_generate(
        self, end: list[int], kept: int, copies: int, new: int, others: bool, data: st.DataObject
    ) -> None:
        """A prompt that begins like an earlier sequence, or has other images at the same places, and an answer."""
        prompt = data.draw(st.sampled_from(self.seen))[:kept] + end
        if others:
            prompt = [sum(IMAGES) - token if token in IMAGES else token for token in prompt]
        images = images_of(prompt)
        given = {"pixel_values": torch.arange(len(images))} if images and copies == 1 else {}
        keys = [[*images.values()]] * copies
        ids = ids_of(*[prompt] * copies)
        try:
            cache, rest = self.store.cache_and_inputs(ids, share=False, extra_key=keys, **given)
        except InvalidArgumentError:  # images that are neither given nor known
            assert images
            assert copies > 1
            return
        length = cache.get_seq_length()
        assert length < len(prompt)
        left = [number for number, start in enumerate(images) if start >= length]
        assert rest.get("pixel_values", torch.empty(0)).tolist() == (left if given else [])
        assert length == 0 or prompt[length] not in IMAGES or prompt[length - 1] not in IMAGES
        rows = [prompt[:length] for _ in range(copies)]
        self.live.append((self.store, cache, rows))
        self.check(cache, rows)
        answers = [[8 + (position * (row + 1)) % 3 for position in range(new)] for row in range(copies)]
        self.feed(len(self.live) - 1, [prompt[length:] + answer for answer in answers])

    @precondition(lambda self: self.live)
    @rule(tokens=TOKENS, data=st.data())
    def go_on(self, tokens: list[int], data: st.DataObject) -> None:
        place = self.pick(data)
        self.feed(place, [tokens] * len(self.live[place][2]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        place = self.pick(data)
        store, cache, rows = self.live[place]
        known = [tokens.tolist() for tokens in cache.provenance.rows]
        ids = ids_of(*rows)
        if len(known) != len(rows) or any(
            row[: len(begins)] != begins for row, begins in zip(ids.tolist(), known, strict=True)
        ):
            return  # cut, and gone on with something else
        store.commit(cache, ids)
        self.seen = [*self.seen, rows[0]][-8:]

    @precondition(lambda self: self.live)
    @rule(removed=st.integers(1, 30), data=st.data())
    def crop(self, removed: int, data: st.DataObject) -> None:
        place = self.pick(data)
        store, cache, rows = self.live[place]
        kept = max(len(rows[0]) - removed, 0)
        if not all(group.can_crop(kept) for group in cache.groups) or not cache.provenance:
            return
        for group in cache.groups:
            group.pool.ledger.commit(group.cropped(kept))
        cache.provenance = cache.provenance.cropped(kept)
        self.live[place] = (store, cache, [row[:kept] for row in rows])

    @precondition(lambda self: self.live and len(self.live) < 4)
    @rule(copies=st.integers(1, 2), data=st.data())
    def fork(self, copies: int, data: st.DataObject) -> None:
        store, cache, rows = self.live[self.pick(data)]
        self.live.append((store, cache.fork(copies), [row for row in rows for _ in range(copies)]))

    @precondition(lambda self: self.live)
    @rule(tokens=TOKENS, data=st.data())
    def fail(self, tokens: list[int], data: st.DataObject) -> None:
        """A forward pass that stops after the first layer."""
        _, cache, rows = self.live[self.pick(data)]
        try:
            self.update(cache, rows, [tokens] * len(rows), layers=[0])
        except OutOfBlocksError:
            return
        if rows[0]:
            cache.rollback()
        else:
            cache.reset()
            self.live = [entry for entry in self.live if entry[1] is not cache]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        del self.live[self.pick(data)]

    @rule(num_blocks=st.integers(1, 10))
    def evict(self, num_blocks: int) -> None:
        evictable = [allocator for allocator in self.store._cached.allocators if allocator.num_evictable]
        oldest = min(evictable, key=lambda allocator: allocator.oldest, default=None)
        block = None if oldest is None else next(iter(oldest._evictable))
        self.store.evict(num_blocks * BLOCK_BYTES)
        assert oldest is None or block not in oldest._evictable  # whatever layers it is of

    @rule()
    def clear(self) -> None:
        self.store.clear()

    @precondition(lambda self: not self.live)
    @rule()
    def save_and_load(self) -> None:
        path = Path(self.folder.name) / "store.safetensors"
        self.store.save(path)
        self.store = BlockStore.load(path, self.model, memory=2 * NUM_BLOCKS * BLOCK_BYTES)
        self.stores = [self.store]

    # What has to hold.

    @invariant()
    def no_block_is_lost(self) -> None:
        for store in self.stores:
            for kind, allocator in enumerate(store._cached.allocators):
                total = allocator.num_free + allocator.num_evictable + allocator.num_referenced
                assert total == allocator.num_blocks - 1
                known = [store._cached.index.node_of(kind, block) for block in range(allocator.num_blocks)]
                cached = [block for block in range(allocator.num_blocks) if allocator.is_cached(block)]
                assert [block for block, node in enumerate(known) if node is not None] == cached
        if not self.live:
            assert all(allocator.num_referenced == 0 for allocator in self.store._cached.allocators)

    @invariant()
    def every_token_reads_back(self) -> None:
        for _, cache, rows in self.live:
            self.check(cache, rows)

    # The model.

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.live) - 1))

    def expected(self, row: list[int], first: int = 0) -> Tensor:
        """Keys of the tokens from `first` on, `[1, tokens, head_dim]`."""
        for end in range(first + 1, len(row) + 1):
            if tuple(row[:end]) not in self.known:
                self.known[tuple(row[:end])] = states(row[:end])
        return torch.stack([self.known[tuple(row[:end])] for end in range(first + 1, len(row) + 1)])[None]

    def feed(self, place: int, new: list[list[int]]) -> None:
        """Tokens in two passes, or none of a pass that there is no room for."""
        store, cache, rows = self.live[place]
        half = len(new[0]) // 2
        for part in ([row[:half] for row in new], [row[half:] for row in new]):
            if not part[0]:
                continue
            try:
                self.update(cache, rows, part, layers=[0, 1])
            except OutOfBlocksError:
                break
            rows = [row + tokens for row, tokens in zip(rows, part, strict=True)]
        self.live[place] = (store, cache, rows)

    def update(self, cache: PagedCache, rows: list[list[int]], new: list[list[int]], layers: list[int]) -> None:
        longer = [row + tokens for row, tokens in zip(rows, new, strict=True)]
        keys = torch.stack([self.expected(row, len(row) - len(new[0])) for row in longer])
        for layer_idx in layers:
            cache.update(keys + layer_idx, -keys, layer_idx)

    def check(self, cache: PagedCache, rows: list[list[int]]) -> None:
        assert cache.get_seq_length() == len(rows[0])
        if not rows[0]:
            return
        for layer_idx, layer in enumerate(cache.layers):
            keys, values = layer.keys.materialize(), layer.values.materialize()
            for row, tokens in enumerate(rows):
                expected = self.expected(tokens, len(tokens) - keys.shape[2])
                torch.testing.assert_close(keys[row], expected + layer_idx, rtol=0, atol=0)
                torch.testing.assert_close(values[row], -expected, rtol=0, atol=0)


class TestStore(StoreMachine.TestCase):
    settings = settings(PROFILE, max_examples=15, stateful_step_count=40)


@pytest.mark.slow
class TestStoreAtLength(StoreMachine.TestCase):
    """Ten thousand steps."""

    settings = settings(PROFILE, max_examples=100, stateful_step_count=100)
