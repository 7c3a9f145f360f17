"""Models whose keys have a large bias in a few channels, as Qwen2's have.

    python -m eval.quality.key_bias                                  a tiny random Qwen2, some seconds
    python -m eval.quality --key-bias 200:30,31 ...          the same put into a real model

Rotation turns a bias of a rotary pair with the position: in the last pairs it is nearly the same for all tokens, in the
first ones it goes round every few tokens. The biases that were found in real models are in the last ones (Jin et al.,
"Massive Values in Self-Attention Modules", arXiv 2502.01563).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hf_paged_kernels import Backend
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from eval.common.arguments import parser_of
from eval.common.variants import cache_argument
from hf_paged_cache import KVQuant, PagedCache

CODECS: tuple[str | KVQuant, ...] = (
    "int8",
    KVQuant("int8", key_offset=False),
    "fp8",
    KVQuant("fp8", key_offset=False),
    "k8v4",
    "int4",
)
STORED, SCORED = 320, 64


@dataclass(frozen=True)
class KeyBias:
    """A bias of keys.

    Attributes:
        size: its length in each pair.
        pairs: the rotary pairs, 0 for the fastest. The direction in a pair is random, another in each head.
        query_factor: what queries are multiplied by in these pairs. Where a bias turns fast, scores depend on it more
            than a model stands that was not trained with it.
    """

    size: float
    pairs: tuple[int, ...]
    query_factor: float = 1.0

    def __str__(self) -> str:
        pairs = ", ".join(map(str, self.pairs))
        queries = "" if self.query_factor == 1 else f", queries there times {self.query_factor:g}"
        return f"a key bias of {self.size:g} in the rotary pairs {pairs}{queries}"


def key_bias(text: str) -> KeyBias:
    """`SIZE:PAIR,PAIR,..` or `SIZE:PAIR,PAIR,..:QUERY_FACTOR`, from the command line."""
    try:
        size, pairs, *factor = text.split(":")
        return KeyBias(float(size), tuple(map(int, pairs.split(","))), *map(float, factor))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected such as 200:30,31 or 100:3:0.03") from error


@torch.no_grad()
def add_key_bias(model: PreTrainedModel, bias: KeyBias) -> None:
    """Adds a bias to the keys of every layer, before rotation.

    Raises:
        ValueError: the model has no such pairs, or projects keys in another way than `q_proj` and `k_proj`.
    """
    generator = torch.Generator().manual_seed(0)
    attentions = [module for module in model.modules() if {"q_proj", "k_proj"} <= {*dict(module.named_children())}]
    if not attentions:
        raise ValueError(f"{type(model).__name__} has no layers with q_proj and k_proj")
    for attention in attentions:
        dim, key = attention.head_dim, attention.k_proj
        if not all(0 <= pair < dim // 2 for pair in bias.pairs):
            raise ValueError(f"the pairs {bias.pairs} are not among the {dim // 2} of a head_dim of {dim}")
        added = torch.zeros(key.out_features // dim, dim)
        for pair in bias.pairs:
            angle = 2 * torch.pi * torch.rand(len(added), generator=generator)
            added[:, pair], added[:, pair + dim // 2] = bias.size * angle.cos(), bias.size * angle.sin()
            attention.q_proj.weight.view(-1, dim, attention.q_proj.in_features)[:, [pair, pair + dim // 2]] *= (
                bias.query_factor
            )
        added = added.flatten().to(key.weight)
        key.bias = torch.nn.Parameter(added if key.bias is None else key.bias + added)


def tiny_model() -> PreTrainedModel:
    """A random Qwen2 with heads of 8 channels, weights so large that attention matters, and a bias of 200 in the last
    of its 4 rotary pairs."""
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model: Qwen2ForCausalLM = AutoModelForCausalLM.from_config(config, attn_implementation="hf_paged").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 2.5 / weight.shape[-1] ** 0.5)
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.zero_()
            layer.self_attn.k_proj.bias[3::4] = 200.0
    return model


@torch.no_grad()
def divergence(model: PreTrainedModel, kv: str | KVQuant, backend: Backend | None = None) -> float:
    """The mean KL divergence, in nats, of what a model predicts with tokens in codes from what it predicts with them
    exact."""
    ids = torch.randint(8, model.config.vocab_size, (1, STORED + SCORED), generator=torch.Generator().manual_seed(0))
    log_probs = []
    for codec in ("raw", kv):
        cache = PagedCache(model.config, kv=codec, backend=backend)
        model(ids[:, :STORED], **{cache_argument(model): cache})
        logits = model(ids[:, STORED:], **{cache_argument(model): cache}).logits
        log_probs.append(logits.float().log_softmax(-1))
    exact, read = log_probs
    return float((exact.exp() * (exact - read)).sum(-1).mean())


def name_of(kv: str | KVQuant) -> str:
    return kv if isinstance(kv, str) else f'KVQuant("{kv.base}", key_offset={kv.key_offset})'


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser_of("python -m eval.quality.key_bias", __doc__).parse_args(argv)
    model = tiny_model()
    print("| codec | KL |", "| --- | --: |", sep="\n")
    for kv in CODECS:
        print(f"| `{name_of(kv)}` | {divergence(model, kv):.4f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
