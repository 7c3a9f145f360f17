"""A store as a file: what is read is what was saved, only for the same model, only when wanted, whole or not at all."""

from __future__ import annotations

import copy
import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_paged_cache import BlockStore, KVQuant, PagedCache, PagedCacheError, StoreFileError
from hf_paged_cache.pool import GroupPool
from hf_paged_cache.prefill import CACHE_ARGUMENT
from hf_paged_cache.prefix import PrefixNode
from hf_paged_cache.store_file import StoreFile

SIZE = 16
# With exact tokens few enough for prompts of a hundred to have codes in their middle.
INT4 = KVQuant("int4", hot_window=16, sink=16)
KINDS_OF_KV = ["raw", "int8", "fp8", INT4]
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prompts.safetensors"


@pytest.fixture
def model(llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return llama()


@pytest.fixture
def tokens(prompts: Callable[..., dict[str, Tensor]]) -> Callable[..., Tensor]:
    """`tokens(40, seed=0)`: one random prompt, `[1, 40]`."""
    return lambda length, seed=0: prompts(length, seed=seed)["input_ids"]


def make_store(model: PreTrainedModel, **options: Any) -> BlockStore:
    return BlockStore(model, **{"memory": "4MiB", "block_size": SIZE} | options)


def generate(model: PreTrainedModel, cache: PagedCache, ids: Tensor) -> Tensor:
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE_ARGUMENT: cache}
    return model.generate(**inputs, max_new_tokens=6, do_sample=False)


def answer(store: BlockStore, ids: Tensor, **options: Any) -> tuple[list[int], int]:
    """What the model generates after `ids` with what the store knows, and how many tokens it reused."""
    cache = store.cache_for(ids, **options)
    return generate(store.model, cache, ids)[0, ids.shape[1] :].tolist(), cache.stats().reused_tokens


def learn(store: BlockStore, ids: Tensor, **options: Any) -> None:
    """Makes a prompt and an answer to it known."""
    cache = store.cache_for(ids, **options)
    store.commit(cache, generate(store.model, cache, ids))


def num_allocated(store: BlockStore) -> int:
    return store.stats().bytes_allocated


def nodes_of(store: BlockStore) -> dict[tuple[Any, ...], PrefixNode]:
    """All runs of a store by salt, content key and all tokens up to their end."""
    found = {}
    for space, root in store._trees.items():
        for node in store._known.index.runs_after(root):
            runs, before = [], node
            while before.parent is not None:
                runs.append(before.run)
                before = before.parent
            found[space.salt, space.content_key, b"".join(reversed(runs))] = node
    return found


def written_bytes(store: BlockStore, node: PrefixNode) -> dict[tuple[int, int, str], bytes]:
    """The bytes of a run in memory by kind, layer and plane, without slots that no token of it is in."""
    found = {}
    for kind, pool in enumerate(store._known._pools):
        block_id = node.blocks[kind]
        for layer_idx, layer in pool.layers.items():
            for name, plane in layer.planes_by_name.items():
                if not block_id or (pool.quantizes_blocks(layer_idx) and node.num_tokens < SIZE):
                    continue
                heads = [pool.read_blocks(layer_idx, name, head, np.array([block_id])) for head in range(len(plane))]
                block = torch.cat(heads)
                if node.num_tokens < SIZE:
                    block = block[:, : node.num_tokens]
                found[kind, layer_idx, name] = block.numpy().tobytes()
    return found


def check_conserved(*stores: BlockStore) -> None:
    """Every block is free, reusable or held, and what is known is found by its id."""
    for store in stores:
        for kind, allocator in enumerate(store._known.allocators):
            counts = (allocator.num_free, allocator.num_reusable, allocator.num_referenced)
            assert sum(counts) == allocator.num_blocks - 1
            assert len(set(allocator._free)) == allocator.num_free
            known = {node.blocks[kind] for node in nodes_of(store).values()} - {0}
            assert known == allocator._retained
            assert not known & set(allocator._free)


