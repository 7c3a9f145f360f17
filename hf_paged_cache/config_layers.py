"""From a model's config to the layers of a cache and their groups."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from hf_paged_cache.budget import MemoryBudget
from hf_paged_cache.codecs import Codec
from hf_paged_cache.groups import LayerGroup
from hf_paged_cache.layers import (
    LinearAndPagedLayer,
    LinearAndPagedSlidingLayer,
    PagedLayer,
    PagedSlidingLayer,
)
from hf_paged_cache.pool import GroupPool
from hf_paged_cache.tables import BlockTable


@dataclass(frozen=True)
class GroupFactory:
    """Makes the layer groups of a cache, all with the same options.

    Attributes:
        codec: how tokens are stored.
        block_size: tokens a block.
        budget: bytes of all groups together.
        max_blocks: blocks that a group may hold; `None` for no limit.
    """

    codec: Codec
    block_size: int
    budget: MemoryBudget
    max_blocks: int | None

    def make(self, window: int | None, num_layers: int, *, is_only_group: bool) -> LayerGroup:
        """A group of `num_layers` layers that look back `window` tokens."""
        pool = GroupPool(
            self.codec,
            self.block_size,
            num_layers,
            self.budget,
            max_blocks=self.max_blocks,
            is_only_group=is_only_group,
        )
        return LayerGroup(pool, BlockTable(pool.allocator, self.block_size, window, pool.allocate))


def paged_layers(
    library_layers: list[Any], config: PreTrainedConfig, factory: GroupFactory
) -> tuple[list[Any], list[LayerGroup]]:
    """Puts paged layers in the place of transformers' own.

    Layers that keep no keys and values (recurrent states, dummies), and kinds that this package does not know, stay
    as they are.

    Args:
        library_layers: the layers of `DynamicCache(config=config)`, which knows how to read a config.
        config: the model's config.
        factory: makes the groups.

    Returns:
        The layers, and one group for each window among them (`None`: full attention).
    """
    windows = [_window(layer) for layer in library_layers if type(layer) in _PAGED_CLASSES]
    # Vision-language models may cache image tokens in layers of the same kind; those get a group of their own.
    may_split = bool(getattr(config.get_text_config(decoder=True), "cross_attention_layers", None))
    is_only_group = len(set(windows)) == 1 and not may_split
    groups = {
        window: factory.make(window, windows.count(window), is_only_group=is_only_group)
        for window in dict.fromkeys(windows)
    }
    layers = []
    for layer_idx, layer in enumerate(library_layers):
        paged_class = _PAGED_CLASSES.get(type(layer))
        if paged_class is None:
            layers.append(layer)
            continue
        options: dict[str, Any] = {}
        if issubclass(paged_class, LinearAndPagedLayer):
            options["number_of_states"] = layer.number_of_states
        if issubclass(paged_class, PagedSlidingLayer):
            options["sliding_window"] = layer.sliding_window
        if paged_class is PagedSlidingLayer:
            options["is_chunked"] = _is_chunked(config, layer_idx)
        layers.append(paged_class(layer_idx, groups[_window(layer)], **options))
    return layers, list(groups.values())


_PAGED_CLASSES: dict[type, type[PagedLayer]] = {
    DynamicLayer: PagedLayer,
    DynamicSlidingWindowLayer: PagedSlidingLayer,
    LinearAttentionAndFullAttentionLayer: LinearAndPagedLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: LinearAndPagedSlidingLayer,
}


def _window(layer: Any) -> int | None:
    return getattr(layer, "sliding_window", None)


def _is_chunked(config: PreTrainedConfig, layer_idx: int) -> bool:
    """Whether a windowed layer attends in chunks; transformers' layers do not tell, as they store the same."""
    text_config = config.get_text_config(decoder=True)
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types is not None:
        return layer_types[layer_idx] == "chunked_attention"
    return getattr(text_config, "sliding_window", None) is None
