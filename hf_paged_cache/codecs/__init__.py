"""How keys and values are stored in blocks: one codec a file, picked by name."""

from hf_paged_cache.codecs.base import Codec, Geometry
from hf_paged_cache.codecs.raw import RawCodec
from hf_paged_cache.errors import InvalidArgumentError

CODECS: dict[str, type[Codec]] = {"raw": RawCodec}


def make_codec(kv: str) -> Codec:
    """The codec called `kv`.

    Raises:
        InvalidArgumentError: there is none of that name.
    """
    if not isinstance(kv, str) or kv not in CODECS:
        raise InvalidArgumentError(f"unknown kv={kv!r}: expected one of {', '.join(map(repr, CODECS))}")
    return CODECS[kv]()


__all__ = ["CODECS", "Codec", "Geometry", "RawCodec", "make_codec"]
