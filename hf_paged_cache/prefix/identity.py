"""What keys and values depend on beside their tokens: blocks are served only to the model that made them.

Two passes give the same keys and values for the same tokens if their model has the same code, config, weights,
adapters and mode. `Identity` says all of that in plain text and numbers, and `Namespace` adds what a user tells apart.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from hf_paged_cache.codecs import KVQuant, LayerCodecs
from hf_paged_cache.codecs.quant import PRESETS
from hf_paged_cache.errors import InvalidArgumentError

FORMAT_VERSION = 1
"""Of `Identity.to_json`; raise it when a field gets another meaning."""

_JSON_FIELDS = ("config", "implementations", "adapters", "codec")
_DIFFERENCES_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Identity:
    """What keys and values depend on beside their tokens. Equal identities have equal keys and values.

    Args:
        model_class: qualified name of the model's class.
        config: JSON of the config without what has no effect on keys and values.
        implementations: JSON of the attention and experts implementation, by sub-config. They change only the
            rounding; but a result should not depend on who has asked before.
        dtype: of the parameters; several are separated by commas. And that of `torch.autocast`, where it is on.
        weights: fingerprint of all parameters and buffers.
        adapters: JSON of what is active, disabled, merged and scaled, by layer with adapters.
        training: whether any module is in training mode, and dropout may apply.
        codec: JSON of how keys and values are stored, every detail given: `codec_text`.
        block_size: tokens a block.
        generation: how often `ModelIdentity.invalidate` was called.
        format_version: of this description.
    """

    model_class: str
    config: str
    implementations: str
    dtype: str
    weights: str
    adapters: str
    training: bool
    codec: str
    block_size: int
    generation: int = 0
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """The identity as text; equal ones have the same text."""
        return canonical(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Identity":
        """The identity that `to_json` wrote.

        Raises:
            InvalidArgumentError: the text is something else, or from another version of the format.
        """
        try:
            values = json.loads(text)
            is_valid = {name: type(value) for name, value in values.items()} == {
                field.name: field.type for field in dataclasses.fields(cls)
            }
            for name in _JSON_FIELDS:
                json.loads(values[name])
        except (ValueError, TypeError, AttributeError, KeyError):
            is_valid = False
        if not is_valid or values["format_version"] != FORMAT_VERSION:
            raise InvalidArgumentError(
                f"{shortened(text)} is no identity: expected what Identity.to_json wrote, format version "
                f"{FORMAT_VERSION}"
            )
        return cls(**values)

    def differences(self, other: "Identity", there: str = "in the file") -> list[str]:
        """The fields in which another identity differs, in words.

        Args:
            other: the other identity.
            there: where it is from.

        Returns:
            Texts like `"dtype: torch.float32 here, torch.bfloat16 in the file"`; none if both are equal. Of a field
            with many entries the first differences are shown.
        """
        found = []
        for field in dataclasses.fields(self):
            ours, theirs = (_entries(field.name, getattr(identity, field.name)) for identity in (self, other))
            paths = [path for path in ours | theirs if ours.get(path, _ABSENT) != theirs.get(path, _ABSENT)]
            for path in paths[:_DIFFERENCES_SHOWN]:
                here, elsewhere = (shortened(entries.get(path, _ABSENT)) for entries in (ours, theirs))
                found.append(f"{path}: {here} here, {elsewhere} {there}")
            if len(paths) > _DIFFERENCES_SHOWN:
                found.append(f"{field.name}: {len(paths) - _DIFFERENCES_SHOWN} more differences")
        return found


class _NamespaceFields(NamedTuple):
    identity: Identity
    salt: str | None


class Namespace(_NamespaceFields):
    """Key of a prefix tree: prompts share blocks only within one namespace.

    Args:
        identity: of the model.
        salt: tells apart users who must not find out about each other's prompts.

    Raises:
        InvalidArgumentError: a salt is no text.
    """

    __slots__ = ()

    def __new__(cls, identity: Identity, salt: str | None = None) -> "Namespace":
        if salt is not None and not isinstance(salt, str):
            raise InvalidArgumentError(
                f"salt={shortened(repr(salt))}: expected a str or None. Of bytes take a digest in hexadecimal"
            )
        return super().__new__(cls, identity, salt)


def codec_text(kv: str | KVQuant) -> str:
    """JSON of a codec with every detail given, so that a name and the details it stands for are the same.

    Raises:
        InvalidArgumentError: there is no such codec.
    """
    LayerCodecs(kv)  # checks it
    layers = {str(layer): _codec_details(kv.for_layer(layer)) for layer in kv.layers} if isinstance(kv, KVQuant) else {}
    details = _codec_details(kv)
    if details["base"] in PRESETS:
        layers.setdefault("sliding", _codec_details("raw"))  # as LayerCodecs does
    return canonical(details | {"layers": layers})


def kv_of_text(codec: str) -> str | KVQuant:
    """What `codec_text` gave the text of.

    Raises:
        ValueError: this release has no such codec.
    """
    details = json.loads(codec)
    layers = {
        layer if layer == "sliding" else int(layer): _quant_of(choice) for layer, choice in details["layers"].items()
    }
    kv = _quant_of(details | {"layers": layers})
    if codec_text(kv) != codec:
        raise ValueError(f"another codec than this release has: {codec}")
    return kv


def _quant_of(details: Mapping[str, Any]) -> str | KVQuant:
    return "raw" if details["base"] == "raw" else KVQuant(**details)


def _codec_details(kv: str | KVQuant) -> dict[str, Any]:
    if kv == "raw":
        return {"base": "raw"}
    quant = (KVQuant(kv) if isinstance(kv, str) else kv).filled()
    return {field.name: getattr(quant, field.name) for field in dataclasses.fields(quant) if field.name != "layers"}


def canonical(value: Any) -> str:
    """JSON that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


_ABSENT = "nothing"


def _entries(name: str, value: Any) -> dict[str, Any]:
    """The entries of a field by their paths; a field of one value is an entry itself."""
    value = json.loads(value) if name in _JSON_FIELDS else value
    pending, entries = [(name, value)], {}
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict) and value:
            pending.extend((f"{path}.{key}", value[key]) for key in reversed(value))
        else:
            entries[path] = value
    return entries


def shortened(value: Any, width: int = 60) -> str:
    """A value for a message."""
    text = str(value)
    return text if len(text) <= width else f"{text[: width // 2]}..{text[-width // 2 :]}"
