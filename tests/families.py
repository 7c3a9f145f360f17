"""Tiny random models, one a model family, whose ratios are those of the real ones.

Sizes are small, but whatever makes a family special for a cache is there and changes results: heads that outnumber
their keys, windows shorter than the prompts, soft caps and sinks that bite, layers that share or store no keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import transformers as hf
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor

VOCABULARY = 128
PAD, END, START, IMAGE, IMAGE_START, IMAGE_END, VIDEO = range(7)
FIRST_WORD = 8  # ids below are special and never generated

SLIDING, CHUNKED, FULL, LINEAR = "sliding_attention", "chunked_attention", "full_attention", "linear_attention"

ATTENTIONS = ("sdpa", "eager", "hf_paged")

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
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def rope(**options: float | list[int]) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 10_000.0, **options}


# What a model takes besides its prompt: (prompt ids, prompt mask, source of randomness) -> more inputs.
Companions = Callable[[Tensor, Tensor, torch.Generator], dict[str, Tensor]]


def no_companions(ids: Tensor, mask: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {}


def source_text(ids: Tensor, mask: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A text to encode, of the prompt's lengths, padded on the right as encoders are."""
    encoder_mask = mask.flip(1)
    words = torch.randint(FIRST_WORD, VOCABULARY, ids.shape, generator=generator)
    return {"input_ids": words.where(encoder_mask.bool(), PAD), "attention_mask": encoder_mask}


def audio(ids: Tensor, mask: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_features": torch.randn(ids.shape[0], 8, 40, generator=generator)}


def llava_image(ids: Tensor, mask: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ids.shape[0], 3, 8, 8, generator=generator)}


