"""`generate` gives the same with a `PagedCache` as with a `DynamicCache`: families x modes x attention x batches.

Blocks and windows hold 16 tokens, and the prompt lengths lie around that. Without `-m "not slow"`, every family runs
every mode; with it, every family runs the most used modes and two families run all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import PagedCache
from tests.compat import new_cache
from tests.families import FAMILIES, Family, inputs
from tests.families_table import page
from tests.generate_modes import MODES, Mode, Result

BLOCK_SIZE = 16
PADDED_BATCH = (3, 17, 40)
QUICK_MODES = ("greedy", "beam search")
QUICK_FAMILIES = ("Llama", "Gemma 3")


@lru_cache(maxsize=8)
def model_of(family: Family, attention: str) -> PreTrainedModel:
    return family.build(attention)


@lru_cache(maxsize=None)
def expected(family: Family, mode: Mode, lengths: tuple[int, ...]) -> Result:
    """What the mode gives with a `DynamicCache`, under the attention that transformers recommends for the family."""
    model = model_of(family, "eager" if mode.eager_only else family.attentions[0])
    cache = new_cache(model, lambda config: DynamicCache(config=config))
    return mode.run(model, inputs(family, lengths), cache)


def cases() -> Iterator[object]:
    for family in FAMILIES:
        for mode in MODES:
            if family.refuses(mode.name):
                continue
            quick = mode.name in QUICK_MODES or family.name in QUICK_FAMILIES
            for lengths in (*((length,) for length in mode.lengths), *((PADDED_BATCH,) if mode.batched else ())):
                for attention in family.attentions:
                    if mode.eager_only and attention != "eager":
                        continue
                    yield pytest.param(
                        family,
                        mode,
                        lengths,
                        attention,
                        id=f"{family.name}-{mode.name}-{'+'.join(map(str, lengths))}-{attention}",
                        marks=() if quick else pytest.mark.slow,
                    )


def assert_same(result: Result, reference: Result) -> None:
    assert result.keys() == reference.keys()
    for name, tensor in result.items():
        tolerance = 1e-4 if tensor.is_floating_point() else 0
        torch.testing.assert_close(
            tensor, reference[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("family", "mode", "lengths", "attention"), cases())
def test_same_as_with_dynamic_cache(family: Family, mode: Mode, lengths: tuple[int, ...], attention: str) -> None:
    model = model_of(family, attention)
    cache = new_cache(model, lambda config: PagedCache(config, block_size=BLOCK_SIZE))
    assert_same(mode.run(model, inputs(family, lengths), cache), expected(family, mode, lengths))


def test_page_of_families_is_the_printed_one() -> None:
    document = Path(__file__).parents[1] / "docs" / "families.md"
    assert document.read_text() == page(), "print it again: python -m tests.families_table > docs/families.md"
