"""The file of a `BlockStore`: its index and its blocks, for another process.

A safetensors file. What identifies the model and tells what is there is in its metadata, the rest are tensors:

    nodes.tokens               int32 [nodes, block_size]  tokens of each node, parents first; names are below 0
    nodes.num_tokens           int64 [nodes]              how many there are
    nodes.parent, nodes.tree   int64 [nodes]              the node before (-1: none), the tree
    nodes.places               int64 [kinds, nodes]       where its block of each kind stands in the planes (-1: none)
    layers.7.key               [num_kv_heads, blocks, ..] the planes of layer 7, as its codec stores them
    layers.7.exact.key         the same of its exact blocks

A file is opened by mapping it into memory, and a block is read when it is asked for.

Writing is done here and not by `safetensors.torch.save_file`, which takes all tensors at once: that would be a second
copy of the store. What is written here is one head of one plane at a time.
"""

import errno
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from hf_paged_cache.errors import StoreFileError
from hf_paged_cache.prefix.extra_keys import Name
from hf_paged_cache.prefix.identity import Identity, kv_of_text
from hf_paged_cache.prefix.store_format import DTYPE_NAMES, SavedKind, SavedNodes

FORMAT = "hf_paged_cache.BlockStore"
VERSION = "2"
"""Of the layout of the file; raise it when anything in it gets another meaning."""

_INDEX_DTYPES = {"tokens": torch.int32}  # of the others int64
_ALIGNMENT = 8


class TensorToWrite(NamedTuple):
    """A tensor of a file that is about to be written.

    Attributes:
        name: in the file.
        dtype, shape: of the whole.
        parts: gives it in pieces, contiguous each, in the order of its memory.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[torch.Tensor]]


class StoreFile:
    """An open file of a store. It stays readable when another one takes its place.

    Args:
        path: the file.

    Attributes:
        path: the file.
        identity: what its keys and values depend on beside their tokens.
        kv: how they are stored, as `BlockStore` takes it.
        salts: the salt of each tree.
        names: what numbers below zero stand for in the nodes.
        kinds: the kinds of blocks.
        nodes: the nodes.

    Raises:
        OSError: it cannot be opened.
        StoreFileError: it is damaged, or something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = _open(self.path)
        metadata = self._file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise StoreFileError(
                f"{path} is a safetensors file, but none that BlockStore.save wrote: its format is "
                f"{metadata.get('format')!r}, not {FORMAT!r}"
            )
        if metadata.get("version") != VERSION:
            raise self._error(f"is of version {metadata.get('version')} of the format, not {VERSION}")
        try:
            self.identity = Identity.from_json(metadata["identity"])
            self.kv = kv_of_text(self.identity.codec)
            self.salts: list[str | None] = [*json.loads(metadata["salts"])]
            self.names = {number: Name(*name) for number, name in json.loads(metadata["names"])}
            self.kinds = [SavedKind.from_json(kind) for kind in json.loads(metadata["kinds"])]
            self.nodes = SavedNodes(
                *(self._file.get_tensor(f"nodes.{name}").numpy().copy() for name in SavedNodes._fields)
            )
        except (LookupError, TypeError, ValueError, AttributeError, SafetensorError) as error:
            raise self._error(f"cannot be understood ({type(error).__name__}: {error})") from error
        is_sound = self.nodes.are_sound(len(self.kinds), len(self.salts), self.identity.block_size)
        if not is_sound or not {*self.nodes.tokens[self.nodes.tokens < 0].tolist()} <= {*self.names}:
            raise self._error("has an index that refers to what is not there")

    def check_identity(self, identity: Identity) -> None:
        """Raises `StoreFileError` if the blocks are of another model, or one that has changed."""
        differences = identity.differences(self.identity)
        if differences:
            raise StoreFileError(
                f"{self.path} was saved for another model, or before this one was changed: {'; '.join(differences)}"
            )

    def check_plane(self, kind: int, layer_idx: int, name: str, plane: torch.Tensor) -> None:
        """Raises `StoreFileError` if a plane has not the shape and dtype of `plane`."""
        full_name, expected = self.kinds[kind].plane_name(layer_idx, name), (list(plane.shape), plane.dtype)
        try:
            saved = self._file.get_slice(full_name)
        except SafetensorError as error:
            raise self._error(f"has no {full_name}") from error
        found = (saved.get_shape(), saved.get_dtype())
        if found != (expected[0], DTYPE_NAMES[expected[1]]):
            raise self._error(f"has {full_name} as {found[1]} {found[0]} instead of {expected[1]} {expected[0]}")

    def read_plane(
        self, kind: int, layer_idx: int, name: str, places: np.ndarray, heads: slice = slice(None)
    ) -> torch.Tensor:
        """Some blocks of a plane.

        Args:
            kind: kind of blocks.
            layer_idx: the layer.
            name: of the plane.
            places: int64 `[n]`, at least one.
            heads: which heads.

        Returns:
            `[heads, n, ...]`, on the CPU, a copy.
        """
        plane = self._file.get_slice(self.kinds[kind].plane_name(layer_idx, name))
        # Nodes that follow each other stand next to each other.
        neighbours = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
        return torch.cat([plane[heads, int(part[0]) : int(part[-1]) + 1] for part in neighbours], dim=1)

    def _error(self, what: str) -> StoreFileError:
        return StoreFileError(f"{self.path} {what}: it is damaged, or from another release. Save the store again")


