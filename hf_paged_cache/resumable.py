"""What a store has to know of a model: whether blocks alone can resume its sequences, and where its layers compute."""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_paged_cache.cache import PagedCache
from hf_paged_cache.layers import PagedLayer


def why_never(cache: PagedCache, config: Any) -> str:
    """Why blocks alone can never resume a sequence of this model; empty if they can."""
    states = [idx for idx, layer in enumerate(cache.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]
    others = [idx for idx, layer in enumerate(cache.layers) if not isinstance(layer, PagedLayer)]
    if states:
        return f"layers {states} have recurrent states, which are not kept for each token"
    if others:
        return f"layers {others} are of kinds that are not kept in blocks"
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "cross_attention_layers", None):
        return "some layers attend to an image, which tokens do not tell"
    changing = _rope_types(getattr(text_config, "rope_parameters", None)) & {"dynamic", "longrope"}
    if changing:
        return f"keys under {changing.pop()!r} rope depend on the length of the sequence that they were computed in"
    return ""


def _rope_types(parameters: Any) -> set[str]:
    """The kinds of rotary embeddings that a config has, in all layers or by layer type."""
    if not isinstance(parameters, dict):
        return set()
    nested = set().union(*(_rope_types(value) for value in parameters.values()))
    return nested | ({parameters["rope_type"]} if "rope_type" in parameters else set())


def layer_device(model: Any, layer_idx: int) -> torch.device:
    """Where a layer of a model computes, and so where its keys are going to be."""
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    layers = next((layers for layers in lists if len(layers) == num_layers), None)
    parameter = None if layers is None else next(layers[layer_idx].parameters(), None)
    return model.device if parameter is None else parameter.device