def gemma3_image(ids: Tensor, mask: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(ids.shape[0], 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "token_type_ids": (ids == IMAGE).long()}


def qwen2_vl_image(ids: Tensor, mask: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    batch = ids.shape[0]
    return {
        "pixel_values": torch.randn(batch * 16, 2 * 3 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(batch, 1),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }


def mllama_image(ids: Tensor, mask: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    batch, length = ids.shape
    return {
        "pixel_values": torch.randn(batch, 1, 1, 3, 8, 8, generator=generator),
        "aspect_ratio_ids": torch.ones(batch, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(batch, 1, 1, dtype=torch.long),
        "cross_attention_mask": mask.view(batch, length, 1, 1),
    }


@dataclass(frozen=True)
class Refusal:
    """Why transformers itself cannot do something, and in which releases (a version specifier)."""

    reason: str
    releases: str = ">=5.17"

    @property
    def holds(self) -> bool:
        return Version(hf.__version__) in SpecifierSet(self.releases)


@dataclass(frozen=True, eq=False)
class Family:
    """A tiny model of one family and what transformers itself can do with it.

    `refused` names the modes of `generate_modes` and the attention implementations that fail with transformers' own
    `DynamicCache`, some of them in some releases only. `prompt_start` are the special tokens before the words.
    """

    name: str
    feature: str
    config: Callable[[], hf.PreTrainedConfig]
    auto_class: type = hf.AutoModelForCausalLM
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    prompt_start: tuple[int, ...] = ()
    companions: Companions = no_companions

    @property
    def attentions(self) -> tuple[str, ...]:
        """The implementations that transformers runs the family with, the one to compare with first."""
        return tuple(name for name in ATTENTIONS if not self.refuses(name))

    def refuses(self, mode_or_attention: str) -> bool:
        refusal = self.refused.get(mode_or_attention)
        return refusal is not None and refusal.holds

    def build(self, attention: str) -> hf.PreTrainedModel:
        """The model in fp32, ready for `generate`; the same weights for every `attention`."""
        return self.build_from(self.config(), attention)

    def build_from(self, config: hf.PreTrainedConfig, attention: str) -> hf.PreTrainedModel:
        """The family's model with a changed `config`: the same weights as long as no shape changes."""
        torch.manual_seed(0)
        model = self.auto_class.from_config(config, attn_implementation=attention)
        randomize(model)
        model.generation_config.eos_token_id = END
        model.generation_config.pad_token_id = PAD
        model.generation_config.suppress_tokens = list(range(FIRST_WORD))
        return model.eval()


def randomize(model: hf.PreTrainedModel) -> None:
    """Weights so large that attention is sharp and every token of the context can change the next one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(2.0 * noise / parameter.shape[-1] ** 0.5)
            elif name.endswith("sinks"):
                parameter.copy_(3.0 + noise)
            else:
                parameter.add_(0.2 * noise)


def inputs(family: Family, lengths: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """A batch of random prompts with `lengths` words each, left-padded to the longest, with its attention mask.

    Families with images put one image before the words of each row. Encoder-decoder families get the prompts as
    decoder prompts, and something to encode.
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.tensor(family.prompt_start, dtype=torch.long)
    width = len(start) + max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        words = torch.randint(FIRST_WORD, VOCABULARY, (length,), generator=generator)
        prompt = torch.cat([start, words])
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    companions = family.companions(ids, mask, generator)
    if family.auto_class in (hf.AutoModelForSeq2SeqLM, hf.AutoModelForSpeechSeq2Seq):
        return {**companions, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    return {"input_ids": ids, "attention_mask": mask, **companions}


DRAFTS = ("assisted, equal draft", "assisted, weak draft")
NO_WINDOWED_DRAFT = dict.fromkeys(
    DRAFTS, Refusal("a windowed draft model gets more keys than its mask has columns", "<5.24")
)
NO_ROLLBACK = dict.fromkeys(
    (*DRAFTS, "prompt lookup"), Refusal("no assisted decoding for models with a recurrent state")
)
NO_EMBEDDINGS = {"warm cache, embeddings": Refusal("no `inputs_embeds` in `generate` for this class")}
NO_SDPA = {"sdpa": Refusal("no scaled dot product attention for this class")}
DECODER_ONLY = {
    "chunked prefill": Refusal("made for decoder-only models: cuts the encoder's mask with the prompt"),
    "warm cache, embeddings": Refusal("no decoder embeddings in `generate`"),
}

FAMILIES = (
    Family(
        "Llama",
        "grouped-query attention, 9 heads on 3",
        lambda: hf.LlamaConfig(
            **{**TEXT, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}, head_dim=8
        ),
    ),
    Family("Qwen2", "biases on q, k and v", lambda: hf.Qwen2Config(**TEXT)),
    Family("Qwen3", "norms on q and k", lambda: hf.Qwen3Config(**TEXT, head_dim=16)),
    Family(
        "Mistral",
        "a window in every layer",
        lambda: hf.MistralConfig(**{**TEXT, "num_hidden_layers": 3}, sliding_window=16),
        refused=NO_WINDOWED_DRAFT,
    ),
    Family(
        "Gemma 2",
        "soft cap, windows in every other layer",
        lambda: hf.Gemma2Config(
            **{**TEXT, "num_hidden_layers": 4},
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=16,
            attn_logit_softcapping=2.0,
        ),
        refused={
            **NO_WINDOWED_DRAFT,
            "sdpa": Refusal("refused for its soft cap, which 5.17 leaves out"),
        },
    ),
    Family(
        "Gemma 3",
        "two windowed layers to a full one, norms on q and k",
        lambda: hf.Gemma3TextConfig(
            **{**TEXT, "num_hidden_layers": 3},
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=16,
            layer_types=[SLIDING, SLIDING, FULL],
        ),
        refused=NO_WINDOWED_DRAFT,
    ),
    Family(
        "gpt-oss",
        "learned sinks, windows in every other layer, experts",
        lambda: hf.GptOssConfig(**TEXT, head_dim=16, sliding_window=16, num_local_experts=4, num_experts_per_tok=2),
        refused={**NO_WINDOWED_DRAFT, **NO_SDPA},
    ),
    Family("Phi-3", "partial rotary", lambda: hf.Phi3Config(**TEXT, rope_parameters=rope(partial_rotary_factor=0.5))),
    Family(
        "GPT-NeoX",
        "partial rotary, no grouped heads",
        lambda: hf.GPTNeoXConfig(
            **{k: v for k, v in TEXT.items() if k != "num_key_value_heads"},
            rope_parameters=rope(partial_rotary_factor=0.25),
        ),
    ),
    Family(
        "GPT-2",
        "learned positions",
        lambda: hf.GPT2Config(**IDS, **UNTIED, n_embd=32, n_layer=2, n_head=4, n_positions=256),
    ),
    Family(
        "Falcon",
        "one key head",
        lambda: hf.FalconConfig(
            **IDS, **UNTIED, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, multi_query=True
        ),
        refused={"hf_paged": Refusal("picks between attention classes of its own")},
    ),
    Family(
        "Bloom",
        "ALiBi",
        lambda: hf.BloomConfig(**IDS, **UNTIED, hidden_size=32, n_layer=2, n_head=4),
        refused=NO_SDPA,
    ),
    Family(
        "MPT",
        "ALiBi",
        lambda: hf.MptConfig(**IDS, **UNTIED, d_model=32, n_layers=2, n_heads=4, max_seq_len=256, use_cache=True),
        refused=NO_SDPA,
    ),
    Family(
        "DeepSeek V3",
        "latent keys, values of another width",
        lambda: hf.DeepseekV3Config(
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
        ),
    ),
    Family(
        "Llama 4",
        "chunked layers, layers without rotary",
        lambda: hf.Llama4TextConfig(
            **{**TEXT, "num_hidden_layers": 4},
            intermediate_size_mlp=64,
            head_dim=8,
            attention_chunk_size=16,
            no_rope_layer_interval=2,
            interleave_moe_layer_step=2,
            num_local_experts=4,
            floor_scale=16,
        ),
        refused=NO_WINDOWED_DRAFT,
    ),
    Family(
        "Qwen3-Next",
        "gated delta layers between attention layers",
        lambda: hf.Qwen3NextConfig(
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
        ),
        refused=NO_ROLLBACK,
    ),
    Family(
        "Jamba",
        "Mamba layers between attention layers",
        lambda: hf.JambaConfig(
            **{**TEXT, "num_hidden_layers": 4},
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=8,
            use_mamba_kernels=False,
            num_experts=2,
            num_experts_per_tok=1,
        ),
        refused=NO_ROLLBACK,
    ),
    Family(
        "Bamba",
        "Mamba 2 layers around an attention layer",
        lambda: hf.BambaConfig(
            **{**TEXT, "num_hidden_layers": 3},
            attn_layer_indices=[1],
            mamba_n_heads=8,
            mamba_d_state=8,
            mamba_chunk_size=16,
        ),
        refused={**NO_ROLLBACK, **NO_EMBEDDINGS},
    ),
    Family(
        "Falcon-H1",
        "Mamba and attention in one layer",
        lambda: hf.FalconH1Config(**TEXT, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_state=8, mamba_chunk_size=16),
        refused={**NO_ROLLBACK, **NO_EMBEDDINGS},
    ),
    Family(
        "LFM2",
        "convolutions around an attention layer",
        lambda: hf.Lfm2Config(
            **{**TEXT, "num_hidden_layers": 3},
            layer_types=["conv", FULL, "conv"],
            block_auto_adjust_ff_dim=False,
        ),
    ),
    Family(
        "Gemma 3n",
        "two layers that read the keys of others",
        lambda: hf.Gemma3nTextConfig(
            **{**TEXT, "num_hidden_layers": 5},
            head_dim=16,
            sliding_window=16,
            layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL],
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCABULARY,
            laurel_rank=8,
            altup_num_inputs=2,
        ),
        refused=NO_WINDOWED_DRAFT,
    ),
    Family(
        "Gemma 4",
        "two layers that read the keys of others, wider heads in full layers",
        lambda: hf.Gemma4TextConfig(
            **{**TEXT, "num_hidden_layers": 5},
            head_dim=8,
            global_head_dim=16,
            sliding_window=16,
            layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL],
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCABULARY,
        ),
        refused=NO_WINDOWED_DRAFT,
    ),
    Family(
        "T5",
        "encoder-decoder, relative positions",
        lambda: hf.T5Config(
            **{k: v for k, v in IDS.items() if k != "bos_token_id"},
            decoder_start_token_id=START,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=32,
        ),
        auto_class=hf.AutoModelForSeq2SeqLM,
        companions=source_text,
        refused=DECODER_ONLY,
    ),
    Family(
        "BART",
        "encoder-decoder, learned positions",
        lambda: hf.BartConfig(
            **IDS,
            **UNTIED,
            decoder_start_token_id=START,
            forced_eos_token_id=None,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            max_position_embeddings=256,
        ),
        auto_class=hf.AutoModelForSeq2SeqLM,
        companions=source_text,
        refused=DECODER_ONLY,
    ),
    Family(
        "Whisper",
        "encoder-decoder, audio",
        lambda: hf.WhisperConfig(
            **IDS,
            **UNTIED,
            decoder_start_token_id=START,
            begin_suppress_tokens=None,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=256,
        ),
        auto_class=hf.AutoModelForSpeechSeq2Seq,
        companions=audio,
        refused=DECODER_ONLY,
    ),
    Family(
        "LLaVA",
        "image tokens",
        lambda: hf.LlavaConfig(
            **UNTIED,
            text_config=hf.LlamaConfig(**TEXT),
            vision_config=hf.CLIPVisionConfig(**TOWER, image_size=8, patch_size=4),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        ),
        auto_class=hf.AutoModelForImageTextToText,
        prompt_start=(IMAGE,) * 4,
        companions=llava_image,
    ),
    Family(
        "Gemma 3 with images",
        "image tokens that see each other, windows",
        lambda: hf.Gemma3Config(
            **UNTIED,
            text_config=hf.Gemma3TextConfig(
                **TEXT, head_dim=16, query_pre_attn_scalar=16, sliding_window=16, layer_types=[SLIDING, FULL]
            ),
            vision_config=hf.SiglipVisionConfig(**TOWER, image_size=16, patch_size=4),
            image_token_index=IMAGE,
            boi_token_index=IMAGE_START,
            eoi_token_index=IMAGE_END,
            mm_tokens_per_image=4,
        ),
        auto_class=hf.AutoModelForImageTextToText,
        prompt_start=(IMAGE_START, *(IMAGE,) * 4, IMAGE_END),
        companions=gemma3_image,
        refused={**NO_WINDOWED_DRAFT, **NO_EMBEDDINGS},
    ),
    Family(
        "Qwen2-VL",
        "image tokens with positions in three axes",
        lambda: hf.Qwen2VLConfig(
            **UNTIED,
            text_config={**TEXT, "rope_parameters": rope(mrope_section=[1, 1, 2])},
            vision_config={
                "depth": 2,
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
        ),
        auto_class=hf.AutoModelForImageTextToText,
        prompt_start=(IMAGE_START, *(IMAGE,) * 4, IMAGE_END),
        companions=qwen2_vl_image,
        refused={"chunked prefill": Refusal("the positions of an image are not cut into chunks", "<5.24")},
    ),
    Family(
        "Mllama",
        "a cross-attention layer whose keys are those of the image",
        lambda: hf.MllamaConfig(
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
        ),
        auto_class=hf.AutoModelForImageTextToText,
        prompt_start=(IMAGE,),
        companions=mllama_image,
        refused={
            **dict.fromkeys((*DRAFTS, "prompt lookup"), Refusal("rolling back a draft also drops keys of the image")),
            "chunked prefill": Refusal("an image that is not encoded yet cannot be cut into chunks", ">=5.24"),
        },
    ),
)
