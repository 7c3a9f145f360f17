"""Whether a limit of memory has room for anything at all, as far as a model's weights tell before the first keys."""

from typing import Any

from torch import nn

from hf_paged_cache.cache import PagedCache
from hf_paged_cache.codecs import Geometry
from hf_paged_cache.errors import InvalidArgumentError
from hf_paged_cache.hf.layers import PagedLayer
from hf_paged_cache.prefix.resumable import decoder_layers


def check_room_for_a_block(cache: PagedCache, model: Any) -> None:
    """Raises `InvalidArgumentError` if the memory of an empty cache cannot hold a block of each layer.

    Models whose layers have no `k_proj` and `v_proj` are left to the first forward pass.
    """
    modules = decoder_layers(model)
    layers = [layer for layer in cache.layers if isinstance(layer, PagedLayer)]
    if modules is None or any(layer.layer_idx >= len(modules) for layer in layers):
        return
    needed = 0
    for layer in layers:
        geometry = _geometry(modules[layer.layer_idx], model.config.get_text_config(decoder=True))
        if geometry is None:
            return
        needed += layer.group.pool.block_bytes_of(layer.layer_idx, geometry)
    limit = cache.memory_limit
    if limit is not None and needed > limit:
        raise InvalidArgumentError(
            f"memory={limit:,} bytes has no room for one block of {cache.block_size} tokens in {len(layers)} layers, "
            f"which is {needed:,} bytes: expected several times that, a smaller block_size, or a codec of fewer bits"
        )


def _geometry(layer: nn.Module, config: Any) -> Geometry | None:
    """Shape of the keys and values of a layer; `None` if its weights do not tell."""
    found = {name.rpartition(".")[2]: module for name, module in layer.named_modules()}
    key, value = found.get("k_proj"), found.get("v_proj")
    num_kv_heads = getattr(config, "num_key_value_heads", None)
    if not (isinstance(key, nn.Linear) and isinstance(value, nn.Linear) and isinstance(num_kv_heads, int)):
        return None
    if not key.weight.is_floating_point() or not num_kv_heads or key.out_features % num_kv_heads:
        return None
    dtype, device = key.weight.dtype, key.weight.device
    dims = (key.out_features // num_kv_heads, value.out_features // num_kv_heads)
    return Geometry(num_kv_heads, *dims, dtype, dtype, device)
