"""Tiny random models, one a model family, their inputs, and what transformers itself cannot do with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import transformers as hf
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor, nn

from tests.support import family_configs as configs
from tests.support.family_configs import END, FIRST_WORD, IMAGE, IMAGE_END, IMAGE_START, PAD, VOCABULARY

ATTENTIONS = ("sdpa", "eager", "hf_paged")

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
    `DynamicCache`, some of them in some releases only; `remarks` are on modes that work. `prompt_start` are the special
    tokens before the words.
    """

    name: str
    feature: str
    config: Callable[[], hf.PreTrainedConfig]
    auto_class: type = hf.AutoModelForCausalLM
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
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


def family_called(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def randomize(model: nn.Module) -> None:
    """Weights so large that attention is sharp and any token of the context can change the next one."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                noise = torch.randn(parameter.shape, generator=generator)
                if name == "sinks":
                    parameter.copy_(3.0 + noise)
                elif parameter.dim() == 1:
                    parameter.add_(0.2 * noise)
                elif isinstance(module, nn.Embedding):
                    parameter.copy_(noise)
                else:
                    # Convolutions of hybrid layers are gated: a large gain would drown the attention beside them.
                    gain = 0.3 if isinstance(module, nn.Conv1d) else 3.0
                    # Rows without a mean pass on no constant, which activations that are never negative build up.
                    noise -= noise.mean(dim=-1, keepdim=True)
                    parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)


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
CHUNKS_MATTER = {"chunked prefill": "as with `DynamicCache`, which gives another result than the prompt at once"}
DECODER_ONLY = {
    "chunked prefill": Refusal("made for decoder-only models: cuts the encoder's mask with the prompt"),
    "warm cache, embeddings": Refusal("no decoder embeddings in `generate`"),
}

FAMILIES = (
    Family("Llama", "grouped-query attention, 9 heads on 3", configs.llama),
    Family("Qwen2", "biases on q, k and v", configs.qwen2),
    Family("Qwen3", "norms on q and k", configs.qwen3),
    Family("Mistral", "a window in every layer", configs.mistral, refused=NO_WINDOWED_DRAFT),
    Family(
        "Gemma 2",
        "soft cap, windows in every other layer",
        configs.gemma_2,
        refused={
            **NO_WINDOWED_DRAFT,
            "sdpa": Refusal("refused for its soft cap, which 5.17 leaves out"),
        },
    ),
    Family(
        "Gemma 3", "two windowed layers to a full one, norms on q and k", configs.gemma_3, refused=NO_WINDOWED_DRAFT
    ),
    Family(
        "gpt-oss",
        "learned sinks, windows in every other layer, experts",
        configs.gpt_oss,
        refused={**NO_WINDOWED_DRAFT, **NO_SDPA},
    ),
    Family("Phi-3", "partial rotary", configs.phi_3),
    Family("GPT-NeoX", "partial rotary, no grouped heads", configs.gpt_neox),
    Family("GPT-2", "learned positions", configs.gpt_2),
    Family(
        "Falcon",
        "one key head",
        configs.falcon,
        refused={"hf_paged": Refusal("picks between attention classes of its own")},
    ),
    Family("Bloom", "ALiBi", configs.bloom, refused=NO_SDPA),
    Family("MPT", "ALiBi", configs.mpt, refused=NO_SDPA),
    Family("DeepSeek V3", "latent keys, values of another width", configs.deepseek_v3),
    Family("Llama 4", "chunked layers, layers without rotary", configs.llama_4, refused=NO_WINDOWED_DRAFT),
    Family("Qwen3-Next", "gated delta layers between attention layers", configs.qwen3_next, refused=NO_ROLLBACK),
    Family("Jamba", "Mamba layers between attention layers", configs.jamba, refused=NO_ROLLBACK, remarks=CHUNKS_MATTER),
    Family(
        "Bamba",
        "Mamba 2 layers around an attention layer",
        configs.bamba,
        refused={**NO_ROLLBACK, **NO_EMBEDDINGS},
        remarks=CHUNKS_MATTER,
    ),
    Family(
        "Falcon-H1", "Mamba and attention in one layer", configs.falcon_h1, refused={**NO_ROLLBACK, **NO_EMBEDDINGS}
    ),
    Family("LFM2", "convolutions around an attention layer", configs.lfm2),
    Family("Gemma 3n", "two layers that read the keys of others", configs.gemma_3n, refused=NO_WINDOWED_DRAFT),
    Family(
        "Gemma 4",
        "two layers that read the keys of others, wider heads in full layers",
        configs.gemma_4,
        refused=NO_WINDOWED_DRAFT,
    ),
    Family(
        "T5",
        "encoder-decoder, relative positions",
        configs.t5,
        auto_class=hf.AutoModelForSeq2SeqLM,
        companions=source_text,
        refused=DECODER_ONLY,
    ),
    Family(
        "BART",
        "encoder-decoder, learned positions",
        configs.bart,
        auto_class=hf.AutoModelForSeq2SeqLM,
        companions=source_text,
        refused=DECODER_ONLY,
    ),
    Family(
        "Whisper",
        "encoder-decoder, audio",
        configs.whisper,
        auto_class=hf.AutoModelForSpeechSeq2Seq,
        companions=audio,
        refused=DECODER_ONLY,
    ),
    Family(
        "LLaVA",
        "image tokens",
        configs.llava,
        auto_class=hf.AutoModelForImageTextToText,
        prompt_start=(IMAGE,) * 4,
        companions=llava_image,
    ),
    Family(
        "Gemma 3 with images",
        "image tokens that see each other, windows",
        configs.gemma_3_with_images,
        auto_class=hf.AutoModelForImageTextToText,
        prompt_start=(IMAGE_START, *(IMAGE,) * 4, IMAGE_END),
        companions=gemma3_image,
        refused={**NO_WINDOWED_DRAFT, **NO_EMBEDDINGS},
    ),
    Family(
        "Qwen2-VL",
        "image tokens with positions in three axes",
        configs.qwen2_vl,
        auto_class=hf.AutoModelForImageTextToText,
        prompt_start=(IMAGE_START, *(IMAGE,) * 4, IMAGE_END),
        companions=qwen2_vl_image,
        refused={"chunked prefill": Refusal("the positions of an image are not cut into chunks", "<5.24")},
    ),
    Family(
        "Mllama",
        "a cross-attention layer whose keys are those of the image",
        configs.mllama,
        auto_class=hf.AutoModelForImageTextToText,
        prompt_start=(IMAGE,),
        companions=mllama_image,
        refused={
            **dict.fromkeys((*DRAFTS, "prompt lookup"), Refusal("rolling back a draft also drops keys of the image")),
            "chunked prefill": Refusal("an image that is not encoded yet cannot be cut into chunks", ">=5.24"),
        },
    ),
)
