"""What the arguments that people pass mean."""

import re
from typing import Any

from hf_paged_cache.errors import InvalidArgumentError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def is_integer(value: Any) -> bool:
    """Whether `value` is an int proper: `True` is one to Python, and a mistake where a number is expected."""
    return isinstance(value, int) and not isinstance(value, bool)


def parse_bytes(memory: int | str) -> int:
    """Bytes of `memory`: a number, or text such as `"2GiB"`, `"512 MB"`.

    Raises:
        InvalidArgumentError: it is neither, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(memory).lower())
    if isinstance(memory, bool) or match is None or match[2] not in _UNITS:
        raise InvalidArgumentError(f"memory={memory!r}: expected bytes as a number, or text such as '2GiB' or '512MB'")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size <= 0:
        raise InvalidArgumentError(f"memory={memory!r}: expected more than 0 bytes")
    return size
