"""The modes of `generate` on real small models: SmolLM2 (full attention) and Gemma 3 (windows of 512).

Gemma 3 runs where its folder has been built, which accepting its terms is a user's own step for:
`hf-paged-cache demo --model gemma-3-270m`.
"""

from __future__ import annotations

from functools import cache, lru_cache
from pydoc_data.topics import topics

import pytest
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from hf_paged_cache import PagedCache
from hf_paged_cache.demo.small_models import GEMMA_3, SMOLLM2, PackagedModel, cache_dir, load
from tests.support import generate_modes
from tests.support.generate_modes import MODES, Mode, Result, assert_same

pytestmark = pytest.mark.slow

# Longer than Gemma's window, or padded.
LENGTHS = ((530,), (130, 30))
BATCHED_MODES = ("greedy", "beam search", "three-turn chat")


@lru_cache(maxsize=1)
def loaded(packaged: PackagedModel) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load(packaged.name, "sdpa")


def prompts(tokenizer: PreTrainedTokenizerBase, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """The beginnings of pages about Python, left-padded."""
    pages = (topics["typesseq"], topics["naming"])
    rows = [tokenizer(page).input_ids[:length] for page, length in zip(pages, lengths, strict=False)]
    return dict(tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt"))


@cache
def expected(packaged: PackagedModel, mode: Mode, lengths: tuple[int, ...]) -> Result:
    model, tokenizer = loaded(packaged)
    model.set_attn_implementation("eager" if mode.eager_only else "sdpa")
    return mode.run(model, prompts(tokenizer, lengths), DynamicCache(config=model.config))


@pytest.mark.parametrize("packaged", [SMOLLM2, GEMMA_3], ids=lambda packaged: packaged.name)
@pytest.mark.parametrize(
    ("mode", "lengths"),
    [(mode, lengths) for mode in MODES for lengths in LENGTHS if len(lengths) == 1 or mode.name in BATCHED_MODES],
    ids=lambda value: value.name if isinstance(value, Mode) else "+".join(map(str, value)),
)
def test_same_as_with_dynamic_cache(
    packaged: PackagedModel, mode: Mode, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if packaged.terms and not (cache_dir() / packaged.name).is_dir():
        pytest.skip(f"hf-paged-cache demo --model {packaged.name} fetches the model. {packaged.terms}")
    model, tokenizer = loaded(packaged)
    monkeypatch.setattr(generate_modes, "word_tokenizer", lambda: tokenizer)
    theirs = expected(packaged, mode, lengths)
    model.set_attn_implementation("eager" if mode.eager_only else "hf_paged")
    ours = mode.run(model, prompts(tokenizer, lengths), PagedCache(model.config))
    assert_same(ours, theirs)
