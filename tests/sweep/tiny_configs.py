"""A tiny config of any model of transformers, made from its default one by the names of its fields."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import transformers as hf
from transformers.models.auto.configuration_auto import AutoConfig

from tests.sweep.changes import CHANGES

VOCABULARY = 128
PAD, BOS, EOS = 0, 1, 2
FIRST_WORD = 16  # ids below may be special

Value = Any
Rule = tuple[str, Callable[[Value, Mapping[str, Value]], Value]]


def _at_most(limit: int) -> Callable[[Value, Mapping[str, Value]], Value]:
    return lambda value, _: limit if isinstance(value, int) and not isinstance(value, bool) else value


def _scaled(limit: int) -> Callable[[Value, Mapping[str, Value]], Value]:
    """A size; of a list, that size for each entry."""

    def shrink(value: Value, _: Mapping[str, Value]) -> Value:
        if isinstance(value, list | tuple) and value and all(isinstance(entry, int) for entry in value):
            return type(value)(min(entry, limit) for entry in value)
        return limit if isinstance(value, int) and not isinstance(value, bool) and value > 0 else value

    return shrink


def _kv_heads(value: Value, defaults: Mapping[str, Value]) -> Value:
    heads = next((defaults[name] for name in HEAD_FIELDS if isinstance(defaults.get(name), int)), None)
    if value is None:
        return 4
    if not isinstance(value, int) or heads is None:
        return value
    return 4 if value >= heads else 2 if value > 1 else 1


HEAD_FIELDS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")

# The first pattern that the whole name of a field matches decides.
RULES: tuple[Rule, ...] = (
    (r"vocab_size|.*_vocab_size|vocab_size_.*|n_vocab", _scaled(VOCABULARY)),
    (r"pad_token_id", lambda value, _: PAD),
    (r"bos_token_id", lambda value, _: BOS),
    (r"eos_token_id", lambda value, _: EOS),
    (r"decoder_start_token_id|sep_token_id", lambda value, _: EOS if isinstance(value, int) else value),
    (r"num_key_value_heads|num_kv_heads|.*_num_key_value_heads|.*_kv_heads|swa_num_key_value_heads", _kv_heads),
    (r"(.*_)?(num_attention_heads|n_heads?|num_heads|attention_heads)", _scaled(4)),
    (r"head_dim", lambda value, _: 8),
    (r"d_kv|qk_nope_head_dim|qk_rope_head_dim|v_head_dim|.*head_dim|.*head_dim_.*|kv_channels", _scaled(8)),
    (r"kv_lora_rank", _scaled(16)),
    (r"q_lora_rank", _scaled(24)),
    (r".*moe.*intermediate_size|.*expert.*intermediate_size", _scaled(32)),
    (r".*intermediate.*size.*|.*ffn_dim|.*ffn_hidden.*|n_inner|d_ff|mlp_dim|.*ffn_size", _scaled(64)),
    (
        r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|.*_hidden_size|hidden_dim|.*_hidden_dim|"
        r"word_embed_proj_dim|text_embed_dim|lru_width|attention_hidden_size|d_embed|.*projection_dim|output_dim",
        _scaled(32),
    ),
    (r"num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_layers|num_.*_layers", _at_most(2)),
    (r"num_experts_per_tok|num_experts_per_token|moe_topk|top_k_experts|moe_k", _at_most(2)),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts", _scaled(4)),
    (r"n_group|topk_group", _at_most(1)),
    (r"first_k_dense_replace", _at_most(1)),
    (r"(.*_)?sliding_window|attention_window|attention_chunk_size|window_size", _scaled(16)),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions|.*_max_position_embeddings",
        _scaled(512),
    ),
    (r"index_topk", _scaled(6)),
    (r"is_decoder", lambda value, defaults: not defaults.get("is_encoder_decoder")),
    (r"num_codebooks", _scaled(3)),
    (r"image_size", _scaled(32)),
    (r"patch_size", _scaled(8)),
    (r"codebook_size|audio_codebook_size|num_mel_bins|feature_size", _scaled(16)),
)
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in RULES)


def tiny_config(config_class: type[hf.PreTrainedConfig], changes: Mapping[str, Value] | None = None) -> Any:
    """A tiny config of `config_class`, with `changes` of its fields; those of a part are a mapping, by its name."""
    changes = {**CHANGES.get(config_class.model_type, {}), **(changes or {})}
    try:
        default = config_class()
    except Exception:  # classes that need their parts
        default = None
    defaults = _fields(config_class, default)
    values: dict[str, Value] = {}
    for name, part_class in getattr(config_class, "sub_configs", {}).items():
        part = defaults.get(name)
        if isinstance(part, hf.PreTrainedConfig):
            values[name] = tiny_config(type(part), changes.pop(name, None))
        elif part_class is not AutoConfig and (part is not None or default is None):
            values[name] = tiny_config(part_class, changes.pop(name, None))
    for name, value in defaults.items():
        if name not in values and name not in changes and name != "per_layer_config":
            shrunk = _shrunk(name, value, defaults)
            if shrunk is not value:
                values[name] = shrunk
    values |= _layer_lists(defaults)
    values |= _rope(defaults, {**defaults, **values, **changes})
    return config_class(**{**values, **changes})


def _fields(config_class: type, default: Any) -> dict[str, Value]:
    base = {field.name for field in dataclasses.fields(hf.PreTrainedConfig)} - {"is_encoder_decoder"}
    names = [field.name for field in dataclasses.fields(config_class) if field.name not in base]
    if default is None:
        return {
            field.name: field.default
            for field in dataclasses.fields(config_class)
            if field.name in names and field.default is not dataclasses.MISSING
        }
    return {name: _value(default, name) for name in names}


def _value(default: Any, name: str) -> Value:
    try:
        return getattr(default, name, None)
    except Exception:  # says that it differs by layer
        return vars(default).get(name)


def _shrunk(name: str, value: Value, defaults: Mapping[str, Value]) -> Value:
    for pattern, rule in _COMPILED:
        if pattern.fullmatch(name):
            return rule(value, defaults)
    if re.fullmatch(r".*_token_(id|index)|.*_token", name) and isinstance(value, int) and value >= FIRST_WORD:
        return 3 + sum(map(ord, name)) % (FIRST_WORD - 3)
    return value


def _layer_lists(defaults: Mapping[str, Value]) -> dict[str, Value]:
    """One layer of each kind in `layer_types`, at least two, and the same cut of other lists with an entry a layer."""
    layer_types = defaults.get("layer_types")
    if not isinstance(layer_types, list | tuple) or not layer_types:
        return {}
    kept = sorted({kind: index for index, kind in reversed(list(enumerate(layer_types)))}.values())
    if len(kept) == 1:
        kept = list(range(min(2, len(layer_types))))
    cut = {
        name: [value[index] for index in kept]
        for name, value in defaults.items()
        if isinstance(value, list | tuple) and len(value) == len(layer_types)
    }
    counts = [name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in defaults]
    return cut | dict.fromkeys(counts, len(kept))


def _rope(defaults: Mapping[str, Value], values: Mapping[str, Value]) -> dict[str, Value]:
    """Rotary sections of the tiny heads."""
    parameters = defaults.get("rope_parameters")
    if not isinstance(parameters, dict) or "mrope_section" not in parameters:
        return {}
    return {"rope_parameters": {**parameters, "mrope_section": [2, 1, 1]}}
