"""What transformers may call on a cache or a layer is either ours, or inherited on purpose."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import LlamaConfig
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

import hf_paged_cache
from hf_paged_cache import PagedCache, PagedCacheError
from hf_paged_cache.hf.former_names import FormerNames
from hf_paged_cache.hf.layers import LinearAndPagedLayer, LinearAndPagedSlidingLayer, PagedLayer, PagedSlidingLayer
from hf_paged_cache.hf.reached_states import ReachedStates
from tests.support.families import FAMILIES, Family

CACHE_INHERITED = {
    "early_initialization": "asks each layer, whose `lazy_initialization` is ours",
    "get_max_cache_shape": "the old name of get_max_length",
    "get_max_length": "asks the layers",
    "get_query_offset": "is get_seq_length",
    "get_seq_length": "asks the first layer with keys",
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
        ((Cache, DynamicCache), (PagedCache, ReachedStates), CACHE_INHERITED),
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
    assert not own(PagedCache, ReachedStates) & CACHE_INHERITED.keys()
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


class TestContent:
    """What people do with the content of a cache works as it does with transformers' own, or says the way out."""

    @pytest.fixture
    def cache(self):
        cache = PagedCache(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8))
        for layer_idx in range(2):
            cache.update(self.states(0), self.states(1), layer_idx)
        return cache

    @staticmethod
    def states(seed):
        return torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(seed))

    def test_iterating_and_counting(self, cache):
        assert len(cache) == 2
        for keys, values, window in cache:
            assert torch.equal(keys.clone(), self.states(0))
            assert torch.equal(values.clone(), self.states(1))
            assert window is None

    @pytest.mark.parametrize("convert", [DynamicCache, lambda cache: DynamicCache(ddp_cache_data=iter(cache))])
    def test_transformers_own_cache_is_made_from_it(self, cache, convert):
        converted = convert(cache)
        assert [type(layer) for layer in converted.layers] == [DynamicLayer, DynamicLayer]
        assert type(converted.layers[0].keys) is torch.Tensor
        assert torch.equal(converted.layers[1].values, self.states(1))

    @pytest.mark.parametrize("part", ["keys", "values"])
    def test_setting_it(self, cache, part):
        before = getattr(cache.layers[1], part).clone()
        with pytest.raises(
            AttributeError, match=rf"layers\[1\]\.{part} cannot be set: .* `cache\.update\(keys"
        ) as error:
            setattr(cache.layers[1], part, self.states(2))
        assert isinstance(error.value, PagedCacheError)
        assert torch.equal(getattr(cache.layers[1], part).clone(), before)

    @pytest.mark.parametrize("index", [0, -1, slice(1), "keys"], ids=str)
    def test_indexing_it(self, cache, index):
        with pytest.raises(TypeError, match=r"cache\[.*\]: a cache is no tuple any more\. Use `cache\.layers") as error:
            cache[index]
        assert isinstance(error.value, PagedCacheError)

    @pytest.mark.parametrize("name", [name for name in vars(FormerNames) if name[0] != "_"])
    def test_names_of_earlier_transformers(self, cache, name):
        for owner in (cache, PagedCache):
            assert not hasattr(owner, name)
            with pytest.raises(PagedCacheError, match=f"PagedCache has no '{name}', .*: use "):
                getattr(owner, name)

    def test_the_way_out_that_is_given_for_tuples(self, cache):
        legacy = tuple((keys.clone(), values.clone()) for keys, values, _ in cache)
        assert torch.equal(legacy[1][0], self.states(0))

    def test_none_of_them_is_a_name_of_this_transformers(self):
        assert not {name for name in vars(FormerNames) if name[0] != "_"} & public(Cache, DynamicCache)

    def test_other_names_are_not_there(self, cache):
        with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
            getattr(cache, "no_such_name")  # noqa: B009
        with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
            getattr(hf_paged_cache, "no_such_name")  # noqa: B009


def test_what_the_package_offers_is_there_without_an_import_of_its_own() -> None:
    assert all(hasattr(hf_paged_cache, name) for name in hf_paged_cache.__all__)
    assert hf_paged_cache.small_models.load
