"""How much is measured: on a card, and in a dry run that shows that everything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hf_paged_cache import CODECS

# What runs on a card where there is one.
TESTS = (
    "tests/kernels/triton/test_write.py",
    "tests/kernels/triton/test_shared.py",
    "tests/kernels/triton/test_attention.py",
    "tests/kernels/triton/test_quantized.py",
    "tests/kernels/test_block_scores.py",
    "tests/kernels/test_quantized_write.py",
    "tests/eval/test_kernels.py",
    "tests/models/test_on_device.py",
)


@dataclass(frozen=True)
class Settings:
    """Sizes of all stages.

    Attributes:
        is_dry_run: on the CPU, with Triton's interpreter.
        model: folder or hub id; `None` for a random model of the shape `random_model`.
        random_model: options of a `LlamaConfig`.
        dtype: of the random model.
        tests: files that pytest runs.
        heads: query heads, KV heads, head_dim.
        dtypes: of keys and values that are not quantized.
        formats: of blocks.
        query_lengths: new tokens of a row, for correctness; for tuning the launch table says what there is.
        contexts, batches: of attention.
        checked_context: tokens of a row, for correctness.
        prompt: tokens that eight rows share.
        tuned_dims, tuned_bits, extent: rows of the launch table, and how far a search goes.
        model_contexts, model_batches, beam_contexts, new_tokens: of `generate`.
        steps: `(batch, context)` of steps whose metadata are uploaded.
        copied_bytes: of copies between host and device.
        repeats: rounds in which all take turns.
        rotated_bytes, launched_calls: as in `KernelBench`; `None` for what suits the card.
    """

    is_dry_run: bool
    model: str | None
    random_model: dict[str, Any]
    dtype: str
    tests: tuple[str, ...]
    heads: tuple[tuple[int, int, int], ...]
    dtypes: tuple[str, ...]
    formats: tuple[str, ...]
    query_lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    checked_context: int
    prompt: int
    tuned_dims: tuple[int, ...]
    tuned_bits: tuple[int, ...]
    extent: Literal["MEDIUM", "INTERPRETED"]
    model_contexts: tuple[int, ...]
    model_batches: tuple[int, ...]
    beam_contexts: tuple[int, ...]
    new_tokens: int
    steps: tuple[tuple[int, int], ...]
    copied_bytes: tuple[int, ...]
    repeats: int
    rotated_bytes: int | None = None
    launched_calls: int | None = None


ON_A_CARD = Settings(
    is_dry_run=False,
    model=None,
    # The shape of a model of 1.2 billion parameters, which any card holds.
    random_model={
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    dtype="bfloat16",
    tests=TESTS,
    heads=((32, 8, 128), (32, 8, 64)),
    dtypes=("bfloat16", "float16", "float32"),
    formats=CODECS,
    query_lengths=(1, 4, 64),
    contexts=(1024, 8192, 32768),
    batches=(1, 8, 64),
    checked_context=1000,
    prompt=16384,
    tuned_dims=(64, 128, 256, 512),
    tuned_bits=(16, 32),
    extent="MEDIUM",
    model_contexts=(1024, 8192, 32768),
    model_batches=(1, 16),
    beam_contexts=(1024, 16384),
    new_tokens=64,
    steps=((1, 1024), (1, 131072), (8, 8192), (64, 8192), (256, 2048)),
    copied_bytes=(2**12, 2**16, 2**20, 2**26),
    repeats=5,
)
DRY_RUN = Settings(
    is_dry_run=True,
    model=None,
    random_model={
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
    },
    dtype="float32",
    tests=("tests/kernels/triton/test_write.py",),
    heads=((2, 1, 16),),
    dtypes=("float32",),
    formats=("raw", "int8", "int4"),
    query_lengths=(1, 9),
    contexts=(48,),
    batches=(1,),
    checked_context=200,
    prompt=64,
    tuned_dims=(64,),
    tuned_bits=(16,),
    extent="INTERPRETED",
    model_contexts=(16,),
    model_batches=(1,),
    beam_contexts=(16,),
    new_tokens=2,
    steps=((2, 256),),
    copied_bytes=(2**12,),
    repeats=1,
    rotated_bytes=1,
    launched_calls=2,
)
