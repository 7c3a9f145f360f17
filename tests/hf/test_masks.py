"""The masks of `"hf_paged"`: known by their parts, and to model code those of eager attention."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hf_paged_kernels import StepMetadata
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, masking_utils
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from hf_paged_cache import ATTENTION_NAME, InvalidArgumentError
from hf_paged_cache.hf.masks import LazyMask, Pattern
from tests.support.compat import CACHE_ARGUMENT

PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 1]])


def mask_of(
    create: Callable[..., Tensor | None],
    attention: str,
    padding: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    cached: int = 0,
    **options: object,
) -> Tensor | None:
    """The mask of 7 - `cached` new tokens behind `cached` ones."""
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, hidden_size=16)
    config.sliding_window = config.attention_chunk_size = 3
    config._attn_implementation = attention
    cache = None
    if cached:
        cache = DynamicCache()
        cache.update(torch.zeros(2, 2, cached, 8), torch.zeros(2, 2, cached, 8), 0)
    if create is not create_bidirectional_mask or cache is not None:
        options[CACHE_ARGUMENT] = cache
    embeddings = torch.zeros(2, 7 - cached, 16, dtype=dtype)
    return create(config=config, inputs_embeds=embeddings, attention_mask=padding, **options)


def packed(**arguments: object) -> Tensor | None:
    return create_causal_mask(**arguments, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2]] * 2))


def image_blocks(**arguments: object) -> Tensor | None:
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1]] * 2)
    return create_causal_mask(
        **arguments, or_mask_function=lambda b, h, q, k: (blocks[b, q] == blocks[b, k]) & (blocks[b, q] >= 0)
    )


CREATORS: dict[str, tuple[Callable[..., Tensor | None], Pattern | None]] = {
    "causal": (create_causal_mask, Pattern(None)),
    "sliding": (create_sliding_window_causal_mask, Pattern(3)),
    "chunked": (create_chunked_causal_mask, None),
    "packed": (packed, None),
    "image blocks": (image_blocks, None),
}
every_creator = pytest.mark.parametrize("kind", CREATORS)
paddings = pytest.mark.parametrize("padding", [None, PADDED], ids=["whole", "padded"])


@every_creator
def test_a_mask_is_there_even_where_sdpa_gets_none(kind: str) -> None:
    create, pattern = CREATORS[kind]
    mask = mask_of(create, ATTENTION_NAME)
    assert isinstance(mask, LazyMask)
    assert mask.pattern == pattern
    if kind == "causal":
        assert mask_of(create, "sdpa") is None


@every_creator
@paddings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_model_code_reads_the_mask_of_eager_attention(kind: str, padding: Tensor | None, dtype: torch.dtype) -> None:
    create, _ = CREATORS[kind]
    mask = mask_of(create, ATTENTION_NAME, padding, dtype=dtype)
    expected = mask_of(create, "eager", padding, dtype=dtype)
    assert (mask.shape, mask.dtype) == (expected.shape, dtype)
    assert mask.clone().equal(expected)
    assert mask.visible().equal(expected == 0)
    scores = torch.randn(2, 4, 7, 7, dtype=dtype)
    assert (scores + mask).equal(scores + expected)
    assert torch.cat([mask, torch.zeros(2, 1, 7, 2)], dim=-1).equal(
        torch.cat([expected, torch.zeros(2, 1, 7, 2)], dim=-1)
    )


@pytest.mark.parametrize("kind", ["causal", "sliding"])
@pytest.mark.parametrize("cached", [3, 6])
def test_behind_cached_tokens_it_says_where_queries_and_keys_begin(kind: str, cached: int) -> None:
    create, pattern = CREATORS[kind]
    mask = mask_of(create, ATTENTION_NAME, PADDED, cached=cached)
    assert (mask.first_query, mask.first_key, mask.pattern) == (cached, 0, pattern)
    assert mask.clone().equal(mask_of(create, "eager", PADDED, cached=cached))


@pytest.mark.parametrize("padding", [None, torch.ones(2, 7, dtype=torch.long)], ids=["no mask", "all ones"])
def test_attention_in_both_directions_has_none_as_under_eager(padding: Tensor | None) -> None:
    assert mask_of(create_bidirectional_mask, "eager", padding) is None
    assert mask_of(create_bidirectional_mask, ATTENTION_NAME, padding) is None


def test_padding_is_hidden_in_both_directions() -> None:
    mask = mask_of(create_bidirectional_mask, ATTENTION_NAME, PADDED)
    assert mask.pattern is None
    assert mask.clone().equal(mask_of(create_bidirectional_mask, "eager", PADDED))


def test_an_unknown_mask_function_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    def every_other(sliding_window: int) -> Callable[..., Tensor]:
        return lambda batch, head, query, key: (key <= query) & ((query - key) % 2 == 0)

    monkeypatch.setattr(masking_utils, "sliding_window_causal_mask_function", every_other)
    mask = mask_of(create_sliding_window_causal_mask, ATTENTION_NAME)
    assert mask.pattern is None
    assert mask.visible()[0, 0, 4].tolist() == [True, False, True, False, True, False, False]


def test_a_mask_that_shows_padding_which_was_not_stored_is_refused() -> None:
    """On an accelerator, where nothing looks at the mask of a step before attention does."""
    mask = mask_of(create_causal_mask, ATTENTION_NAME, torch.ones(2, 7, dtype=torch.long), cached=6)
    step = StepMetadata(
        block_table=np.ones((2, 1), np.int32),
        seq_lens=np.array([7, 5], np.int32),
        padding=np.array([0, 2], np.int32),
        slots=np.array([[22], [20]], np.int32),
        num_columns=7,
        block_size=16,
        new_tokens_stored=True,
    )
    with pytest.raises(InvalidArgumentError, match=r"shows 2 columns that were padding.*rollback"):
        mask.key_mask(step)
