"""Which layers with recurrent states a forward pass has reached."""

import torch
from transformers.cache_utils import DynamicCache


class ReachedStates(DynamicCache):
    """Notes the layer that has last asked for its recurrent states. A layer does so once it runs, and then may change
    them in place, unseen by the cache.

    Attributes:
        last_state_idx: index of that layer; -1 if the forward pass has reached none.
    """

    last_state_idx = -1

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        state = super().get_conv_state(layer_idx, state_idx)
        self.last_state_idx = layer_idx
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        state = super().get_recurrent_state(layer_idx, state_idx)
        self.last_state_idx = layer_idx
        return state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        has_state = super().has_previous_state(layer_idx, state_idx)
        if layer_idx is not None:  # a layer asks, before transformers 5.24
            self.last_state_idx = layer_idx
        return has_state
