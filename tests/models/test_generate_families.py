"""`generate` gives the same with a `PagedCache` as with a `DynamicCache`: families x modes x attention x batches.

Blocks and windows hold 16 tokens, and the prompt lengths lie around that. With `-m "not slow"`, two families run every
mode, and the others the most used modes, all on a few lengths; the attentions take turns.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import PagedCache
from tests.support.compat import new_cache
from tests.support.families import FAMILIES, Family, inputs
from tests.support.families_table import page
from tests.support.generate_modes import MODES, Mode, Result, assert_same

BLOCK_SIZE = 16
PADDED_BATCH = (3, 17, 40)
QUICK_FAMILIES = ("Llama", "Gemma 3")
QUICK_LENGTHS = ((1,), (17,), PADDED_BATCH)
QUICK_MODES = {"greedy": QUICK_LENGTHS, "beam search": (PADDED_BATCH,)}


@functools.lru_cache(maxsize=8)
def model_of(family: Family, attention: str) -> PreTrainedModel:
    return family.build(attention)


@functools.cache
def expected(family: Family, mode: Mode, lengths: tuple[int, ...], attention: str) -> Result:
    """What the mode gives with a `DynamicCache`."""
    model = model_of(family, attention)
    cache = new_cache(model, lambda config: DynamicCache(config=config))
    return mode.run(model, inputs(family, lengths), cache)


def is_quick(family: Family, mode: Mode, lengths: tuple[int, ...], attention: str) -> bool:
    """Each length once: the last one, most often the padded batch, with our own attention, the others with the others
    in turn."""
    if family.name in QUICK_FAMILIES:
        chosen = {(mode.lengths[-1],), *QUICK_LENGTHS}
    else:
        chosen = {*QUICK_MODES.get(mode.name, ())}
    forms = [form for form in forms_of(mode) if form in chosen]
    if lengths not in forms:
        return False
    *others, own = attentions_of(family, mode)
    if lengths == forms[-1] or not others:
        return attention == own
    return attention == others[(MODES.index(mode) + forms.index(lengths)) % len(others)]


def marks_of(family: Family, mode: Mode, lengths: tuple[int, ...], attention: str) -> Any:
    """With the slow tests, each family runs each length of each mode once, and what is left is evidence."""
    if is_quick(family, mode, lengths, attention):
        return ()
    attentions = attentions_of(family, mode)
    turn = FAMILIES.index(family) + MODES.index(mode) + forms_of(mode).index(lengths)
    return pytest.mark.slow if attention == attentions[turn % len(attentions)] else pytest.mark.evidence


def forms_of(mode: Mode) -> list[tuple[int, ...]]:
    return [*((length,) for length in mode.lengths), *([PADDED_BATCH] if mode.batched else [])]


def attentions_of(family: Family, mode: Mode) -> tuple[str, ...]:
    return ("eager",) if mode.eager_only else family.attentions


def cases() -> list[object]:
    """What transformers itself can do, as parameters of a test: family, mode, prompt lengths, attention."""
    return [
        pytest.param(
            family,
            mode,
            lengths,
            attention,
            id=f"{family.name}-{mode.name}-{'+'.join(map(str, lengths))}-{attention}",
            marks=marks_of(family, mode, lengths, attention),
        )
        for family in FAMILIES
        for mode in MODES
        if not family.refuses(mode.name)
        for lengths in forms_of(mode)
        for attention in attentions_of(family, mode)
    ]


@pytest.mark.parametrize(("family", "mode", "lengths", "attention"), cases())
def test_same_as_with_dynamic_cache(family: Family, mode: Mode, lengths: tuple[int, ...], attention: str) -> None:
    model = model_of(family, attention)
    cache = new_cache(model, lambda config: PagedCache(config, block_size=BLOCK_SIZE))
    # Eager attention defines the result of hf_paged. Mllama's later turns differ under sdpa, which infers causality.
    oracle_attention = "eager" if attention == "hf_paged" else attention
    assert_same(mode.run(model, inputs(family, lengths), cache), expected(family, mode, lengths, oracle_attention))


def test_page_of_families_is_the_printed_one() -> None:
    document = Path(__file__).parents[2] / "docs" / "families.md"
    assert document.read_text().startswith(page()), "print it again with tests.support.families_table"
