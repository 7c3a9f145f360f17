"""A store as a file: what is read is what was saved, only for the same model, only when wanted, whole or not at all."""

from __future__ import annotations

import copy
import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_paged_cache import BlockStore, InvalidArgumentError, KVQuant, PagedCache, StoreFileError
from hf_paged_cache.memory.group_pool import GroupPool
from hf_paged_cache.prefill import CACHE_ARGUMENT
from hf_paged_cache.prefix.store_file import StoreFile
from hf_paged_cache.prefix.tree import PrefixNode
from tests.support.combinations import combined
from tests.support.stores import (
    INT4,
    SIZE,
    answer,
    check_conserved,
    check_unheld,
    generate,
    learn,
    make_store,
    nodes_of,
    saved_and_loaded,
)

KINDS_OF_KV = ["raw", "int8", "fp8", INT4]
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prompts.safetensors"


@pytest.fixture
def model(llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return llama()


def num_allocated(store: BlockStore) -> int:
    return store.stats().bytes_allocated


def written_bytes(store: BlockStore, node: PrefixNode) -> dict[tuple[int, int, str], bytes]:
    """The bytes of a run in memory by kind, layer and plane, without slots that no token of it is in."""
    found = {}
    for kind, pool in enumerate(store._cached._pools):
        block_id = node.blocks[kind]
        for layer_idx, layer in pool.layers.items():
            for name, plane in layer.planes_by_name.items():
                if not block_id or (pool.quantizes_blocks(layer_idx) and node.num_tokens < SIZE):
                    continue
                heads = [pool.read_blocks(layer_idx, name, head, np.array([block_id])) for head in range(len(plane))]
                block = torch.cat(heads)
                if node.num_tokens < SIZE and name not in pool.block_planes(layer_idx):
                    block = block[:, : node.num_tokens]
                found[kind, layer_idx, name] = block.numpy().tobytes()
    return found


class TestRoundTrip:
    @combined(
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16},
        kv=dict(zip(["raw", "int8", "fp8", "int4"], KINDS_OF_KV, strict=True)),
        family=["full", "windowed"],
    )
    def test_answers_and_blocks_are_as_before(self, family, kv, dtype, llama, windowed, tokens, path):
        model = copy.deepcopy(llama() if family == "full" else windowed(LAYER_TYPES, window=20)).to(dtype)
        store = make_store(model, kv=kv)
        learn(store, tokens(90))
        learn(store, torch.cat([tokens(90)[:, :50], tokens(20, seed=1)], 1))
        learn(store, tokens(33, seed=2))
        loaded = saved_and_loaded(store, path)
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
        loaded = saved_and_loaded(store, path)
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
        kv = KVQuant(
            "int4", exact_recent=16, exact_sinks=16, key_group=16, layers={0: "raw", "sliding": "int8", 2: "k8v4"}
        )
        store = make_store(windowed(LAYER_TYPES, window=20), kv=kv)
        learn(store, tokens(90))
        loaded = saved_and_loaded(store, path)
        assert answer(loaded, tokens(90)) == answer(store, tokens(90))
        assert loaded._identity.current() == store._identity.current()

    def test_salts_and_extra_keys_stay_apart(self, model, tokens, path):
        store = make_store(model)
        spaces = [{}, {"salt": "a"}, {"salt": "b"}, {"extra_key": "a"}, {"salt": "a", "extra_key": "b"}]
        for number, space in enumerate(spaces):
            learn(store, tokens(20 + 10 * number), **space)
        loaded = saved_and_loaded(store, path)
        reused = [answer(loaded, tokens(80), **space)[1] for space in spaces]
        # What is generated ends before its last token, and a match before the first token that differs.
        assert all(20 + 10 * number <= length <= 25 + 10 * number for number, length in enumerate(reused))
        assert answer(loaded, tokens(80), salt="c")[1] == 0
        check_unheld(loaded)

    @pytest.mark.slow
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
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == list(answer(store, ids))
        assert answer(store, ids)[1] == 60

    def test_an_empty_store_is_an_empty_file(self, model, tokens, path):
        make_store(model).save(path)
        loaded = BlockStore.load(path, model, memory="4MiB")
        assert answer(loaded, tokens(20))[1] == 0
        assert loaded.stats().nodes == 0

    def test_what_a_changed_model_has_computed_is_saved_alone(self, llama, tokens, path):
        model = copy.deepcopy(llama())
        store = make_store(model)
        learn(store, tokens(40))
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        learn(store, tokens(20, seed=1))
        loaded = saved_and_loaded(store, path)
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
        num_tokens = planes["nodes.num_tokens"]
        assert 0 < num_tokens[-1] < SIZE
        names = [name for name in planes if name.startswith("layers.") and "scale" not in name and "zero" not in name]
        for name in names:
            last = planes[name][:, -1].float()
            if kv == "raw" or "exact" in name:
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
        assert (num_allocated(loaded), stats.blocks_cached, stats.bytes_cached, read) == (0, 0, 0, [])
        assert stats.nodes == store.stats().nodes
        assert loaded.cache_for(tokens(60, seed=9)).stats().reused_tokens == 0
        assert (num_allocated(loaded), read) == (0, [])
        # 2 of the prompt's blocks, of each of 3 layers keys and values.
        loaded.cache_for(tokens(60, seed=1)[:, :33])
        assert read == [2] * 6
        assert loaded.stats().blocks_cached == 2
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
        loaded = saved_and_loaded(store, path)
        assert answer(loaded, tokens(100)) == answer(store, tokens(100))
        blocks = {kinds.window: loaded._cached.allocators[kinds.block].num_cached for kinds in loaded._cached._groups}
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
        assert small.stats().reclaimed_blocks > 10
        assert small.stats().nodes == store.stats().nodes

    @pytest.mark.parametrize("kv", KINDS_OF_KV, ids=["raw", "int8", "fp8", "int4"])
    def test_what_does_not_fit_is_not_reused(self, kv, windowed, tokens, path):
        store = make_store(windowed(LAYER_TYPES, window=20), kv=kv)
        learn(store, tokens(90))
        store.save(path)
        least = max(pool.block_bytes for pool in store._cached._pools)
        with pytest.raises(InvalidArgumentError, match="no room for one block"):
            BlockStore.load(path, store.model, memory=1)
        for memory in (2 * least, 6 * least, 12 * least):
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
        loaded = saved_and_loaded(store, path)
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
        assert loaded.stats().blocks_cached == 0
        assert answer(loaded, tokens(90)) == answer(store, tokens(90))

    def test_what_is_computed_after_it_stays_found(self, model, tokens, path):
        store = make_store(model)
        learn(store, tokens(50))
        loaded = saved_and_loaded(store, path)
        longer = torch.cat([tokens(50), tokens(40, seed=1)], 1)
        learn(loaded, longer)
        cold = generate(model, PagedCache(model.config, block_size=SIZE), longer)[0, 90:].tolist()
        assert answer(loaded, longer) == (cold, 89)
        loaded.evict(2**40)
        assert loaded.stats().blocks_cached == 0
        assert answer(loaded, longer)[1] in (48, 50)  # what is in the file
        check_unheld(loaded)

    def test_clear_lets_go_of_the_file(self, model, tokens, path):
        store = make_store(model)
        learn(store, tokens(50))
        loaded = saved_and_loaded(store, path)
        loaded.cache_for(tokens(50))
        loaded.clear()
        assert loaded.stats().nodes == 0
        assert loaded._cached._saved is None
        assert answer(loaded, tokens(50))[1] == 0
        check_unheld(loaded)

    def test_keys_of_a_dtype_that_nothing_tells_are_refused(self, model, tokens, path, monkeypatch):
        monkeypatch.setattr("hf_paged_cache.prefix.model_identity._autocast", lambda model: "")
        store = make_store(model)
        learn(store, tokens(50))
        loaded = saved_and_loaded(store, path)
        with torch.autocast("cpu", torch.bfloat16):
            learn(loaded, tokens(20, seed=1))
        with pytest.raises(StoreFileError, match=r"layer 0 now has .*bfloat16.*saved with .*float32"):
            loaded.cache_for(tokens(50))
        check_unheld(loaded)

    def test_a_model_of_another_dtype_gives_the_file_up(self, model, tokens, path):
        store = make_store(model)
        learn(store, tokens(50))
        loaded = saved_and_loaded(store, path)
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
        loaded = saved_and_loaded(store, path)
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
        loaded = saved_and_loaded(store, path)
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
