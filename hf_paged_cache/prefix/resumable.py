"""What a store has to know of a model: whether blocks alone can resume its sequences, and where its layers compute."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_paged_cache.cache import PagedCache
from hf_paged_cache.hf.layers import PagedLayer
from hf_paged_cache.prefix.rope_positions import why_unknown_positions

# Configs of models whose prompts attend in both directions, which nothing in the config says.
_PREFIX_MODELS = frozenset({"colpali", "paligemma"})
# Names of a config, and of configs in it, for the tokens that images and the like are put in the place of.
PLACEHOLDERS = frozenset(f"{kind}_token_{what}" for kind in ("audio", "image", "video") for what in ("id", "index")) | {
    "image_patch_id",
    "visual_indicator_token_ids",  # Ovis 2 gives them another meaning where there are images
}


def why_never(cache: PagedCache, model: nn.Module) -> str:
    """Why blocks alone can never resume a sequence of this model; empty if they can."""
    config = model.config
    states = [idx for idx, layer in enumerate(cache.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]
    others = [idx for idx, layer in enumerate(cache.layers) if not isinstance(layer, PagedLayer)]
    if states:
        return f"layers {states} have recurrent states, which are not kept for each token"
    if others:
        return f"layers {others} are of kinds that are not kept in blocks"
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "cross_attention_layers", None):
        return "some layers attend to an image, which tokens do not tell"
    if config.model_type in _PREFIX_MODELS or getattr(text_config, "use_bidirectional_attention", None) in (
        True,
        "all",
    ):
        return "tokens of a prompt attend to later ones, so they depend on what follows"
    changing = _rope_types(getattr(text_config, "rope_parameters", None)) & {"dynamic", "longrope"}
    if changing:
        return f"keys under {changing.pop()!r} rope depend on the length of the sequence that they were computed in"
    return why_unknown_positions(model)


def why_not_now(model: Any) -> str:
    """Why blocks alone cannot resume a sequence under the adapters that are active; empty if they can.

    Activated LoRA applies from the last place on where certain tokens stand, so that keys depend on later tokens.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping):
        return ""
    waiting = {name for name, config in configs.items() if getattr(config, "alora_invocation_tokens", None)}
    try:
        active = model.active_adapters
        active = active() if callable(active) else active
    except ValueError:  # a model that PEFT has changed from within does not know
        active = waiting
    applied = waiting & ({active} if isinstance(active, str) else {*active})
    if not applied:
        return ""
    return f"adapter {min(applied)!r} applies from its invocation tokens on, so keys depend on what follows"


def counts_columns(model: Any) -> bool:
    """Whether a model may count positions from the first column, padding included, so that a text is not the same at
    another padding: `generate` gives it no positions."""
    return "position_ids" not in inspect.signature(model.forward).parameters


def placeholders(config: Any) -> list[int]:
    """The tokens of a prompt in whose place images, or other inputs beside tokens, are put."""
    found, waiting = set(), [config]
    while waiting:
        about = waiting.pop()
        for tokens in (getattr(about, name, None) for name in PLACEHOLDERS):
            found |= {*tokens} if isinstance(tokens, list | tuple) else {tokens} - {None}
        waiting += [value for value in vars(about).values() if isinstance(value, PreTrainedConfig)]
    return sorted(found)


def _rope_types(parameters: Any) -> set[str]:
    """The kinds of rotary embeddings that a config has, in all layers or by layer type."""
    if not isinstance(parameters, dict):
        return set()
    nested = set().union(*(_rope_types(value) for value in parameters.values()))
    return nested | ({parameters["rope_type"]} if "rope_type" in parameters else set())


def decoder_layers(model: Any) -> nn.ModuleList | None:
    """The layers of a model's decoder; `None` if it has no list of as many as its config says."""
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    return next((layers for layers in lists if len(layers) == num_layers), None)


def layer_device(model: Any, layer_idx: int) -> torch.device:
    """Where a layer of a model computes, and so where its keys are going to be."""
    layers = decoder_layers(model)
    parameter = None if layers is None else next(layers[layer_idx].parameters(), None)
    return model.device if parameter is None else parameter.device
