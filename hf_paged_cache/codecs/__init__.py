"""How keys and values are stored in blocks: one codec a file, picked by name or by a `KVQuant`."""

from typing import get_args

from hf_paged_kernels import Backend

from hf_paged_cache.blocks.exact import ExactPolicy
from hf_paged_cache.codecs.base import Codec, Geometry
from hf_paged_cache.codecs.grouped import GroupedCodec
from hf_paged_cache.codecs.quant import PRESETS, KVQuant
from hf_paged_cache.codecs.raw import RawCodec
from hf_paged_cache.codecs.rotated import RotatedCodec
from hf_paged_cache.codecs.scaled import Fp8Codec, Int8Codec, ScaledCodec
from hf_paged_cache.errors import InvalidArgumentError

_SCALED: dict[str, type[ScaledCodec]] = {"int8": Int8Codec, "fp8": Fp8Codec}

CODECS = ("raw", *_SCALED, *PRESETS)
"""The names that `PagedCache(config, kv=...)` takes."""


class LayerCodecs:
    """The codec of each layer.

    Args:
        kv: a name from `CODECS`, or the details.
        backend: as in `Codec`.

    Attributes:
        exact_policy: what stays exact in layers that quantize whole blocks; `None` if there are none.

    Raises:
        InvalidArgumentError: there is no codec of that name, or two layers are to keep different tokens exact.
    """

    def __init__(self, kv: str | KVQuant, backend: Backend | None = None) -> None:
        if backend is not None and backend not in get_args(Backend):
            names = ", ".join(map(repr, get_args(Backend)))
            raise InvalidArgumentError(f"unknown backend={backend!r}: expected one of {names}, or None")
        self._default = make_codec(kv, backend)
        others = {layer: kv.for_layer(layer) for layer in kv.layers} if isinstance(kv, KVQuant) else {}
        if self._default.exact_policy is not None:
            # Layers with a window hold little and would lose the most.
            others.setdefault("sliding", "raw")
        self._others = {layer: make_codec(choice, backend) for layer, choice in others.items()}
        policies = {codec.exact_policy for codec in (self._default, *self._others.values())} - {None}
        if len(policies) > 1:
            raise InvalidArgumentError(f"exact_recent and exact_sinks have to be the same in all layers: {policies}")
        self.exact_policy: ExactPolicy | None = next(iter(policies), None)

    def of(self, layer_idx: int, *, is_sliding: bool) -> Codec:
        """The codec of a layer."""
        default = self._others.get("sliding", self._default) if is_sliding else self._default
        return self._others.get(layer_idx, default)


def make_codec(kv: str | KVQuant, backend: Backend | None = None) -> Codec:
    """The codec that `kv` names or describes, on the kernels called `backend`.

    Raises:
        InvalidArgumentError: there is none of that name.
    """
    if isinstance(kv, str) and kv in CODECS:
        if kv == "raw":
            return RawCodec(backend)
        kv = KVQuant(kv)
    if not isinstance(kv, KVQuant):
        names = ", ".join(map(repr, CODECS))
        raise InvalidArgumentError(f"unknown kv={kv!r}: expected one of {names}, or a KVQuant")
    kv = kv.filled()
    scaled = _SCALED.get(kv.base)
    codec: Codec = GroupedCodec(kv, backend) if scaled is None else scaled(backend, key_offset=kv.key_offset)
    if kv.rotate_keys or kv.rotate_values:
        return RotatedCodec(codec, rotates_keys=kv.rotate_keys, rotates_values=kv.rotate_values)
    return codec


__all__ = ["CODECS", "Codec", "Geometry", "GroupedCodec", "KVQuant", "LayerCodecs", "RawCodec", "make_codec"]
