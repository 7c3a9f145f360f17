"""How keys and values are stored in blocks: one codec a file, picked by name."""

from typing import get_args

from hf_paged_kernels import Backend

from hf_paged_cache.codecs.base import Codec, Geometry
from hf_paged_cache.codecs.raw import RawCodec
from hf_paged_cache.errors import InvalidArgumentError

CODECS: dict[str, type[Codec]] = {"raw": RawCodec}


def make_codec(kv: str, backend: Backend | None = None) -> Codec:
    """The codec called `kv`, on the kernels called `backend`.

    Raises:
        InvalidArgumentError: there is none of that name.
    """
    if not isinstance(kv, str) or kv not in CODECS:
        raise InvalidArgumentError(f"unknown kv={kv!r}: expected one of {', '.join(map(repr, CODECS))}")
    if backend is not None and backend not in get_args(Backend):
        names = ", ".join(map(repr, get_args(Backend)))
        raise InvalidArgumentError(f"unknown backend={backend!r}: expected one of {names}, or None")
    return CODECS[kv](backend)


__all__ = ["CODECS", "Codec", "Geometry", "RawCodec", "make_codec"]