def check_unheld(*stores: BlockStore) -> None:
    """No row holds a block, nor does anybody else."""
    check_conserved(*stores)
    for store in stores:
        assert all(allocator.num_referenced == 0 for allocator in store._known.allocators)


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize("kv", KINDS_OF_KV, ids=["raw", "int8", "fp8", "int4"])
    @pytest.mark.parametrize("family", ["full", "windowed"])
    def test_answers_and_blocks_are_as_before(self, family, kv, dtype, llama, windowed, tokens, path):
        model = copy.deepcopy(llama() if family == "full" else windowed(LAYER_TYPES, window=20)).to(dtype)
        store = make_store(model, kv=kv)
        learn(store, tokens(90))
        learn(store, torch.cat([tokens(90)[:, :50], tokens(20, seed=1)], 1))
        learn(store, tokens(33, seed=2))
        store.save(path)
        loaded = BlockStore.load(path, model, memory="4MiB")
        # Up to the end of what is known and on from there, in the middle of a run, and nothing known.
        asked = [
            torch.cat([tokens(90), tokens(5, seed=3)], 1),
            torch.cat([tokens(90)[:, :57], tokens(9, seed=4)], 1),
            tokens(33, seed=2),
            tokens(33, seed=5),
        ]
        assert [answer(loaded, ids) for ids in asked] == [answer(store, ids) for ids in asked]
        assert answer(loaded, asked[0])[1] >= 90
        before, after = nodes_of(store), nodes_of(loaded)
        assert before.keys() == after.keys()
        compared = 0
        for key, node in after.items():
            saved = written_bytes(store, before[key])
            for plane, read in written_bytes(loaded, node).items():
                assert read == saved[plane], (key, plane)
                compared += 1
        assert compared >= 20
        check_unheld(store, loaded)

    @pytest.mark.parametrize("kv", KINDS_OF_KV, ids=["raw", "int8", "fp8", "int4"])
    def test_a_batch_with_padding_and_copies_begins_alike(self, kv, model, prompts, tokens, path):
        store = make_store(model, kv=kv)
        learn(store, tokens(70))
        store.save(path)
        loaded = BlockStore.load(path, model, memory="4MiB")
        batch = prompts(40, 70)
        batch["input_ids"][0, 30:], batch["input_ids"][1] = tokens(70)[0, :40], tokens(70)[0]
        caches = [each.cache_for(**batch, copies=2) for each in (store, loaded)]
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == 69
        assert caches[0].stats().reused_tokens == caches[1].stats().reused_tokens > 0
        repeated = {name: value.repeat_interleave(2, 0) for name, value in batch.items()}
        outputs = [
            model.generate(**repeated, max_new_tokens=5, do_sample=False, **{CACHE_ARGUMENT: cache}) for cache in caches
        ]
        assert torch.equal(*outputs)
        check_conserved(store, loaded)
        del caches
        check_unheld(store, loaded)

    def test_choices_for_single_layers_come_back(self, windowed, tokens, path):
        kv = KVQuant("int4", hot_window=16, sink=16, key_group=16, layers={0: "raw", "sliding": "int8", 2: "k8v4"})
        store = make_store(windowed(LAYER_TYPES, window=20), kv=kv)
        learn(store, tokens(90))
        store.save(path)
        loaded = BlockStore.load(path, store.model, memory="4MiB")
        assert answer(loaded, tokens(90)) == answer(store, tokens(90))
        assert loaded._identity.current() == store._identity.current()

    def test_salts_and_content_keys_stay_apart(self, model, tokens, path):
        store = make_store(model)
        spaces = [{}, {"salt": "a"}, {"salt": "b"}, {"content_key": "a"}, {"salt": "a", "content_key": "b"}]
        for number, space in enumerate(spaces):
            learn(store, tokens(20 + 10 * number), **space)
        store.save(path)
        loaded = BlockStore.load(path, model, memory="4MiB")
        reused = [answer(loaded, tokens(80), **space)[1] for space in spaces]
        # What is generated ends before its last token, and a match before the first token that differs.
        assert all(20 + 10 * number <= length <= 25 + 10 * number for number, length in enumerate(reused))
        assert answer(loaded, tokens(80), salt="c")[1] == 0
        check_unheld(loaded)

    def test_another_process_uses_it(self, model, tokens, path, tmp_path):
        store = make_store(model)
        store.pin(tokens(60))
        store.save(path)
        model.save_pretrained(tmp_path / "model")
        ids = torch.cat([tokens(60), tokens(4, seed=1)], 1)
        script = f"""
            import json, torch
            from transformers import AutoModelForCausalLM
            from hf_paged_cache import BlockStore
            model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, attn_implementation="hf_paged")
            store = BlockStore.load({str(path)!r}, model.eval(), memory="1MiB")
            ids = torch.tensor({ids.tolist()})
            cache = store.cache_for(ids)
            options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
            output = model.generate(ids, **{{{CACHE_ARGUMENT!r}: cache}}, **options)[0, ids.shape[1] :].tolist()
            print(json.dumps([output, cache.stats().reused_tokens]))
        """
        code = "\n".join(line.removeprefix(" " * 12) for line in script.splitlines())
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1]
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == list(answer(store, ids))
        assert answer(store, ids)[1] == 60

    def test_an_empty_store_is_an_empty_file(self, model, tokens, path):
        make_store(model).save(path)
        loaded = BlockStore.load(path, model, memory="4MiB")
        assert answer(loaded, tokens(20))[1] == 0
        assert loaded.stats().runs_known == 0

    def test_what_a_changed_model_has_computed_is_saved_alone(self, llama, tokens, path):
        model = copy.deepcopy(llama())
        store = make_store(model)
        learn(store, tokens(40))
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        learn(store, tokens(20, seed=1))
        store.save(path)
        loaded = BlockStore.load(path, model, memory="4MiB")
        assert answer(loaded, tokens(40))[1] == 0
        assert answer(loaded, tokens(20, seed=1))[1] == 19

    def test_invalidate_before_saving_does_not_make_it_another_model(self, model, tokens, path):
        store = make_store(model)
        store.invalidate()
        learn(store, tokens(20))
        store.save(path)
        assert answer(BlockStore.load(path, model, memory="4MiB"), tokens(20))[1] == 19

    @pytest.mark.parametrize("kv", ["raw", INT4], ids=["raw", "int4"])
    def test_nothing_is_in_the_file_but_what_tokens_are_in(self, kv, model, tokens, path):
        store = make_store(model, kv=kv)
        learn(store, tokens(20))  # leaves a run of a few tokens, in a block of poison
        store.save(path)
        planes = load_file(path)
        num_tokens = planes["runs.num_tokens"]
        assert 0 < num_tokens[-1] < SIZE
        names = [name for name in planes if name.startswith("layers.") and "scale" not in name and "zero" not in name]
        for name in names:
            last = planes[name][:, -1].float()
            if kv == "raw" or "hot" in name:
                assert last[:, : num_tokens[-1]].isfinite().all()
                assert last[:, : num_tokens[-1]].any()
                last = last[:, num_tokens[-1] :]
            assert not last.any()


