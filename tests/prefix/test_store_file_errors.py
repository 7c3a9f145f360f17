"""A store's file is published whole or not at all, and refused where it is damaged or of another model."""

from __future__ import annotations

import copy
import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_paged_cache import BlockStore, PagedCacheError, StoreFileError
from hf_paged_cache.memory.group_pool import GroupPool
from hf_paged_cache.prefix.store_file import StoreFile
from tests.support.stores import INT4, SIZE, answer, check_unheld, learn, make_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prompts.safetensors"


@pytest.fixture
def model(llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return llama()


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
        with pytest.raises(StoreFileError, match=r"version 7 .* not 2.*Save the store again"):
            BlockStore.load(saved, model, memory="4MiB")

    @pytest.mark.parametrize("missing", ["identity", "salts", "names", "kinds"])
    def test_missing_metadata(self, missing, saved, model):
        rewrite(saved, lambda metadata: {name: text for name, text in metadata.items() if name != missing})
        with pytest.raises(StoreFileError, match="cannot be understood"):
            BlockStore.load(saved, model, memory="4MiB")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("tokens", -1),
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
            tensors[f"nodes.{name}"].view(-1)[0] = value

        rewrite(saved, tensors=damage)
        with pytest.raises(StoreFileError, match="refers to what is not there"):
            BlockStore.load(saved, model, memory="4MiB")

    @pytest.mark.parametrize("name", ["layers.1.key_scale", "layers.2.exact.value", "nodes.parent"])
    def test_a_missing_tensor(self, name, saved, model):
        rewrite(saved, tensors=lambda tensors: tensors.pop(name))
        with pytest.raises(StoreFileError, match=name.removeprefix("nodes.")):
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
