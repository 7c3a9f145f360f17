"""Names that caches of earlier transformers had: asking for one says what there is instead."""

from typing import Any, NoReturn

from hf_paged_cache.errors import UnsupportedAccessError

_OF_A_LAYER = "`cache.layers[i].keys` and `.values`, which are [batch, num_kv_heads, columns, head_dim]"


class _FormerName:
    """An attribute that is not there, so that `hasattr` says no.

    Args:
        instead: what to use, for the message.
    """

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise UnsupportedAccessError(
            f"{owner.__name__} has no {self._name!r}, as no cache has from transformers 5 on: use {self._instead}"
        )


class FormerNames:
    """What a cache does not have any more."""

    key_cache = _FormerName(_OF_A_LAYER)
    value_cache = _FormerName(_OF_A_LAYER)
    to_legacy_cache = _FormerName("`tuple((keys.clone(), values.clone()) for keys, values, _ in cache)`, a copy")
    from_legacy_cache = _FormerName("`PagedCache(model.config)`, filled by `cache.update(keys, values, layer_idx)`")
    seen_tokens = _FormerName("`cache.get_seq_length()`")
    get_usable_length = _FormerName("`cache.get_seq_length()`")
    batch_split = _FormerName("`cache.fork()`, and `batch_select_indices(rows)` on each fork")
    from_batch_splits = _FormerName("one cache for the whole batch")

    def __getitem__(self, layer_idx: Any) -> NoReturn:
        raise UnsupportedAccessError(f"cache[{layer_idx!r}]: a cache is no tuple any more. Use {_OF_A_LAYER}")
