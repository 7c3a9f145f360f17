"""Caches that begin with what is cached of a batch of prompts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hf_paged_cache.cache import PagedCache
from hf_paged_cache.errors import OutOfBlocksError
from hf_paged_cache.prefill import prefill
from hf_paged_cache.prefix.cached_blocks import CachedBlocks
from hf_paged_cache.prefix.cached_prompts import CachedPrompts
from hf_paged_cache.prefix.extra_keys import Spans
from hf_paged_cache.prefix.identity import Namespace
from hf_paged_cache.prefix.prompts import Prompts
from hf_paged_cache.prefix.provenance import Positions, StoreProvenance
from hf_paged_cache.prefix.requests import Request, read_request
from hf_paged_cache.prefix.resumable import why_not_now
from hf_paged_cache.prefix.rope_positions import RopePositions, keeps_positions
from hf_paged_cache.prefix.sharing import plan_parts


class Lookups:
    """Makes the caches of a store.

    Args:
        model: the model.
        root: an empty cache on the pools of the store.
        blocks, prompts: what is cached.
        never: why nothing of the model can ever be reused; empty if something can.
    """

    def __init__(self, model: Any, root: PagedCache, blocks: CachedBlocks, prompts: CachedPrompts, never: str) -> None:
        self._model = model
        self._root = root
        self._blocks = blocks
        self._prompts = prompts
        self._never = never
        self._lock = root.lock
        self._positions = RopePositions(model) if not never and keeps_positions(model) else None

    def cache_for(self, request: Request, namespace: Namespace, *, copies: int, reuse: bool, share: bool) -> PagedCache:
        """See `BlockStore.cache_for`."""
        why = self._never or why_not_now(self._model) or request.why
        is_unknown = bool(why)
        if not reuse:
            why = why or "reuse=False was asked for"
        positions, prompts = None, request.prompts
        if self._positions is not None and not is_unknown:
            if request.beside.images:
                about = (request.input_ids, request.attention_mask, request.inputs)
                positions, spans = self._positions.with_images(*about, prompts)
                request = replace(request, has_certain_positions=_num_names(spans) == _num_names(prompts.spans))
            else:
                with self._lock:
                    spans = [self._prompts.names.with_shifts(row) for row in prompts.spans]
            prompts = prompts._replace(spans=spans)
            request = replace(request, prompts=prompts)
        is_text = not any(prompts.spans) and not any(request.beside)
        num_computed = self._compute_parts(prompts, namespace) if share and not why and is_text else 0
        cache = self._begin(request, namespace, num_computed, why, is_unknown=is_unknown, positions=positions)
        num_columns = cache.num_columns
        if not request.beside.images:
            prompts.check_cached(num_columns, cache.provenance.why)
        if copies == 1:
            return cache
        if reuse and num_columns < prompts.num_columns - 1 and request.can_be_computed_first:
            mask, rest = request.attention_mask, request.inputs_after(num_columns)
            prefill(self._model, cache, input_ids=request.input_ids, attention_mask=mask, **rest)
        return cache.fork(copies)

    def _begin(
        self,
        request: Request,
        namespace: Namespace,
        num_computed: int = 0,
        why: str = "",
        *,
        is_unknown: bool = False,
        positions: Positions | None = None,
    ) -> PagedCache:
        """A cache with what is cached of the prompts.

        Args:
            num_computed: tokens that this very call has computed and cached.
            why: why nothing may be looked up; empty if it may.
            is_unknown: whether nothing of it may be committed either.
            positions: of the prompts, if they come with images that move positions.
        """
        prompts = request.prompts
        with self._lock:
            cache = self._root.fork()
            for group in cache.groups:
                group.records_past = not is_unknown
            matches = [] if why else self._prompts.match(namespace, prompts)
            num_columns, padding, why_less = self._prompts.begin(cache.groups, request, matches)
            reused = max(int((num_columns - padding).sum()) - num_computed, 0)
        if self._positions is not None and positions is None and num_columns:
            about = (request.input_ids, request.attention_mask)
            positions = self._positions.after_images(*about, cache, prompts.spans)
        cache.provenance = StoreProvenance(
            store=self._blocks,
            namespace=namespace,
            rows=prompts.rows,
            padding=prompts.padding,
            reused_tokens=reused,
            why=why or why_less or request.why_less,
            is_unknown=is_unknown,
            spans=prompts.spans,
            positions=positions,
        )
        return cache

    def _compute_parts(self, prompts: Prompts, namespace: Namespace) -> int:
        """Computes what rows share or lack, where it pays.

        Returns:
            How many tokens that was.
        """
        if len(prompts.rows) == 1:
            return 0
        with self._lock:
            matches = self._prompts.match(namespace, prompts)
            cached = [
                self._blocks.usable_tokens(match, len(tokens) - 1)
                for match, tokens in zip(matches, prompts.rows, strict=True)
            ]
        parts = plan_parts(prompts.rows, cached, prompts.padding.tolist(), least_saved=self._root.block_size)
        num_computed, caches = 0, []
        for row, num_tokens in parts:
            try:
                cache = self.compute(prompts.rows[row][:num_tokens], namespace)
            except OutOfBlocksError:
                break
            caches.append(cache)  # so that a later part does not take its blocks
            num_computed += num_tokens - cache.provenance.reused_tokens
        return num_computed

    def compute(self, tokens: np.ndarray, namespace: Namespace) -> PagedCache:
        """Computes and caches all of `tokens`; the cache that holds them."""
        # One more, for which `generate` may go on; what it is does not matter.
        ids = torch.from_numpy(np.append(tokens, tokens[-1:]))[None].to(self._model.device)
        cache = self._begin(read_request(self._model, ids, torch.ones_like(ids), None, {}, divides=False), namespace)
        if cache.num_columns < len(tokens):
            prefill(self._model, cache, input_ids=ids, attention_mask=torch.ones_like(ids))
            with self._lock:
                self._prompts.add(cache.groups, namespace, [tokens], [()], [])
        return cache


def _num_names(spans: Sequence[Spans]) -> int:
    """How many spans have a name."""
    return sum(span.name is not None for row in spans for span in row)
