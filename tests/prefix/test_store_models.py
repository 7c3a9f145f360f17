"""All models of the installed transformers: what they keep beside the cache, and what their placeholders are called.

What a new release adds has to be looked at before a store may serve it: these tests fail on it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, GenerationMixin, PreTrainedConfig, PreTrainedModel

from hf_paged_cache.prefix.resumable import PLACEHOLDERS, placeholders
from hf_paged_cache.prefix.rope_positions import STATE, keeps_positions, why_unknown_positions

pytestmark = pytest.mark.slow

MODELS = Path(transformers.__file__).parent / "models"

# Attributes that forward passes and `generate` set, other than those of caches, training, weights and encoders.
STATES = {
    "rope_deltas": "handled in rope_positions.py, or refused",
    "_cached_decode_position_ids": "GLM-Image, refused for its rope_deltas",
    "_prefill_len": "GLM-Image, refused for its rope_deltas",
    "recurrent_states": "RecurrentGemma, never reused",
    "conv1d_state": "RecurrentGemma, never reused",
    "layers_are_rescaled": "RWKV, never reused",
    "last_hidden_state": "Moshi, which generates two streams at once with a `generate` of its own",
    "generated_audio_codes": "Moshi, as above",
    "_stream_exhausted": "Voxtral Realtime, whose every token has audio added to it: inputs without placeholders",
    "codec_model": "Bark, which has a `generate` of its own",
    "hf_device_map": "Moshi: where layers are",
    "base_model_name_or_path": "adapters of speech models, while they are saved",
}
WITHOUT_EFFECT = re.compile(
    r"problem_type|.*requires_grad|.*padding_side|_hf_peft_config_loaded|_tied_weights_keys|weights?|input_dtype|"
    r"classifier|expert_capacity|first_transformer_layer_id|pos_encoding|cached_(rotary_pos|sequence_l).*|pe|embed_.*|"
    r".*latent_stats.*|onnx_trace|last_dropout|attn_(gradients|mask)|attention_map|_cache|_encoder_cache|expand|"
    r"relative_attention_bias|_embed|_seen_tokens|pos_enc|context_stack|count|af2_to_esm|input_conditioner|cache_implementation|do_sample|io_same_device"
)

# Models with `rope_deltas` whose positions cannot be given to them.
REFUSED = {
    "GlmImageForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniTalkerForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3OmniMoeTalkerForConditionalGeneration",
}
REFUSED_IN_OLD_RELEASES = {"Qwen2_5OmniThinkerForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"}
# They have the attribute, by their text or their parents, and do nothing with it.
UNUSED = {
    "Exaone4_5_ForConditionalGeneration",
    "HyperCLOVAXVisionV2ForConditionalGeneration",
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "CohereCompassForCausalLM",
    "Qwen4ExpForCausalLM",
}

# What stands beside placeholders and is a word as any other.
WORDS = re.compile(
    r"(vision|image|video|audio|low_res_image|frame)_(start|end|bos|eos)_token_id|audio_prompt_bos_token_id|"
    r"(boi|eoi|boa|eoa|bov|eov)_token_(id|index)|"
    r"audio_(delay|pad|latent|prompt)_token_id"  # of models that generate sound, given as ids
)


def generating_classes() -> Iterator[type[PreTrainedModel]]:
    """Classes that generate, of the files in which the attribute is named."""
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        if STATE in path.read_text():
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            for found in vars(module).values():
                is_own = inspect.isclass(found) and found.__module__ == module.__name__
                generates = is_own and issubclass(found, PreTrainedModel) and issubclass(found, GenerationMixin)
                if generates and found.config_class:
                    yield found


def test_every_model_that_keeps_positions_is_known() -> None:
    outcomes: dict[str, set[str]] = {"kept": set(), "refused": set(), "unused": set()}
    for model_class in generating_classes():
        try:
            with torch.device("meta"):
                model = model_class(model_class.config_class())
        except (KeyError, TypeError, AttributeError):  # defaults that make no model
            asks = "_prepare_position_ids_for_generation" in vars(model_class)
            outcome = "refused" if model_class.__name__ in REFUSED else "kept" if asks else "unused"
        else:
            outcome = "unused" if not keeps_positions(model) else "refused" if why_unknown_positions(model) else "kept"
        outcomes[outcome].add(model_class.__name__)
    assert outcomes["refused"] <= REFUSED | REFUSED_IN_OLD_RELEASES
    assert outcomes["unused"] <= UNUSED
    assert {"Qwen2VLForConditionalGeneration", "Glm4vForConditionalGeneration"} <= outcomes["kept"]
    assert not outcomes["kept"] & (REFUSED | UNUSED)


def set_in_passing(path: Path) -> Iterator[str]:
    """The attributes of modules that are set outside of what makes, loads or trains them."""
    for made in ast.parse(path.read_text()).body:
        if not isinstance(made, ast.ClassDef) or re.search("Cache|Layer$|Session|Output", made.name):
            continue
        for method in made.body:
            if isinstance(method, ast.FunctionDef) and not re.match(
                "__|_?(set|init|post_init|tie|resize|reset|freeze|prune|load|enable|disable|train|make)", method.name
            ):
                for node in ast.walk(method):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                        yield node.attr if ast.unparse(node).startswith("self.") else ""


def test_every_attribute_that_a_forward_pass_sets_is_known() -> None:
    found = set()
    for path in MODELS.glob("*/modeling_*.py"):
        if "GenerationMixin" in path.read_text():
            found |= {*set_in_passing(path)} - {""}
    unknown = {name for name in found if name not in STATES and not WITHOUT_EFFECT.fullmatch(name)}
    assert not unknown, "a state beside the cache? See `why_never` and rope_positions.py"
    assert STATE in found


def token_names(config: PreTrainedConfig) -> Iterator[str]:
    """Names of token ids that have to do with what is not text."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from token_names(value)
        elif re.search(r"token.*_(id|ids|index)$|patch_id$", name) and re.search(
            "image|video|audio|vision|visual|speech|img|media|patch|boi|eoi|frame|sound|point|pixel", name
        ):
            yield name


def test_every_placeholder_is_known() -> None:
    unknown = set()
    for name in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:  # defaults that make no config
            continue
        found = {*token_names(config)}
        unknown |= {token for token in found if token not in PLACEHOLDERS and not WORDS.fullmatch(token)}
    assert not unknown, "images in the place of which tokens? See `PLACEHOLDERS`"


def test_placeholders_of_nested_configs_are_found() -> None:
    assert {200010, 200011} <= {*placeholders(CONFIG_MAPPING["phi4_multimodal"]())}
    assert len(placeholders(CONFIG_MAPPING["ovis2"]())) > 1
