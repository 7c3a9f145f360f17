"""`PagedCache`: the cache object that is passed to `model.generate`."""

import copy
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hf_paged_kernels import Backend
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from hf_paged_cache.arguments import is_integer, parse_bytes
from hf_paged_cache.blocks.tables import BlockTable
from hf_paged_cache.codecs import KVQuant, LayerCodecs
from hf_paged_cache.errors import CacheStateError, CropError, InvalidArgumentError, UnsupportedError
from hf_paged_cache.groups import LayerGroup, unfinished_pass
from hf_paged_cache.hf import unpaged
from hf_paged_cache.hf.attention import ATTENTION_NAME
from hf_paged_cache.hf.config import GroupFactory, paged_layers
from hf_paged_cache.hf.former_names import FormerNames
from hf_paged_cache.hf.layers import PagedLayer
from hf_paged_cache.hf.lazy import as_dense
from hf_paged_cache.hf.library_names import ASSISTED_DECODING
from hf_paged_cache.hf.mask_request import MaskRequest, current_mask_request
from hf_paged_cache.hf.padding import PendingMask, check_request
from hf_paged_cache.hf.reached_states import ReachedStates
from hf_paged_cache.hf.tracing import untraced
from hf_paged_cache.ledger import Change
from hf_paged_cache.memory.budget import MemoryBudget
from hf_paged_cache.provenance import Provenance
from hf_paged_cache.stats import CacheStats, collect, format_bytes


