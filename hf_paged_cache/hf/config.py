"""From a model's config to the layers of a cache and their groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from hf_paged_cache.blocks.exact import ExactBlocks
from hf_paged_cache.blocks.tables import BlockTable
from hf_paged_cache.codecs import LayerCodecs
from hf_paged_cache.groups import LayerGroup
from hf_paged_cache.hf.layers import (
    LinearAndPagedLayer,
    LinearAndPagedSlidingLayer,
    PagedLayer,
    PagedSlidingLayer,
)
from hf_paged_cache.memory.budget import MemoryBudget
from hf_paged_cache.memory.group_pool import GroupPool


@dataclass(frozen=True)
class GroupFactory:
    """Makes the layer groups of a cache, all with the same options.

    Attributes:
        codecs: how the tokens of each layer are stored.
        block_size: tokens a block.
        budget: bytes of all groups together.
        max_blocks: blocks that a group may hold; `None` for no limit.
    """

    codecs: LayerCodecs
    block_size: int
    budget: MemoryBudget
    max_blocks: int | None

    def make(self, window: int | None, layers: Sequence[int], *, is_only_group: bool) -> LayerGroup:
        """A group of layers, by their indices, that look back `window` tokens."""
        codec_of = partial(self.codecs.of, is_sliding=window is not None)
        num_quantizing = sum(codec_of(layer_idx).exact_policy is not None for layer_idx in layers)
        exact_pool = exact_blocks = None
        if num_quantizing:
            exact = LayerCodecs("raw", codec_of(layers[0]).backend)
            exact_pool = GroupPool(
                partial(exact.of, is_sliding=False),
                self.block_size,
                num_quantizing,
                self.budget,
                is_only_group=False,
                has_null_block=False,
            )
            exact_blocks = ExactBlocks(self.codecs.exact_policy, self.block_size, exact_pool.allocator, exact_pool.take)
        pool = GroupPool(
            codec_of,
            self.block_size,
            len(layers),
            self.budget,
            max_blocks=self.max_blocks,
            is_only_group=is_only_group and exact_pool is None,
            exact_pool=exact_pool,
        )
        return LayerGroup(pool, BlockTable(pool.allocator, self.block_size, window, pool.take, exact_blocks))


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
    members: dict[int | None, list[int]] = {}
    for layer_idx, layer in enumerate(library_layers):
        if type(layer) in _PAGED_CLASSES:
            members.setdefault(_window(layer), []).append(layer_idx)
    # Vision-language models may cache image tokens in layers of the same kind; those get a group of their own.
    may_split = bool(getattr(config.get_text_config(decoder=True), "cross_attention_layers", None))
    is_only_group = len(members) == 1 and not may_split
    groups = {window: factory.make(window, layers, is_only_group=is_only_group) for window, layers in members.items()}
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
