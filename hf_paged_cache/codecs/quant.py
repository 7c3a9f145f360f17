"""What a user says about quantization: a name, or the details."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hf_paged_cache.arguments import is_integer
from hf_paged_cache.errors import InvalidArgumentError

BITS = (2, 4, 8)


@dataclass(frozen=True)
class KVQuant:
    """How keys and values are quantized, in detail: `PagedCache(config, kv=KVQuant("int4", exact_sinks=128))`.

    What is left out is as in `base`. Under `"int8"` and `"fp8"` every token is quantized by itself, when it is written,
    and only `key_offset`, the rotations and `layers` apply. Under the others a block is quantized when it is full: keys
    in groups along its tokens, values in groups along the channels, the first and the newest tokens not at all.

    Args:
        base: `"int8"`, `"fp8"`, `"int4"`, `"k8v4"`, `"k4v2"` or `"kivi2"`.
        key_bits, value_bits: of a code: 2, 4 or 8.
        key_group: tokens of a block whose keys share scale and zero in each channel.
        value_group: channels of a value that share scale and zero. What a group does not divide has smaller groups.
        key_coverage, value_coverage: part of the range of a group, in its middle, that the codes cover.
        exact_recent: newest tokens that stay exact, at least; what follows the last full block comes on top.
        exact_sinks: first tokens of each row that stay exact, rounded up to whole blocks.
        key_offset: under `"int8"` and `"fp8"`, whether codes of keys may say what is left without the offset of their
            block: its first key in the channels that stand out there. On unless it is `False`: without it, keys of
            models that have a large bias in a few channels (Qwen2) are read too coarsely.
        rotate_keys, rotate_values: multiply keys (and queries) or values by a Hadamard matrix before they are
            quantized; it is undone when they are read. What stays exact is rotated with them: in a model of 16 bits it
            is read with an error of 1.6e-3 (bfloat16) or 2.0e-4 (float16), relative, root mean square.
        layers: other choices for single layers: a layer index, or `"sliding"` for all layers with a window, and for
            each `"raw"`, another name, or a `KVQuant`. `exact_recent` and `exact_sinks` are the same in all layers.

    Raises:
        InvalidArgumentError: a value has no meaning.
    """

    base: str = "int4"
    key_bits: int | None = None
    value_bits: int | None = None
    key_group: int | None = None
    value_group: int | None = None
    key_coverage: float | None = None
    value_coverage: float | None = None
    exact_recent: int | None = None
    exact_sinks: int | None = None
    key_offset: bool | None = None
    rotate_keys: bool | None = None
    rotate_values: bool | None = None
    layers: Mapping[int | str, "str | KVQuant"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.base not in (*TOKEN_WISE, *PRESETS):
            names = ", ".join(map(repr, (*TOKEN_WISE, *PRESETS)))
            raise InvalidArgumentError(f"KVQuant({self.base!r}): expected one of {names}")
        given = [name for name in _DETAILS if getattr(self, name) is not None]
        if given and self.base in TOKEN_WISE:
            raise InvalidArgumentError(
                f"KVQuant({self.base!r}) has no {', '.join(given)}: each token is quantized by itself, with 8 bits"
            )
        if self.key_offset is not None and self.base not in TOKEN_WISE:
            raise InvalidArgumentError(
                f"KVQuant({self.base!r}) has no key_offset: its keys have a scale and a zero for each channel already"
            )
        for name in ("key_bits", "value_bits"):
            if getattr(self, name) not in (None, *BITS):
                raise InvalidArgumentError(f"{name}={getattr(self, name)!r}: expected 2, 4 or 8")
        for name, smallest in (("key_group", 8), ("value_group", 8), ("exact_recent", 0), ("exact_sinks", 0)):
            value = getattr(self, name)
            if value is not None and (not is_integer(value) or value < smallest):
                raise InvalidArgumentError(f"{name}={value!r}: expected a whole number of at least {smallest}")
        for name in ("key_coverage", "value_coverage"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise InvalidArgumentError(f"{name}={value!r}: expected a part of the range, above 0 and at most 1")
        for layer, choice in self.layers.items():
            if layer != "sliding" and (not is_integer(layer) or layer < 0):
                raise InvalidArgumentError(f"layers={{{layer!r}: ...}}: expected a layer index, or 'sliding'")
            if not isinstance(choice, str | KVQuant):
                raise InvalidArgumentError(f"layers={{{layer!r}: {choice!r}}}: expected a name, or a KVQuant")

    @property
    def is_token_wise(self) -> bool:
        """Whether each token is quantized by itself."""
        return self.base in TOKEN_WISE

    def for_layer(self, layer: "int | str") -> "str | KVQuant":
        """The choice of `layers` for a layer; what it leaves open about exact tokens is as here."""
        choice = self.layers[layer]
        quant = KVQuant(choice) if isinstance(choice, str) and choice in PRESETS else choice
        if isinstance(quant, str) or quant.is_token_wise or self.is_token_wise:
            return quant
        main = self.filled()
        kept = {name: getattr(main, name) for name in ("exact_recent", "exact_sinks") if getattr(quant, name) is None}
        return replace(quant, **kept)

    def filled(self) -> "KVQuant":
        """With every detail given."""
        preset = _TOKEN_WISE_PRESET if self.is_token_wise else PRESETS[self.base]
        return replace(self, **{name: value for name, value in preset.items() if getattr(self, name) is None})


TOKEN_WISE = ("int8", "fp8")
_TOKEN_WISE_PRESET = {"key_offset": True, "rotate_keys": False, "rotate_values": False}
_DETAILS = (
    "key_bits",
    "value_bits",
    "key_group",
    "value_group",
    "key_coverage",
    "value_coverage",
    "exact_recent",
    "exact_sinks",
)
_COMMON: dict[str, Any] = {
    "key_group": 64,
    "value_group": 64,
    "key_coverage": 1.0,
    "value_coverage": 1.0,
    "exact_recent": 64,
    "exact_sinks": 64,
    "rotate_keys": False,
    "rotate_values": False,
}
# Four codes are spread better over the middle of a range, and values without outliers.
_TWO_BIT_VALUES = {"value_bits": 2, "value_group": 32, "value_coverage": 0.85, "rotate_values": True}
PRESETS: dict[str, dict[str, Any]] = {
    "int4": _COMMON | {"key_bits": 4, "value_bits": 4},
    "k8v4": _COMMON | {"key_bits": 8, "value_bits": 4},
    "k4v2": _COMMON | {"key_bits": 4} | _TWO_BIT_VALUES,
    "kivi2": _COMMON
    | {"key_bits": 2, "key_group": 32, "key_coverage": 0.8}
    | _TWO_BIT_VALUES
    | {"value_coverage": 0.8},
}