class TestLazily:
    def test_nothing_is_read_until_a_prompt_matches(self, model, tokens, path, monkeypatch):
        store = make_store(model)
        for seed in range(4):
            learn(store, tokens(60, seed=seed))
        store.save(path)
        read_plane, read = StoreFile.read_plane, []

        def counted(self, kind, layer_idx, name, places, *heads):
            read.append(len(places))
            return read_plane(self, kind, layer_idx, name, places, *heads)

        monkeypatch.setattr(StoreFile, "read_plane", counted)
        loaded = BlockStore.load(path, model, memory="4MiB")
        stats = loaded.stats()
        assert (num_allocated(loaded), stats.blocks_known, stats.bytes_known, read) == (0, 0, 0, [])
        assert stats.runs_known == store.stats().runs_known
        assert loaded.cache_for(tokens(60, seed=9)).stats().reused_tokens == 0
        assert (num_allocated(loaded), read) == (0, [])
        # 2 of the prompt's blocks, of each of 3 layers keys and values.
        loaded.cache_for(tokens(60, seed=1)[:, :33])
        assert read == [2] * 6
        assert loaded.stats().blocks_known == 2
        loaded.cache_for(tokens(60, seed=1)[:, :33])
        assert len(read) == 6

    def test_neighbouring_blocks_are_one_slice(self, model, tokens, path, monkeypatch):
        store = make_store(model)
        learn(store, tokens(90))
        store.save(path)
        file, slices = StoreFile(path), []
        cat = torch.cat
        monkeypatch.setattr(torch, "cat", lambda parts, dim: slices.append(len(parts)) or cat(parts, dim=dim))
        for places in ([0, 1, 2, 3], [0, 2, 3], [3, 1, 0]):
            read = file.read_plane(0, 1, "key", np.array(places))
            assert torch.equal(read, load_file(path)["layers.1.key"][:, places])
        assert slices == [1, 2, 3]

    def test_a_windowed_layer_reads_its_window_only(self, windowed, tokens, path):
        store = make_store(windowed(LAYER_TYPES, window=20))
        for length in (40, 70, 100):
            learn(store, tokens(length))
        store.save(path)
        loaded = BlockStore.load(path, store.model, memory="4MiB")
        assert answer(loaded, tokens(100)) == answer(store, tokens(100))
        blocks = {kinds.window: loaded._known.allocators[kinds.block].num_retained for kinds in loaded._known._groups}
        assert blocks[20] < blocks[None]

    def test_given_up_blocks_are_read_again(self, model, tokens, path):
        store = make_store(model)
        asked = [tokens(90, seed=seed) for seed in range(4)]
        for ids in asked:
            learn(store, ids)
        store.save(path)
        warm = [answer(store, ids) for ids in asked]
        block_bytes = store._root.groups[0].pool.block_bytes
        small = BlockStore.load(path, model, memory=10 * block_bytes)  # each prompt has 6 blocks
        for _ in range(3):
            for ids, expected in zip(asked, warm, strict=True):
                assert answer(small, ids) == expected
                check_unheld(small)
        assert small.stats().evictions > 10
        assert small.stats().runs_known == store.stats().runs_known

    @pytest.mark.parametrize("kv", KINDS_OF_KV, ids=["raw", "int8", "fp8", "int4"])
    def test_what_does_not_fit_is_not_reused(self, kv, windowed, tokens, path):
        store = make_store(windowed(LAYER_TYPES, window=20), kv=kv)
        learn(store, tokens(90))
        store.save(path)
        least = max(pool.block_bytes for pool in store._known._pools)
        for memory in (1, 2 * least, 6 * least, 12 * least):
            loaded = BlockStore.load(path, store.model, memory=memory)
            cache = loaded.cache_for(tokens(90))
            assert cache.get_seq_length() in (0, 89)
            assert bool(cache.stats().why) == (cache.get_seq_length() == 0)
            check_conserved(loaded)
            del cache
            check_unheld(loaded)

    def test_other_caches_keep_what_they_hold(self, model, tokens, path):
        store = make_store(model)
        learn(store, tokens(90))
        learn(store, tokens(90, seed=1))
        store.save(path)
        block_bytes = store._root.groups[0].pool.block_bytes
        loaded = BlockStore.load(path, model, memory=10 * block_bytes)
        first = loaded.cache_for(tokens(90))
        second = loaded.cache_for(tokens(90, seed=1))
        assert (first.get_seq_length(), second.get_seq_length()) == (89, 0)
        assert "no room" in second.stats().why
        check_conserved(loaded)
        assert generate(model, first, tokens(90))[0, 90:].tolist() == answer(store, tokens(90))[0]
        # What does not fit now may do so later, and is known of what is computed then.
        del first, second
        assert answer(loaded, tokens(90, seed=1)) == answer(store, tokens(90, seed=1))
        check_unheld(loaded)

    def test_an_error_while_reading_leaves_free_blocks(self, model, tokens, path, monkeypatch):
        store = make_store(model, kv=INT4)
        learn(store, tokens(90))
        store.save(path)
        loaded = BlockStore.load(path, model, memory="4MiB")
        write_blocks, written = GroupPool.write_blocks, []

        def failing(self, *arguments):
            written.append(arguments)
            if len(written) == 5:
                raise OSError(errno.EIO, "the disk is broken")
            write_blocks(self, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(GroupPool, "write_blocks", failing)
            with pytest.raises(OSError, match="the disk is broken"):
                loaded.cache_for(tokens(90))
        check_unheld(loaded)
        assert loaded.stats().blocks_known == 0
        assert answer(loaded, tokens(90)) == answer(store, tokens(90))

    def test_what_is_computed_after_it_stays_found(self, model, tokens, path):
        store = make_store(model)
        learn(store, tokens(50))
        store.save(path)
        loaded = BlockStore.load(path, model, memory="4MiB")
        longer = torch.cat([tokens(50), tokens(40, seed=1)], 1)
        learn(loaded, longer)
        cold = generate(model, PagedCache(model.config, block_size=SIZE), longer)[0, 90:].tolist()
        assert answer(loaded, longer) == (cold, 89)
        loaded.evict(2**40)
        assert loaded.stats().blocks_known == 0
        assert answer(loaded, longer)[1] in (48, 50)  # what is in the file
        check_unheld(loaded)

    def test_clear_lets_go_of_the_file(self, model, tokens, path):
        store = make_store(model)
        learn(store, tokens(50))
        store.save(path)
        loaded = BlockStore.load(path, model, memory="4MiB")
        loaded.cache_for(tokens(50))
        loaded.clear()
        assert loaded.stats().runs_known == 0
        assert loaded._known._file is None
        assert answer(loaded, tokens(50))[1] == 0
        check_unheld(loaded)

    def test_keys_of_a_dtype_that_nothing_tells_are_refused(self, model, tokens, path, monkeypatch):
        monkeypatch.setattr("hf_paged_cache.model_identity._autocast", lambda model: "")
        store = make_store(model)
        learn(store, tokens(50))
        store.save(path)
        loaded = BlockStore.load(path, model, memory="4MiB")
        with torch.autocast("cpu", torch.bfloat16):
            learn(loaded, tokens(20, seed=1))
        with pytest.raises(StoreFileError, match=r"layer 0 now has .*bfloat16.*saved with .*float32"):
            loaded.cache_for(tokens(50))
        check_unheld(loaded)

    def test_a_model_of_another_dtype_gives_the_file_up(self, model, tokens, path):
        store = make_store(model)
        learn(store, tokens(50))
        store.save(path)
        loaded = BlockStore.load(path, model, memory="4MiB")
        with torch.autocast("cpu", torch.bfloat16):
            learn(loaded, tokens(20, seed=1))
        assert loaded.cache_for(tokens(50)).stats().reused_tokens == 0
        check_unheld(loaded)


class TestSavingALoadedStore:
    @pytest.mark.parametrize("kv", KINDS_OF_KV, ids=["raw", "int8", "fp8", "int4"])
    def test_what_is_only_in_the_file_is_saved_too(self, kv, windowed, tokens, path, tmp_path):
        store = make_store(windowed(LAYER_TYPES, window=20), kv=kv)
        for seed in range(3):
            learn(store, tokens(60, seed=seed))
        store.save(path)
        loaded = BlockStore.load(path, store.model, memory="4MiB")
        loaded.save(tmp_path / "untouched")
        assert num_allocated(loaded) == 0
        assert (tmp_path / "untouched").read_bytes() == path.read_bytes()
        loaded.cache_for(tokens(60, seed=1))
        loaded.save(tmp_path / "touched")
        assert (tmp_path / "touched").read_bytes() == path.read_bytes()
        check_unheld(store, loaded)

    def test_over_the_file_it_was_loaded_from(self, model, tokens, path):
        store = make_store(model)
        learn(store, tokens(60))
        learn(store, tokens(60, seed=1))
        store.save(path)
        loaded = BlockStore.load(path, model, memory="4MiB")
        learn(loaded, torch.cat([tokens(60, seed=1)[:, :40], tokens(30, seed=2)], 1))
        loaded.save(path)
        assert answer(loaded, tokens(60)) == answer(store, tokens(60))  # still from the file as it was
        again = BlockStore.load(path, model, memory="4MiB")
        asked = [tokens(60), tokens(60, seed=1), torch.cat([tokens(60, seed=1)[:, :40], tokens(30, seed=2)], 1)]
        assert [answer(again, ids)[1] for ids in asked] == [59, 59, 69]
        assert [answer(again, ids) for ids in asked] == [answer(loaded, ids) for ids in asked]
        check_unheld(store, loaded, again)

    def test_another_file_in_its_place_is_not_read(self, model, tokens, path):
        first, second = make_store(model), make_store(model)
        learn(first, tokens(60))
        learn(second, tokens(90, seed=1))
        first.save(path)
        loaded = BlockStore.load(path, model, memory="4MiB")
        second.save(path)
        assert answer(loaded, tokens(60)) == answer(first, tokens(60))
        path.unlink()
        loaded.evict(2**40)
        assert answer(loaded, tokens(60)) == answer(first, tokens(60))


class TestRefusal:
    @pytest.fixture
    def saved(self, model, tokens, path) -> Path:
        store = make_store(model, kv=INT4)
        learn(store, tokens(50))
        store.save(path)
        return path

    def test_other_weights(self, saved, llama):
        model = copy.deepcopy(llama())
        with torch.no_grad():
            model.lm_head.weight[3, 3] += 1
        with pytest.raises(StoreFileError, match=r"weights: .* here, .* in the file"):
            BlockStore.load(saved, model, memory="4MiB")

    def test_another_dtype(self, saved, llama):
        with pytest.raises(StoreFileError, match=r"dtype: torch\.bfloat16 here, torch\.float32 in the file"):
            BlockStore.load(saved, copy.deepcopy(llama()).bfloat16(), memory="4MiB")

    def test_another_depth_and_attention(self, saved, llama):
        with pytest.raises(StoreFileError, match=r"num_hidden_layers: 2 here, 3 in the file"):
            BlockStore.load(saved, llama(num_layers=2), memory="4MiB")
        with pytest.raises(StoreFileError, match=r"implementations\.attention: sdpa here, hf_paged in the file"):
            BlockStore.load(saved, llama("sdpa"), memory="4MiB")

    def test_training_mode(self, saved, llama):
        with pytest.raises(StoreFileError, match="training: True here, False in the file"):
            BlockStore.load(saved, copy.deepcopy(llama()).train(), memory="4MiB")

    def test_a_codec_of_another_release(self, saved, model):
        rewrite(saved, lambda metadata: change_identity(metadata, codec='{"base":"int3","layers":{}}'))
        with pytest.raises(StoreFileError, match="int3"):
            BlockStore.load(saved, model, memory="4MiB")
        rewrite(saved, lambda metadata: change_identity(metadata, codec='{"base":"int4","layers":{}}'))
        with pytest.raises(StoreFileError, match="another codec than this release has"):
            BlockStore.load(saved, model, memory="4MiB")

    def test_codec_details_that_do_not_fit_the_planes(self, saved, model):
        metadata = metadata_of(saved)
        codec = json.loads(json.loads(metadata["identity"])["codec"]) | {"key_bits": 8}
        text = json.dumps(codec, sort_keys=True, separators=(",", ":"))
        rewrite(saved, lambda metadata: change_identity(metadata, codec=text))
        with pytest.raises(StoreFileError, match=r"layers\.0\.key as U8 .* instead of"):
            BlockStore.load(saved, model, memory="4MiB")

    def test_another_version(self, saved, model):
        rewrite(saved, lambda metadata: metadata | {"version": "7"})
        with pytest.raises(StoreFileError, match=r"version 7 .* not 1.*Save the store again"):
            BlockStore.load(saved, model, memory="4MiB")

    @pytest.mark.parametrize("missing", ["identity", "trees", "kinds"])
    def test_missing_metadata(self, missing, saved, model):
        rewrite(saved, lambda metadata: {name: text for name, text in metadata.items() if name != missing})
        with pytest.raises(StoreFileError, match="cannot be understood"):
            BlockStore.load(saved, model, memory="4MiB")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_tokens", 0),
            ("num_tokens", SIZE + 1),
            ("parent", 2),
            ("parent", -2),
            ("tree", 1),
            ("places", 99),
            ("places", 1),
        ],
    )
    def test_an_index_that_refers_to_what_is_not_there(self, name, value, saved, model):
        def damage(tensors: dict[str, Tensor]) -> None:
            tensors[f"runs.{name}"].view(-1)[0] = value

        rewrite(saved, tensors=damage)
        with pytest.raises(StoreFileError, match="refers to what is not there"):
            BlockStore.load(saved, model, memory="4MiB")

    @pytest.mark.parametrize("name", ["layers.1.key_scale", "layers.2.hot.value", "runs.parent"])
    def test_a_missing_tensor(self, name, saved, model):
        rewrite(saved, tensors=lambda tensors: tensors.pop(name))
        with pytest.raises(StoreFileError, match=name.removeprefix("runs.")):
            BlockStore.load(saved, model, memory="4MiB")

    def test_truncated_at_any_place(self, saved, model):
        whole = saved.read_bytes()
        header = int.from_bytes(whole[:8], "little") + 8
        cuts = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1}
        for length in sorted(cuts | set(range(0, len(whole), len(whole) // 40))):
            saved.write_bytes(whole[:length])
            with pytest.raises(StoreFileError, match=rf"of {length:,} bytes, .*truncated.*Save the store again"):
                BlockStore.load(saved, model, memory="4MiB")
        saved.write_bytes(whole)
        BlockStore.load(saved, model, memory="4MiB")

    @pytest.mark.parametrize("content", [b"hello", b"\0" * 1000, b"\xff" * 1000, b"PK\x03\x04" * 99])
    def test_something_else(self, content, path, model):
        path.write_bytes(content)
        with pytest.raises(StoreFileError, match="no whole safetensors file"):
            BlockStore.load(path, model, memory="4MiB")

    def test_other_safetensors(self, path, model):
        save_file({"weight": torch.zeros(3)}, path, metadata={"format": "pt"})
        with pytest.raises(StoreFileError, match=r"none that BlockStore\.save wrote: its format is 'pt'"):
            BlockStore.load(path, model, memory="4MiB")
        save_file({"weight": torch.zeros(3)}, path)
        with pytest.raises(StoreFileError, match="its format is None"):
            BlockStore.load(path, model, memory="4MiB")

    def test_no_file(self, tmp_path, model):
        with pytest.raises(FileNotFoundError):
            BlockStore.load(tmp_path / "nothing", model, memory="4MiB")
        with pytest.raises(IsADirectoryError):
            BlockStore.load(tmp_path, model, memory="4MiB")

    def test_the_error_is_what_a_caller_would_catch(self):
        assert issubclass(StoreFileError, PagedCacheError)
        assert issubclass(StoreFileError, ValueError)


class TestPublishing:
    @pytest.fixture
    def store(self, model, tokens) -> BlockStore:
        store = make_store(model)
        learn(store, tokens(50))
        return store

    @pytest.mark.parametrize("place", ["os.fsync", "os.replace", "read_blocks", "write"])
    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=["full", "interrupt"])
    @pytest.mark.parametrize("exists", [True, False])
    def test_a_failure_changes_nothing(self, exists, error, place, store, path, monkeypatch):
        if exists:
            path.write_bytes(b"what was there")
        calls = []

        def fail(*arguments: Any) -> None:
            calls.append(arguments)
            if place != "write" or len(calls) == 6:
                raise error

        with monkeypatch.context() as patched:
            if place == "read_blocks":
                patched.setattr(GroupPool, "read_blocks", fail)
            elif place == "write":
                patched.setattr("builtins.open", lambda *arguments: FailingFile(*arguments, fail))
            else:
                patched.setattr(place, fail)
            with pytest.raises(type(error)):
                store.save(path)
        assert calls
        assert os.listdir(path.parent) == ([path.name] if exists else [])
        assert not exists or path.read_bytes() == b"what was there"
        check_unheld(store)
        store.save(path)
        assert os.listdir(path.parent) == [path.name]
        BlockStore.load(path, store.model, memory="4MiB")

    def test_it_is_on_the_disk_before_it_is_there(self, store, path, monkeypatch):
        order, fsync, replace = [], os.fsync, os.replace

        def recorded_fsync(descriptor: int) -> None:
            order.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
            fsync(descriptor)

        def recorded_replace(source: Path, target: Path) -> None:
            assert source.parent == target.parent
            StoreFile(source)
            order.append("replace")
            replace(source, target)

        monkeypatch.setattr(os, "fsync", recorded_fsync)
        monkeypatch.setattr(os, "replace", recorded_replace)
        store.save(path)
        assert order[:2] == ["file", "replace"]
        assert len(order) == 3 or os.name != "posix"

    def test_a_link_goes_on_pointing_to_it(self, store, path, tmp_path):
        (tmp_path / "folder").mkdir()
        path.symlink_to(tmp_path / "folder" / "real")
        store.save(path)
        assert path.is_symlink()
        assert (tmp_path / "folder" / "real").is_file()

    def test_others_may_read_it(self, store, path):
        mask = os.umask(0o022)
        try:
            store.save(path)
        finally:
            os.umask(mask)
        assert path.stat().st_mode & 0o777 == 0o644

    def test_no_folder(self, store, tmp_path):
        with pytest.raises(FileNotFoundError):
            store.save(tmp_path / "nowhere" / "file")
        check_unheld(store)

    def test_lookups_go_on_while_it_is_saved(self, store, tokens, path, monkeypatch):
        """Also when the pools move, everything is forgotten, and blocks are wanted for something else."""
        read_blocks, answers, expected = GroupPool.read_blocks, [], answer(store, tokens(50))
        copied = make_store(store.model)
        learn(copied, tokens(50))

        def read_with_company(self, *arguments):
            if not answers:
                thread = threading.Thread(target=meanwhile)
                thread.start()
                thread.join(60)
            return read_blocks(self, *arguments)

        def meanwhile() -> None:
            answers.append(answer(store, tokens(50)))
            store.clear()
            learn(store, tokens(200, seed=1))
            store.evict(2**40)

        monkeypatch.setattr(GroupPool, "read_blocks", read_with_company)
        store.save(path)
        assert answers == [expected]
        copied.save(path.with_name("copied"))
        assert path.read_bytes() == path.with_name("copied").read_bytes()
        check_unheld(store)

    def test_no_more_than_a_head_of_a_plane_is_copied_at_once(self, store, path, monkeypatch):
        sizes, read_blocks = [], GroupPool.read_blocks

        def counted(self, *arguments):
            blocks = read_blocks(self, *arguments)
            sizes.append(blocks.nbytes)
            return blocks

        monkeypatch.setattr(GroupPool, "read_blocks", counted)
        store.save(path)
        plane = load_file(path)["layers.0.key"]
        assert max(sizes) == plane.nbytes // plane.shape[0]

    def test_every_tensor_can_be_read_in_place(self, store, path):
        store.save(path)
        header = int.from_bytes(path.read_bytes()[:8], "little")
        assert header % 8 == 0
        entries = json.loads(path.read_bytes()[8 : 8 + header])
        assert all(entry["data_offsets"][0] % 8 == 0 for name, entry in entries.items() if name != "__metadata__")


class FailingFile:
    """A file that asks `fail` before each write."""

    def __init__(self, path: Path, mode: str, fail: Callable[..., None]) -> None:
        self._file, self._fail = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY), "wb"), fail

    def __enter__(self) -> FailingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> None:
        self._fail(data)
        self._file.write(data)


def metadata_of(path: Path) -> dict[str, str]:
    return safe_open(path, "pt").metadata()


def rewrite(
    path: Path,
    metadata: Callable[[dict[str, str]], dict[str, str]] = lambda metadata: metadata,
    tensors: Callable[[dict[str, Tensor]], Any] = lambda tensors: None,
) -> None:
    """Changes a file."""
    present = {name: tensor.clone() for name, tensor in load_file(path).items()}
    changed = metadata(metadata_of(path))
    tensors(present)
    save_file(present, path, metadata=changed)


def change_identity(metadata: dict[str, str], **values: Any) -> dict[str, str]:
    identity = json.dumps(json.loads(metadata["identity"]) | values, sort_keys=True, separators=(",", ":"))
    return metadata | {"identity": identity}
