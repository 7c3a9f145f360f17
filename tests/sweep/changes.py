"""What the default config of a model has to be told before it is tiny and complete, by `model_type`."""

from __future__ import annotations

from typing import Any

from tests.support import family_configs

SLIDING, FULL = "sliding_attention", "full_attention"


def _rope(**options: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, **options}


def _of(config: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


_MROPE = {"text_config": {"rope_parameters": _rope(mrope_section=[2, 1, 1])}}
_GEMMA_4 = {
    "num_hidden_layers": 5,
    "global_head_dim": 16,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
}
_DECODER = {"decoder": {"is_decoder": True, "add_cross_attention": True}, "encoder": {"is_decoder": False}}

CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 8},
    "blt": {"encoder_hash_byte_group_vocab": 200, "encoder_hash_byte_group_size": [3]},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {FULL: _rope(mrope_section=[2, 1, 1])}},
    "cohere_compass": {"text_config": {"rope_parameters": {FULL: _rope(mrope_section=[2, 1, 1])}}},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "sliding_window": None},
    "dots3_note_text": {"head_dim": 16},
    "dots3_note": {"text_config": {"head_dim": 16}},
    "emu3": {"vocabulary_map": {"<image>": 3}},
    "encoder-decoder": _DECODER,
    "vision-encoder-decoder": _DECODER,
    "speech-encoder-decoder": _DECODER,
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": _rope(mrope_section=[1, 1, 2])}},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3n_text": {
        **_of(family_configs.gemma_3n(), "num_hidden_layers", "layer_types", "num_kv_shared_layers", "laurel_rank"),
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 5,
        "intermediate_size": 64,
    },
    "gemma4_text": _GEMMA_4,
    "gemma4_assistant": {"text_config": {**_GEMMA_4, "hidden_size_per_layer_input": 0}},
    "gemma4": {"text_config": _GEMMA_4},
    "gemma4_unified_text": _GEMMA_4,
    "gemma4_unified": {"text_config": _GEMMA_4},
    "glm46v": _MROPE,
    "glm4v": _MROPE,
    "glm4v_moe": {"text_config": {"rope_parameters": _rope(mrope_section=[2, 1, 1], partial_rotary_factor=1.0)}},
    "glm5_next": {"text_config": {"index_topk": 8, "index_kpool": 2}},
    "glm5_next_text": {"index_topk": 8, "index_kpool": 2},
    "glm_ocr": _MROPE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2, "mamba_n_heads": 8},
    "hunyuan_vl": {
        "rope_parameters": _rope(mrope_section=[2, 1, 1]),
        "text_config": {"rope_parameters": _rope(mrope_section=[2, 1, 1])},
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": 8, "hidden_size": 16, "num_filters": 4}},
    "lfm2_moe": {"layer_types": ["conv", FULL], "num_dense_layers": 1},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 1},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "use_mamba_kernels": False},
    "nemo_speechlm": {"text_config": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1}},
    "minimax_m3_vl_text": {
        "layer_types": [FULL, "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_local_blocks": 1,
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "paddleocr_vl": _MROPE,
    "qwen2_5_omni_thinker": _MROPE,
    "qwen2_5_vl": _MROPE,
    "qwen2_vl": _MROPE,
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "step3p7": {"text_config": {"sliding_window": 16}},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "xlm": {"emb_dim": 32, "n_layers": 2, "causal": True},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"], "is_decoder": True},
    "zamba": {
        "num_hidden_layers": 6,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "use_mamba_kernels": False,
    },
    "zaya": {"num_experts_per_tok": 1},
}
CHANGES["qwen4_exp"] = {"text_config": CHANGES["qwen4_exp_text"]}
