"""What a store file says about the blocks in it: their nodes, and the kinds of blocks with their shapes."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged_cache.codecs import Geometry

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_DTYPES = {str(dtype): dtype for dtype in DTYPE_NAMES}


class SavedKind(NamedTuple):
    """What one kind of blocks is: those of a layer group, or its exact ones.

    Attributes:
        window: tokens that the layers of the group look back; `None` for all.
        is_exact: whether they are exact blocks.
        layers: shape and dtypes of the keys and values of each layer that has such blocks, by its index.
    """

    window: int | None
    is_exact: bool
    layers: Mapping[int, Geometry]

    def plane_name(self, layer_idx: int, name: str) -> str:
        """The tensor of a plane in the file."""
        return f"layers.{layer_idx}.{'exact.' if self.is_exact else ''}{name}"

    def as_json(self) -> dict[str, Any]:
        """All but the devices, for `from_json`."""
        layers = {}
        for layer_idx, geometry in self.layers.items():
            details = {name: value for name, value in asdict(geometry).items() if name != "device"}
            dtypes = {name: str(details[name]) for name in ("key_dtype", "value_dtype")}
            layers[str(layer_idx)] = details | dtypes
        return {"window": self.window, "is_exact": self.is_exact, "layers": layers}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "SavedKind":
        """What `as_json` gave; the layers are on the CPU."""
        layers = {}
        for layer_idx, details in values["layers"].items():
            dtypes = {name: _DTYPES[details[name]] for name in ("key_dtype", "value_dtype")}
            layers[int(layer_idx)] = Geometry(**details | dtypes, device=torch.device("cpu"))
        return cls(values["window"], values["is_exact"], layers)


class SavedNodes(NamedTuple):
    """The nodes of a file, each after its parent.

    Attributes:
        tokens: int32 `[nodes, block_size]`; 0 behind the last one of a node.
        num_tokens: int64 `[nodes]`
        parent: int64 `[nodes]`, the node before; -1 at the beginning of a tree.
        tree: int64 `[nodes]`
        places: int64 `[kinds, nodes]`, where the blocks of each kind stand in the planes; -1 for none.
    """

    tokens: np.ndarray
    num_tokens: np.ndarray
    parent: np.ndarray
    tree: np.ndarray
    places: np.ndarray

    @property
    def num_blocks(self) -> list[int]:
        """Blocks of each kind."""
        return (self.places >= 0).sum(axis=1).tolist()

    def are_sound(self, num_kinds: int, num_trees: int, block_size: int) -> bool:
        """Whether the numbers refer to what there is."""
        count = len(self.num_tokens)
        shapes = [(count, block_size), (count,), (count,), (count,), (num_kinds, count)]
        if [part.shape for part in self] != shapes:
            return False
        follows = self.parent >= 0
        before = self.parent[follows]
        return bool(
            ((self.num_tokens > 0) & (self.num_tokens <= block_size)).all()
            and ((self.parent >= -1) & (self.parent < np.arange(count))).all()
            and ((self.tree >= 0) & (self.tree < num_trees)).all()
            and (self.tree[before] == self.tree[follows]).all()
            and (self.num_tokens[before] == block_size).all()
            and all(
                np.array_equal(np.sort(places[places >= 0]), np.arange(num_blocks)) and (places >= -1).all()
                for places, num_blocks in zip(self.places, self.num_blocks, strict=True)
            )
        )
