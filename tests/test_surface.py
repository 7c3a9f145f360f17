"""What transformers may call on a cache or a layer is either ours, or inherited on purpose."""

from __future__ import annotations

import inspect

import pytest
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from hf_paged_cache import PagedCache
from hf_paged_cache.layers import LinearAndPagedLayer, LinearAndPagedSlidingLayer, PagedLayer, PagedSlidingLayer
from tests.families import FAMILIES, Family

CACHE_INHERITED = {
    "early_initialization": "asks each layer, whose `lazy_initialization` is ours",
    "get_conv_state": "recurrent states are transformers' own",
    "get_max_cache_shape": "the old name of get_max_length",
    "get_max_length": "asks the layers",
    "get_query_offset": "is get_seq_length",
    "get_recurrent_state": "recurrent states are transformers' own",
    "get_seq_length": "asks the first layer with keys",
    "has_previous_state": "recurrent states are transformers' own",
    "is_compileable": "asks the layers",
    "is_croppable": "asks the layers",
    "is_dummy": "looks at the class of the layers",
    "is_initialized": "asks the layers",
    "is_recording_past": "asks a layer",
    "is_sliding": "asks the layers",
    "max_batch_size": "of static caches",
    "max_cache_len": "of static caches",
    "offload": "only called with offloading, which is never on; the layers refuse it",
    "prefetch": "only called with offloading, which is never on; the layers refuse it",
    "update_conv_state": "recurrent states are transformers' own",
    "update_indexer": "indexed layers are transformers' own",
    "update_recurrent_state": "recurrent states are transformers' own",
}
LAYER_INHERITED = {
    "get_max_cache_shape": "the old name of get_max_length",
    "supports_early_init": "true: a pool can be made before the first keys",
}

HYBRID_INHERITED = {
    **LAYER_INHERITED,
    "activate_past_recording": "for both parts, by the same flag",
    "is_croppable": "the recurrent part decides",
    "update_conv_state": "recurrent states are transformers' own",
    "update_recurrent_state": "recurrent states are transformers' own",
}


def public(*classes: type) -> set[str]:
    return {
        name
        for cls in classes
        for name, member in inspect.getmembers(cls)
        if not name.startswith("_") and (callable(member) or isinstance(member, property | bool))
    }


def own(*classes: type) -> set[str]:
    return {name for cls in classes for name in vars(cls) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("library", "ours", "inherited"),
    [
        ((Cache, DynamicCache), (PagedCache,), CACHE_INHERITED),
        ((CacheLayerMixin, DynamicLayer), (PagedLayer,), LAYER_INHERITED),
        ((DynamicSlidingWindowLayer,), (PagedLayer, PagedSlidingLayer), LAYER_INHERITED),
        (
            (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer),
            (PagedLayer, LinearAndPagedLayer),
            HYBRID_INHERITED,
        ),
        (
            (LinearAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer),
            (PagedLayer, PagedSlidingLayer, LinearAndPagedLayer, LinearAndPagedSlidingLayer),
            HYBRID_INHERITED,
        ),
    ],
    ids=["cache", "layer", "sliding layer", "hybrid layer", "hybrid sliding layer"],
)
def test_every_public_name_is_ours_or_inherited_on_purpose(
    library: tuple[type, ...], ours: tuple[type, ...], inherited: dict[str, str]
) -> None:
    assert public(*library) - own(*ours) <= inherited.keys()


def test_what_is_inherited_is_not_overridden_by_accident() -> None:
    assert not own(PagedCache) & CACHE_INHERITED.keys()
    assert not own(PagedLayer, PagedSlidingLayer) & LAYER_INHERITED.keys()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_cache_describes_its_layers_as_the_library_s_own_does(family: Family) -> None:
    config = family.config()
    ours, theirs = PagedCache(config), DynamicCache(config=config)
    assert len(ours) == len(theirs)
    for name in ("is_sliding", "is_linear", "is_dummy", "is_croppable"):
        assert getattr(ours, name, None) == getattr(theirs, name, None), name
    for layer in range(len(ours)):
        assert ours.get_max_length(layer) == theirs.get_max_length(layer)
    assert ours.get_mask_sizes(5, 0) == theirs.get_mask_sizes(5, 0)
