"""The configs of the tiny models: sizes are small, but whatever makes a family special for a cache is there.

Heads outnumber their keys as in the real models, windows are shorter than the prompts of the tests, soft caps bite,
and layers share or store no keys where they do so in the real ones.
"""

from __future__ import annotations

import transformers as hf

VOCABULARY = 128
PAD, END, START, IMAGE, IMAGE_START, IMAGE_END, VIDEO = range(7)
FIRST_WORD = 8  # ids below are special and never generated

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"

IDS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": END, "eos_token_id": END}
UNTIED = {"tie_word_embeddings": False}
TEXT = {
    **IDS,
    **UNTIED,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def rope(**options: float | list[int]) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 10_000.0, **options}


def llama() -> hf.LlamaConfig:
    return hf.LlamaConfig(**{**TEXT, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}, head_dim=8)


def qwen2() -> hf.Qwen2Config:
    return hf.Qwen2Config(**TEXT)


def qwen3() -> hf.Qwen3Config:
    return hf.Qwen3Config(**TEXT, head_dim=16)


def mistral() -> hf.MistralConfig:
    return hf.MistralConfig(**{**TEXT, "num_hidden_layers": 3}, sliding_window=16)


def gemma_2() -> hf.Gemma2Config:
    return hf.Gemma2Config(
        **{**TEXT, "num_hidden_layers": 4},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=16,
        attn_logit_softcapping=2.0,
    )


def gemma_3() -> hf.Gemma3TextConfig:
    return hf.Gemma3TextConfig(
        **{**TEXT, "num_hidden_layers": 3},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=16,
        layer_types=[SLIDING, SLIDING, FULL],
    )


def gpt_oss() -> hf.GptOssConfig:
    return hf.GptOssConfig(**TEXT, head_dim=16, sliding_window=16, num_local_experts=4, num_experts_per_tok=2)


def phi_3() -> hf.Phi3Config:
    return hf.Phi3Config(**TEXT, rope_parameters=rope(partial_rotary_factor=0.5))


def gpt_neox() -> hf.GPTNeoXConfig:
    return hf.GPTNeoXConfig(
        **{k: v for k, v in TEXT.items() if k != "num_key_value_heads"},
        rope_parameters=rope(partial_rotary_factor=0.25),
    )


def gpt_2() -> hf.GPT2Config:
    return hf.GPT2Config(**IDS, **UNTIED, n_embd=32, n_layer=2, n_head=4, n_positions=256)


def falcon() -> hf.FalconConfig:
    return hf.FalconConfig(
        **IDS, **UNTIED, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, multi_query=True
    )


def bloom() -> hf.BloomConfig:
    return hf.BloomConfig(**IDS, **UNTIED, hidden_size=64, n_layer=2, n_head=8)


def mpt() -> hf.MptConfig:
    return hf.MptConfig(**IDS, **UNTIED, d_model=32, n_layers=2, n_heads=4, max_seq_len=256, use_cache=True)


def deepseek_v3() -> hf.DeepseekV3Config:
    return hf.DeepseekV3Config(
        **{**TEXT, "num_key_value_heads": 4},
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    )


def llama_4() -> hf.Llama4TextConfig:
    return hf.Llama4TextConfig(
        **{**TEXT, "num_hidden_layers": 4},
        intermediate_size_mlp=64,
        head_dim=8,
        attention_chunk_size=16,
        no_rope_layer_interval=2,
        interleave_moe_layer_step=2,
        num_local_experts=4,
        floor_scale=16,
    )


def qwen3_next() -> hf.Qwen3NextConfig:
    return hf.Qwen3NextConfig(
        **{**TEXT, "num_hidden_layers": 4},
        head_dim=16,
        layer_types=[LINEAR, FULL, LINEAR, FULL],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )


def jamba() -> hf.JambaConfig:
    return hf.JambaConfig(
        **{**TEXT, "num_hidden_layers": 4},
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        use_mamba_kernels=False,
        num_experts=2,
        num_experts_per_tok=1,
    )


def bamba() -> hf.BambaConfig:
    return hf.BambaConfig(
        **{**TEXT, "num_hidden_layers": 3},
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_state=8,
        mamba_chunk_size=16,
    )


def falcon_h1() -> hf.FalconH1Config:
    return hf.FalconH1Config(**TEXT, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_state=8, mamba_chunk_size=16)


def lfm2() -> hf.Lfm2Config:
    return hf.Lfm2Config(
        **{**TEXT, "num_hidden_layers": 3},
        layer_types=["conv", FULL, "conv"],
        block_auto_adjust_ff_dim=False,
    )


def gemma_3n() -> hf.Gemma3nTextConfig:
    return hf.Gemma3nTextConfig(
        **{**TEXT, "num_hidden_layers": 5},
        head_dim=16,
        sliding_window=16,
        layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL],
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=8,
        altup_num_inputs=2,
    )


def gemma_4() -> hf.Gemma4TextConfig:
    return hf.Gemma4TextConfig(
        **{**TEXT, "num_hidden_layers": 5},
        head_dim=8,
        global_head_dim=16,
        sliding_window=16,
        layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL],
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    )


def t5() -> hf.T5Config:
    return hf.T5Config(
        **{k: v for k, v in IDS.items() if k != "bos_token_id"},
        decoder_start_token_id=START,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=32,
    )


def bart() -> hf.BartConfig:
    return hf.BartConfig(
        **IDS,
        **UNTIED,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_position_embeddings=256,
    )


def whisper() -> hf.WhisperConfig:
    return hf.WhisperConfig(
        **IDS,
        **UNTIED,
        decoder_start_token_id=START,
        begin_suppress_tokens=None,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=256,
    )


def llava() -> hf.LlavaConfig:
    return hf.LlavaConfig(
        **UNTIED,
        text_config=hf.LlamaConfig(**TEXT),
        vision_config=hf.CLIPVisionConfig(**TOWER, image_size=8, patch_size=4),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )


def gemma_3_with_images() -> hf.Gemma3Config:
    return hf.Gemma3Config(
        **UNTIED,
        text_config=hf.Gemma3TextConfig(
            **TEXT, head_dim=16, query_pre_attn_scalar=16, sliding_window=16, layer_types=[SLIDING, FULL]
        ),
        vision_config=hf.SiglipVisionConfig(**TOWER, image_size=16, patch_size=4),
        image_token_index=IMAGE,
        boi_token_index=IMAGE_START,
        eoi_token_index=IMAGE_END,
        mm_tokens_per_image=4,
    )


def qwen2_vl() -> hf.Qwen2VLConfig:
    return hf.Qwen2VLConfig(
        **UNTIED,
        text_config={**TEXT, "rope_parameters": rope(mrope_section=[1, 1, 2])},
        vision_config={
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "patch_size": 4,
            "mlp_ratio": 2,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=IMAGE_START,
        vision_end_token_id=IMAGE_END,
    )


def mllama() -> hf.MllamaConfig:
    return hf.MllamaConfig(
        text_config={
            **TEXT,
            "num_hidden_layers": 3,
            "cross_attention_layers": [1],
            "rope_parameters": rope(),
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 2,
            "vision_output_dim": 32,
            "image_size": 8,
            "patch_size": 4,
            "max_num_tiles": 1,
            "supported_aspect_ratios": [[1, 1]],
            "intermediate_layers_indices": [0],
        },
        image_token_index=IMAGE,
    )