class PagedCache(FormerNames, ReachedStates):
    """A KV cache in blocks, for `model.generate(**inputs, past_key_values=PagedCache(model.config))`.

    It is used as `DynamicCache` is, and gives the same result. Rows share blocks until they differ, so beam search,
    `fork`, `copy.deepcopy` and the batch operations move block tables instead of keys and values; left padding is not
    stored; layers with a sliding window keep the window. Each layer group (all full-attention layers, all layers of
    one window) has one block table. Layers with a recurrent state are transformers' own.

    It derives from `DynamicCache` because that is what transformers asks for where it needs a cache that grows and
    can be cropped, `EncoderDecoderCache.crop` for one.

    Args:
        config: `model.config`; says which layers there are. Head counts, head_dim and dtype come from the first keys.
        kv: how keys and values are stored: `"raw"`, in the model's dtype; `"int8"`, `"fp8"`, `"int4"`, `"k8v4"`,
            `"k4v2"` or `"kivi2"`, quantized; or a `KVQuant` for the details.
        block_size: tokens a block, a power of two from 16 to 256.
        num_blocks: hard limit of the blocks of each layer group, allocated at once. `None`: grow on demand.
        memory: hard limit of the bytes of all pools, a number or text such as `"2GiB"`. `None`: grow on demand.
        cross_attention: the cache is to hold an encoder's keys and values, the second one of an
            `EncoderDecoderCache`: every layer then keeps all of them, whatever window its self-attention has.
        backend: the kernels: `"triton"`, `"cpu"` (Numba), `"reference"` (plain PyTorch), or `None` for those that suit
            the device and are installed, unless the environment variable `HF_PAGED_KERNELS` names others.
        offloading: must be false; models that make a second cache of the type of the first one pass it.

    Attributes:
        provenance: what a `BlockStore` put into it; `None` if it did not come from one.

    Raises:
        InvalidArgumentError: an argument has no meaning.
        UnsupportedError: `offloading` is asked for.

    Example:

    ```python
    >>> cache = PagedCache(model.config)
    >>> output = model.generate(**tokenizer("Hello", return_tensors="pt"), past_key_values=cache)
    >>> cache
    PagedCache(30 layers, 1 x 25 tokens, 1 of 1 blocks of 64 used, 2.8 MiB of 5.6 MiB)
    ```
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        kv: str | KVQuant = "raw",
        block_size: int = 64,
        num_blocks: int | None = None,
        memory: int | str | None = None,
        cross_attention: bool = False,
        backend: Backend | None = None,
        offloading: bool = False,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise InvalidArgumentError(
                f"PagedCache takes the model's config, PagedCache(model.config), not a {type(config).__name__}"
            )
        if not is_integer(block_size) or block_size not in (16, 32, 64, 128, 256):
            raise InvalidArgumentError(f"block_size={block_size!r}: expected a power of two from 16 to 256")
        if num_blocks is not None and (not is_integer(num_blocks) or num_blocks < 1):
            raise InvalidArgumentError(f"num_blocks={num_blocks!r}: expected at least 1, or None to grow on demand")
        if offloading:
            raise UnsupportedError("PagedCache does not offload layers; limit its blocks instead, with memory=...")
        self._config = _live_text_config(config)
        self._budget = MemoryBudget(None if memory is None else parse_bytes(memory))
        self._factory = GroupFactory(LayerCodecs(kv, backend), block_size, self._budget, num_blocks)
        super().__init__(config=config)
        if cross_attention:
            self.layers = [DynamicLayer() for _ in self.layers]
        self.layers, self._groups = paged_layers(self.layers, config, self._factory)
        self._num_config_groups = len(self._groups)
        # Layers that are given image tokens, and have none in a pass without an image.
        self._image_layers = frozenset(getattr(self._config, "cross_attention_layers", None) or ())
        self._pass_number = 0
        self._states_are_ahead = False
        self.provenance: Provenance | None = None
        self._last_layer_idx = -1
        self.last_state_idx = -1
        self._pending_mask: PendingMask | None = None
        self._request: MaskRequest | None = None

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"{type(self).__name__}({len(self.layers)} layers, {stats.rows} x {stats.tokens} tokens, "
            f"{stats.blocks_used} of {stats.blocks_total} blocks of {stats.block_size} used, "
            f"{format_bytes(stats.bytes_used)} of {format_bytes(stats.bytes_allocated)})"
        )

    def stats(self) -> CacheStats:
        """What the cache holds now."""
        with self._budget.lock:
            return collect(self._groups, self._lead_table(), self.block_size, self._budget, self.provenance)

    @untraced
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new keys and values of a layer, and returns all that the layer shows.

        Args:
            key_states: `[batch, num_kv_heads, query_length, key_dim]`
            value_states: `[batch, num_kv_heads, query_length, value_dim]`
            layer_idx: the layer.

        Returns:
            Keys and values, `[batch, num_kv_heads, columns, dim]`: still in their blocks (`LazyKV`), or copied out of
            them if the config names an attention implementation that reads no blocks.

        Raises:
            InvalidArgumentError: they do not fit what the cache holds.
            OutOfBlocksError: there is no room. The whole forward pass is taken back.
        """
        if not 0 <= layer_idx < len(self.layers):
            if layer_idx == self._last_layer_idx + 1:  # the pass of a deeper model, whose first layers fitted
                self._undo_pass(self._pass_number)
            raise InvalidArgumentError(
                f"layer {layer_idx} of a cache with {len(self.layers)} layers: it was made for another model; use "
                "PagedCache(model.config)"
            )
        layer = self.layers[layer_idx]
        if not isinstance(layer, PagedLayer):
            return layer.update(key_states, value_states, *args, **kwargs)
        self._check_states()
        is_next_pass = layer_idx <= self._last_layer_idx or self._last_layer_idx < 0
        pass_number = self._pass_number + is_next_pass
        try:
            if is_next_pass:
                self._pass_number = pass_number
                self._hands_out_blocks = self._may_read_blocks()
                self._pending_mask = self._take_pending_mask()
            self._last_layer_idx = layer_idx
            num_new = key_states.shape[-2]
            attended = None
            if self._pending_mask is not None:
                missed = self._pending_mask.was_missed_by(layer.get_seq_length(), num_new)
                if missed and layer_idx not in self._image_layers:
                    raise unfinished_pass([layer_idx], self._pending_mask.first_column)
                attended = self._pending_mask.new_columns(layer.group.table, num_new)
                if attended is not None and len(attended) != len(key_states):
                    raise InvalidArgumentError(
                        f"attention_mask has {len(attended)} rows, but the batch has {len(key_states)}"
                    )
            self._place(layer, num_new)
            keys, values = layer.update(key_states, value_states, attended=attended, pass_number=pass_number)
            return (keys, values) if self._hands_out_blocks else (as_dense(keys), as_dense(values))
        except BaseException:
            self._undo_pass(pass_number)
            raise

    @untraced
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        request = current_mask_request(query_length, self._request)
        if request is not None and request is not self._request:
            self._check_pass(request)
            self.last_state_idx, self._request = -1, request
        return super().get_mask_sizes(query_length, layer_idx)

    def fork(self, n: int = 1) -> "PagedCache":
        """A new cache in which every row stands `n` times in a row, sharing all blocks with this one.

        Only block tables are copied; this cache stays as it was. A shared block is copied when one of its holders
        writes to it. With `prefill`, a prompt is computed and stored once for all beams or samples:

        ```python
        >>> cache = PagedCache(model.config)
        >>> prefill(model, cache, **inputs)
        >>> model.generate(**inputs, num_beams=4, past_key_values=cache.fork(4))
        ```

        Raises:
            InvalidArgumentError: `n` is less than 1.
        """
        if not is_integer(n) or n < 1:
            raise InvalidArgumentError(f"fork(n={n!r}): expected at least 1 copy of every row")
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        # With the groups in the memo, deepcopy copies recurrent states and the like, but no blocks.
        memo: dict[int, Any] = {id(group): group.fork(n) for group in self._groups}
        other._groups = [memo[id(group)] for group in self._groups]
        other.layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        for layer, attributes, _ in unpaged.repeated(other.layers, n):
            vars(layer).update(attributes)
        other.provenance = self.provenance and self.provenance.repeated(n)
        other._request = None
        return other

    def __getstate__(self) -> dict[str, Any]:
        if self.provenance is not None:
            raise UnsupportedError(
                "a cache of a BlockStore cannot be pickled: its pools hold what others have committed. Keep the store, "
                "`store.save(path)`, or compute the tokens into a PagedCache(model.config)"
            )
        return vars(self) | {"_request": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for group in self._groups:
            group.pool.hold_only_tables()

    def __deepcopy__(self, memo: dict) -> "PagedCache":
        return self.fork()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replaces the rows by `beam_idx`, int64 `[batch]`; block tables move, keys and values do not."""
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices`: int64, or bool `[batch]`."""
        if indices.dtype == torch.bool:
            if self._num_rows() not in (0, len(indices)):
                raise InvalidArgumentError(f"a mask of {len(indices)} rows for a cache with {self._num_rows()}")
            indices = indices.nonzero().squeeze(1)
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Lets every row stand `repeats` times in a row, on the same blocks."""
        if not is_integer(repeats) or repeats < 1:
            raise InvalidArgumentError(f"batch_repeat_interleave({repeats!r}): expected at least 1")
        with self._budget.lock, self._budget.ledger:
            rows = [np.arange(group.table.num_rows).repeat(repeats) for group in self._groups]
            self._commit(
                *(
                    change
                    for group, of_group in zip(self._groups, rows, strict=True)
                    for change in group.selected(of_group)
                ),
                *unpaged.repeated(self.layers, repeats),
                provenance=self.provenance and self.provenance.repeated(repeats),
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens of every row.

        Args:
            tokens_to_remove: minus the number of tokens; more than there are removes all. 0 only gives up what was
                kept after `activate_past_recording`.

        Raises:
            CropError: the number is positive (the meaning it had before transformers 5.18 is gone), or tokens have
                left a window and are needed again: call `activate_past_recording` first to keep them.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding passes a tensor
        if tokens_to_remove > 0:
            raise CropError(
                f"crop({tokens_to_remove}): expected minus the number of tokens to remove, crop(-{tokens_to_remove})"
            )
        self.check_finished()
        with self._budget.lock, self._budget.ledger:
            self._crop(tokens_to_remove)

    def _crop(self, tokens_to_remove: int) -> None:
        kept = [max(group.table.num_columns + tokens_to_remove, 0) for group in self._groups]
        for group, num_columns in zip(self._groups, kept, strict=True):
            window = group.table.window
            slid = window is not None and group.table.num_columns >= window
            if slid and not (self._records_past(group) and group.can_crop(num_columns)):
                raise CropError(
                    f"crop({tokens_to_remove}): tokens that a window of {window} has passed are gone, at "
                    f"{group.table.num_columns} tokens. Call `cache.activate_past_recording()` before the forward "
                    "passes that are to be taken back."
                )
        num_left = max(self.get_seq_length() + tokens_to_remove, 0)
        self._commit(
            *unpaged.cropped(self.layers, tokens_to_remove),
            *(
                change
                for group, num_columns in zip(self._groups, kept, strict=True)
                for change in group.cropped(num_columns)
            ),
            provenance=self.provenance and self.provenance.cropped(num_left),
        )

    def activate_past_recording(self) -> None:
        """Lets layers with a window keep what leaves it until the next `crop`, which may bring it back.

        Raises:
            UnsupportedError: assisted decoding is to go on from a cache that holds tokens. transformers feeds it the
                whole prompt then, behind the part of it that is there (seen up to 5.24, with any cache).
        """
        if self.get_seq_length() and sys._getframe(1).f_code.co_name == ASSISTED_DECODING:
            raise UnsupportedError(
                f"assisted decoding with a cache that holds {self.get_seq_length()} tokens: transformers would compute "
                "the whole prompt again behind them. Pass an empty cache (of a BlockStore, `cache_for(.., "
                "reuse=False)`), or generate without an assistant"
            )
        super().activate_past_recording()

    def rollback(self) -> None:
        """Takes back a forward pass that stopped half-way, so that the cache can be used again.

        A pass that was interrupted (Ctrl-C, out of memory in the model) has reached some layers and not others. If
        there is none, nothing happens. Recurrent states of hybrid models cannot be taken back: unless it was the first
        pass, the cache then refuses to go on until `reset()`. A pass that stopped inside the last of their layers, or
        behind all layers, counts as finished.
        """
        with self._budget.lock:
            self._budget.ledger.recover()
        if self._request is not None and self._unfinished_states():  # no layer with blocks was reached
            self._undo_pass(self._pass_number + 1)
        elif self._unfinished_layers() or self._unreached_layers() or self._unfinished_states():
            self._undo_pass(max(group.last_pass for group in self._groups))
        self._request = None

    def reset(self) -> None:
        """Gives back all blocks. The pools stay allocated; the next call may have another batch size."""
        with self._budget.lock, self._budget.ledger:
            self._commit(
                *(change for group in self._groups for change in group.emptied()),
                *unpaged.emptied(self.layers),
                _states_are_ahead=False,
                provenance=None,
            )

    @property
    def is_linear(self) -> list[bool]:
        """For each layer, whether it holds recurrent states and no keys."""
        return [
            not isinstance(layer, PagedLayer) and isinstance(layer, LinearAttentionCacheLayerMixin)
            for layer in self.layers
        ]

    @property
    def batch_size(self) -> int:
        """Rows of the cache; -1 while it is empty."""
        table = self._lead_table()
        return -1 if table is None else table.num_rows

    def check_finished(self) -> None:
        """Raises `CacheStateError` if a forward pass has reached some layers and not others."""
        unfinished = self._unfinished_layers()
        if unfinished:
            raise unfinished_pass(unfinished, self._lead_table().num_columns)
        if self._unfinished_states():
            raise CacheStateError(
                f"an earlier forward pass stopped half-way, at or behind the recurrent state of layer "
                f"{self.last_state_idx}. Call `cache.rollback()`, which takes the pass back if it was the first one. "
                "After another one call `cache.reset()` and compute the whole sequence again."
            )

    @property
    def groups(self) -> Sequence[LayerGroup]:
        """The layer groups that the config tells."""
        return self._groups[: self._num_config_groups]

    @property
    def lock(self) -> threading.RLock:
        """Held while blocks are handed out, given back or moved, also by forks."""
        return self._budget.lock

    @property
    def num_columns(self) -> int:
        """Columns in blocks: `get_seq_length`, but for models that have none, where it raises."""
        table = self._lead_table()
        return 0 if table is None else table.num_columns

    @property
    def memory_limit(self) -> int | None:
        """Bytes that all pools may hold together; `None` for no limit."""
        return self._budget.limit

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._factory.block_size

    def _lead_table(self) -> BlockTable | None:
        """The table of the first group that holds tokens."""
        return next((group.table for group in self._groups if group.table.num_columns), None)

    def _num_rows(self) -> int:
        """Rows that the tables have, also when all of their columns were cropped; 0 for none."""
        return max((group.table.num_rows for group in self._groups), default=0)

    def _check_states(self) -> None:
        if self._states_are_ahead:
            raise CacheStateError(
                "a forward pass was taken back, but recurrent states cannot be: they are ahead of the keys and values. "
                "Call `cache.reset()` and compute the whole sequence again, or use a new cache."
            )

    def _check_pass(self, request: MaskRequest) -> None:
        """Checks a forward pass that is about to run. Nothing changes, and no layer has run when it is refused."""
        self._check_states()
        self.check_finished()
        num_columns = self._num_config_columns()
        check_request(request, [group.table for group in self.groups], num_columns, self)
        limited = [group for group in self.groups if group.table.num_columns and group.pool.is_limited]
        if not limited or not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers):
            return
        # Recurrent states cannot be taken back, so a lack of blocks has to show before the first layer runs.
        pending = PendingMask(num_columns, request.num_new, request.attention_mask)
        for group in limited:
            attended = pending.new_columns(group.table, request.num_new)
            group.check_room(request.num_new, attended, record_past=self._records_past(group))

    def _take_pending_mask(self) -> PendingMask | None:
        """What is known of the mask of the forward pass that begins; `None` if the pass has built none from 2-D."""
        request, self._request = self._request, None
        if request is None or not request.is_running:
            return None
        return PendingMask(self._num_config_columns(), request.num_new, request.attention_mask)

    def _num_config_columns(self) -> int:
        """Columns of the layers that keep what the config tells; those that are given images may have others."""
        return max((group.table.num_columns for group in self.groups), default=0)

    def _unfinished_layers(self) -> list[int]:
        """Layers that an interrupted forward pass has not reached, though it has reached others."""
        config_groups = [group for group in self.groups if group.lengths]
        longest = self._num_config_columns()
        return [idx for group in config_groups for idx, length in group.lengths.items() if length != longest]

    def _unfinished_states(self) -> bool:
        """Whether an interrupted forward pass has reached recurrent states, and not all layers behind them."""
        if self.last_state_idx < 0:
            return False
        last = max(idx for idx, layer in enumerate(self.layers) if isinstance(layer, LinearAttentionCacheLayerMixin))
        has_reached_blocks = self._request is None or not self._groups
        return self.last_state_idx < last or not has_reached_blocks

    def _unreached_layers(self) -> list[int]:
        """Layers that have no tokens at all, while the first forward pass has given some to layers before them.

        Layers for images have none as long as there is no image.
        """
        if not any(group.began_empty for group in self._groups):
            return []
        lengths = {layer.layer_idx: layer.get_seq_length() for layer in self.layers if isinstance(layer, PagedLayer)}
        last_reached = max((idx for idx, length in lengths.items() if length), default=-1)
        return [idx for idx in lengths if idx > last_reached and idx not in self._image_layers]

    def _may_read_blocks(self) -> bool:
        """Whether the model's attention may know blocks: not known of a config that no model was made from.

        Other implementations could read a `LazyKV` by operations, but some are compiled and see no operations.
        """
        return getattr(self._config, "_attn_implementation", None) in (None, ATTENTION_NAME)

    def _place(self, layer: PagedLayer, num_new: int) -> None:
        """Moves a layer that has no tokens yet to a group of its own if it keeps other tokens than its group.

        The cross-attention layers of some vision-language models do: they are given image tokens.
        """
        if layer.get_seq_length():
            return
        group = layer.group
        may_stay = layer.layer_idx not in self._image_layers or group not in self.groups
        if may_stay and group.accepts(layer.layer_idx, num_new):
            return
        for other in self._groups[self._num_config_groups :]:
            if other.table.window == group.table.window and other.accepts(layer.layer_idx, num_new):
                layer.group = other
                return
        layer.group = self._factory.make(group.table.window, [layer.layer_idx], is_only_group=False)
        self._groups.append(layer.group)

    def _records_past(self, group: LayerGroup) -> bool:
        return all(layer.record_past for layer in self.layers if isinstance(layer, PagedLayer) and layer.group is group)

    def _select_rows(self, rows: torch.Tensor) -> None:
        indices = rows.cpu().numpy()
        num_rows = self._num_rows()
        if num_rows and indices.size and not (indices.min() >= 0 and indices.max() < num_rows):
            raise InvalidArgumentError(
                f"rows {indices.tolist()} of a cache with {num_rows} rows: expected indices from 0 to {num_rows - 1}"
            )
        provenance = self.provenance and self.provenance.for_rows(num_rows or len(indices))
        with self._budget.lock, self._budget.ledger:
            self._commit(
                *(change for group in self._groups if group.table.num_rows for change in group.selected(indices)),
                *unpaged.reordered(self.layers, rows),
                provenance=provenance and provenance.selected(indices),
            )

    def _commit(self, *changes: Change, **attributes: Any) -> None:
        """Makes changes to the parts of the cache, and to its own attributes, and ends the forward pass."""
        ended = {"_last_layer_idx": -1, "last_state_idx": -1, "_pending_mask": None, "_request": None}
        ended["_states_are_ahead"] = self._states_are_ahead or self._unfinished_states()
        self._budget.ledger.commit([*changes, Change(self, ended | attributes)])

    def _undo_pass(self, pass_number: int) -> None:
        with self._budget.lock, self._budget.ledger:
            undone = [change for group in self._groups for change in group.undone(pass_number)]
            is_empty = not any(group.num_columns_before(pass_number) for group in self._groups)
            if self._groups and is_empty:
                self._commit(*undone, *unpaged.emptied(self.layers), _states_are_ahead=False)
            else:
                num_reached = max(self._last_layer_idx, self.last_state_idx) + 1
                is_ahead = unpaged.have_states(self.layers[:num_reached])
                self._commit(*undone, _states_are_ahead=self._states_are_ahead or is_ahead)


def _live_text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the decoder that its model looks at: of encoder-decoders `get_text_config` gives a copy."""
    text_config = config.get_text_config(decoder=True)
    return text_config if any(value is text_config for value in vars(config).values()) else config