def write_store_file(
    path: str | os.PathLike[str],
    identity: Identity,
    salts: Sequence[str | None],
    names: Mapping[int, Name],
    kinds: Sequence[SavedKind],
    nodes: SavedNodes,
    planes: Sequence[TensorToWrite],
) -> None:
    """Writes a file in the place of the one that is at `path`, if any: whole and for good, or not at all.

    Args:
        path: the file.
        identity: what the keys and values depend on beside their tokens.
        salts: the salt of each tree.
        names: what numbers below zero stand for in the nodes.
        kinds: the kinds of blocks.
        nodes: the nodes.
        planes: the planes of each layer and kind, named by `SavedKind.plane_name`.

    Raises:
        OSError: it cannot be written. What was at `path` is still there.
    """
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        # Another process has not changed its model yet.
        "identity": replace(identity, generation=0).to_json(),
        "salts": json.dumps(salts),
        "names": json.dumps([*names.items()]),
        "kinds": json.dumps([kind.as_json() for kind in kinds]),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    tensors, end = [*planes, *map(_index_tensor, SavedNodes._fields, nodes)], 0
    for tensor in tensors:
        start, end = end, end + prod(tensor.shape) * tensor.dtype.itemsize
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header).encode()
    # A block has at least 16 tokens, so with this each tensor begins where its dtype may be read in place.
    text += b" " * (-len(text) % _ALIGNMENT)
    with _replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            for part in tensor.parts():
                file.write(part.view(torch.uint8).flatten().numpy())


def _index_tensor(name: str, values: np.ndarray) -> TensorToWrite:
    dtype = _INDEX_DTYPES.get(name, torch.int64)
    tensor = torch.from_numpy(values).to(dtype, copy=True, memory_format=torch.contiguous_format)
    return TensorToWrite(f"nodes.{name}", tensor.dtype, tuple(tensor.shape), lambda: [tensor])


@contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when all has gone well, and is on the disk by then."""
    target = Path(os.path.realpath(path))  # the file itself, not a link to it
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    file = open(temporary, "xb")  # noqa: SIM115  closed below, before it is moved
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Puts the names in a folder on the disk, where the system can do that."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(descriptor)


def _open(path: Path) -> Any:
    """The mapped file.

    Raises:
        OSError: it cannot be opened.
        StoreFileError: it is no whole safetensors file.
    """
    while True:
        with open(path, "rb") as file:
            opened = os.fstat(file.fileno())
            try:
                mapped = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise StoreFileError(
                    f"{path}, of {opened.st_size:,} bytes, is no whole safetensors file ({error}): it is truncated, "
                    "damaged, or something else. Save the store again"
                ) from error
            # safetensors opens a file twice, for its header and for its data. They have to be of one file, also when
            # another process replaces it just now.
            if os.path.samestat(opened, os.stat(path)):
                return mapped
