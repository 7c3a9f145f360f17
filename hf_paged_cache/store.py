"""`BlockStore`: blocks that outlive a call, found again by the tokens that they hold."""

import gc
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_paged_cache.arguments import is_integer
from hf_paged_cache.cache import PagedCache
from hf_paged_cache.codecs import KVQuant
from hf_paged_cache.errors import CacheStateError, InvalidArgumentError, OutOfBlocks, UnsupportedError
from hf_paged_cache.identity import Identity, Namespace
from hf_paged_cache.known_blocks import KnownBlocks
from hf_paged_cache.model_identity import ModelIdentity
from hf_paged_cache.options import generate_options
from hf_paged_cache.origin import Origin
from hf_paged_cache.prefill import prefill
from hf_paged_cache.prefix import Match, PrefixNode, tokens_of
from hf_paged_cache.prompts import Prompts, inferred_mask, inputs_beside_tokens, read_prompts
from hf_paged_cache.resumable import counts_columns, layer_device, placeholders, why_never
from hf_paged_cache.session import Pin, Session
from hf_paged_cache.sharing import plan_parts
from hf_paged_cache.store_file import StoreFile, write_store_file
from hf_paged_cache.store_stats import Counts, KnownRun, StoreStats


class BlockStore:
    """Keys and values of earlier prompts and answers, for later ones that begin alike.

    ```python
    >>> store = BlockStore(model, memory="1GiB")
    >>> cache = store.cache_for(**inputs)  # what is known of the prompt is in it
    >>> output = model.generate(**inputs, past_key_values=cache)
    >>> store.commit(cache, output)  # what was computed is known from now on
    ```

    A prompt is matched token by token from its beginning, and `generate` computes the rest, at least the last token.
    Blocks stay where they are: caches hold the same ones, and copy one when they write into it. When memory is short,
    what was used longest ago is given up, the ends of sequences first. What a changed model has computed is not found
    any more, see `invalidate` for changes that cannot be seen.

    Calls may come from several threads: each takes the lock of the pools for as long as it changes what is known.

    Args:
        model: a decoder-only model with `generate`.
        memory: hard limit of the bytes of all blocks, those that caches of the store hold included: a number or text
            such as `"4GiB"`.
        kv, block_size, backend: as in `PagedCache`.

    Raises:
        InvalidArgumentError: an argument has no meaning.
        UnsupportedError: the model is an encoder-decoder.
    """

    def __init__(
        self,
        model: Any,
        *,
        memory: int | str,
        kv: str | KVQuant = "raw",
        block_size: int = 64,
        backend: Any = None,
    ) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedError(
                "a BlockStore is for decoder-only models: what the decoder of an encoder-decoder computes depends on "
                "the encoder's input, not on the decoder's tokens alone"
            )
        self.model = model
        self._root = PagedCache(model.config, kv=kv, block_size=block_size, memory=memory, backend=backend)
        self._identity = ModelIdentity(model, kv, block_size)
        self._known = KnownBlocks(self._root.groups, block_size)
        self._lock = self._root.lock
        self._trees: dict[Namespace, PrefixNode] = {}
        self._pins: dict[int, Pin] = {}
        self._counts = Counts()
        self._dtype: str | None = None
        self._never = why_never(self._root, model.config)

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"BlockStore({stats.blocks_known} blocks known, {stats.hit_tokens} of {stats.lookup_tokens} tokens of "
            f"{stats.lookups} prompts reused)"
        )

    def cache_for(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        copies: int = 1,
        reuse: bool = True,
        share: bool = True,
        salt: str | None = None,
        content_key: str | None = None,
        **inputs: Any,
    ) -> PagedCache:
        """A cache that begins with what is known of a batch of prompts.

        `generate` goes on from one column in all rows, so the cache ends where the row ends of which least is known.

        Args:
            input_ids: `[batch, tokens]`, the whole prompts, as `generate` is going to get them.
            attention_mask: `[batch, tokens]`, with padding on the left.
            copies: beams or samples of each row: rows stand that many times in a row, and their prompts are computed
                here, once.
            reuse: whether to look anything up; an empty cache otherwise, of which everything may become known. For
                assisted decoding, which transformers can only begin with an empty cache.
            share: compute here what several rows begin with, once, and what some rows lack that others know, where
                that saves work. Otherwise only what is known already is in the cache.
            salt: nothing is shared between callers with different ones.
            content_key: names what is in the input beside tokens (images, say). Without it nothing is known of a
                prompt with such inputs. With the inputs, what comes before the first of them is reused; later turns
                may leave them out and give the key only, and reuse all.
            **inputs: the other inputs of `generate`, if there are any.

        Returns:
            The cache; its `stats()` say how many tokens were reused, and why it is not more.

        Raises:
            InvalidArgumentError: an argument has no meaning, or images that a prompt has places for are neither given
                nor known.
            OutOfBlocks: `copies` prompts do not fit beside what other caches hold.
        """
        if not is_integer(copies) or copies < 1:
            raise InvalidArgumentError(f"copies={copies!r}: expected at least 1")
        if attention_mask is None:
            ends, pads = generate_options(self.model, inputs).ends_and_pads
            attention_mask = inferred_mask(input_ids, pads, ends)
        prompts = read_prompts(input_ids, attention_mask)
        beside = inputs_beside_tokens(inputs)
        why = self._never or prompts.why_unknown
        if beside and content_key is None:
            why = why or f"the input has {', '.join(beside)} beside tokens, and no content_key= that names them"
        if prompts.padding.any() and counts_columns(self.model):
            why = why or "the model takes no positions, so those of padded rows may be others"
        is_unknown = bool(why)
        if not reuse:
            why = why or "reuse=False was asked for"
        namespace = Namespace(self._current_identity(), salt, content_key)
        num_computed = self._compute_parts(prompts, namespace) if share and not why and not beside else 0
        # Where images are given again, `generate` wants to put them in the place of tokens.
        stops = placeholders(self.model.config) if content_key is not None else []
        cache = self._begin(prompts, namespace, num_computed, why, is_unknown=is_unknown, stops=stops if beside else [])
        if stops and not beside:
            prompts.check_known(cache.get_seq_length(), stops)
        with self._lock:
            self._counts.add_lookup(prompts, cache.origin)
        if copies == 1:
            return cache
        if reuse and cache.get_seq_length() < prompts.num_columns - 1:
            prefill(self.model, cache, input_ids=input_ids, attention_mask=attention_mask, **inputs)
        return cache.fork(copies)

    def commit(self, cache: PagedCache, output: Any) -> int:
        """Makes known what a cache from `cache_for` holds.

        After beam search, which moves rows, the prompts; else all tokens up to the end of each answer. A cache knows no
        tokens, so the output has to be what was generated with it last.

        Args:
            cache: the cache. It can be used further.
            output: what `generate` returned: ids `[batch, tokens]`, prompts included, or an object with `sequences`.

        Returns:
            Tokens of all rows that are known now.

        Raises:
            InvalidArgumentError: the cache is not of this store, or `output` does not begin with its prompts.
            CacheStateError: the model has changed since `cache_for`, a forward pass stopped half-way, or the cache was
                not given the prompts of `cache_for` under their mask.
        """
        if not isinstance(cache, PagedCache) or cache.origin is None or cache.origin.store is not self._known:
            raise InvalidArgumentError("commit takes a cache that `cache_for` of this store has made")
        if cache.origin.is_unknown or not cache.get_seq_length():
            return 0
        table = cache.groups[0].table
        origin = cache.origin.for_rows(table.num_rows)
        if origin is None or (table.padding != np.minimum(origin.padding, table.num_columns)).any():
            raise CacheStateError(
                f"the cache has {table.num_rows} rows with {table.padding.tolist()} columns of padding, but "
                f"`cache_for` was given {len(cache.origin.rows)} with {cache.origin.padding.tolist()}: give it the "
                "attention_mask that `generate` gets, and `copies` for beams and samples"
            )
        differences = self._identity.current().differences(origin.namespace.identity, "then")
        if differences:
            raise CacheStateError(
                f"the model has changed since `cache_for` ({'; '.join(differences)}): what the cache holds is of no "
                "use to later calls"
            )
        cache.check_finished()
        sequences = getattr(output, "sequences", output)
        rows = origin.known_rows(table.seq_lens.tolist(), sequences, *generate_options(self.model, {}).ends_and_pads)
        with self._lock:
            root = self._tree(origin.namespace)
            for row, tokens in enumerate(rows):
                self._known.add(cache.groups, row, root, tokens)
            self._known.let_go_of_past(cache.groups)
            num_tokens = sum(len(tokens) for tokens in rows)
            self._counts.committed_tokens += num_tokens
            cache.origin = origin.committed(rows)
        return num_tokens

    def session(self, *, salt: str | None = None) -> Session:
        """A conversation: `generate` on it looks up, generates and commits, and keeps hold of the last turn."""
        return Session(self, salt)

    def pin(self, input_ids: torch.Tensor, *, salt: str | None = None) -> Pin:
        """Computes a prompt if it is not known, and keeps it until `release()` of what is returned, or `clear()`.

        Args:
            input_ids: `[tokens]` or `[1, tokens]`: a system prompt, or a document.

        Raises:
            InvalidArgumentError: it is a batch.
            OutOfBlocks: it does not fit beside what other caches hold.
        """
        if isinstance(input_ids, torch.Tensor) and input_ids.ndim == 1:
            input_ids = input_ids[None]
        prompts = read_prompts(input_ids, None)
        if len(prompts.rows) != 1:
            raise InvalidArgumentError(f"pin takes one prompt, not a batch of {len(prompts.rows)}")
        if self._never:
            raise UnsupportedError(f"nothing can be pinned: {self._never}")
        namespace = Namespace(self._current_identity(), salt, None)
        cache = self._compute(prompts.rows[0], namespace)
        with self._lock:
            pin = Pin(cache, self._pins)
        return pin

    def clear(self) -> None:
        """Forgets everything, pins included. Blocks that caches hold stay theirs; if there are none, memory is freed.

        Caches that nobody has any more, but the garbage collector has not found yet, are no such.
        """
        gc.collect()
        with self._lock:
            for pin in list(self._pins.values()):
                pin.release()
            for root in self._trees.values():
                self._known.remove(root)
            self._trees.clear()
            self._known.detach()
            for group in self._root.groups:
                group.pool.give_back_memory()

    def evict(self, num_bytes: int) -> int:
        """Forgets what was used longest ago, until so many bytes of blocks are free for other tokens.

        Returns:
            Bytes that became free: fewer if caches and pins hold the rest. The memory stays the store's.
        """
        with self._lock:
            return self._known.evict(num_bytes)

    def invalidate(self) -> None:
        """Forgets everything, because the model has changed.

        Weights that an optimizer, `load_state_dict` or an adapter has changed are noticed without it; changes through
        `.data`, in hooks, or in code are not.
        """
        with self._lock:
            self._identity.invalidate()
            self.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what is known with the present model to a file, for `load`.

        A file that is there is replaced when the new one is whole and on the disk, and stays if anything goes wrong.
        Salts and content keys are in the file as text, and tokens can be read from it like the prompts themselves.
        Other calls may go on meanwhile, but what is being saved cannot make room for their blocks.

        Args:
            path: the file, a safetensors file.

        Raises:
            OSError: it cannot be written.
        """
        identity = self._identity.current()
        with self._lock:
            trees = {space: root for space, root in self._trees.items() if space.identity == identity}
            held = self._known.hold(list(trees.values()))
        try:
            names = [(space.salt, space.content_key) for space in trees]
            write_store_file(path, identity, names, held.kinds, held.runs, held.tensors)
        finally:
            with self._lock:
                held.release()

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any, *, memory: int | str, backend: Any = None) -> "BlockStore":
        """A store that knows what another one has saved, also one of another process.

        `kv` and `block_size` are as they were. Only the index is read now. Blocks are read when a prompt first begins
        with their tokens, and again when they were given up since; so the file may be larger than `memory`, and has to
        stay as it is. To save another one in its place is no change to it.

        Args:
            path: what `save` has written.
            model: the same model.
            memory, backend: as in `BlockStore`.

        Raises:
            OSError: the file cannot be opened.
            StoreFileError: it is damaged, is something else, or was saved for another model.
        """
        file = StoreFile(path)
        store = cls(model, memory=memory, kv=file.kv, block_size=file.identity.block_size, backend=backend)
        identity = store._identity.current()
        file.check_identity(identity)
        store._dtype = identity.dtype
        store._trees = {Namespace(identity, *names): store._known.index.new_root() for names in file.trees}
        store._known.attach(file, list(store._trees.values()), partial(layer_device, model))
        return store

    def stats(self) -> StoreStats:
        """What the store holds, and what it was asked for, in numbers."""
        with self._lock:
            cache = self._root.stats()
            return StoreStats(
                lookups=self._counts.lookups,
                lookup_tokens=self._counts.lookup_tokens,
                hit_tokens=self._counts.hit_tokens,
                hit_ratio=self._counts.hit_tokens / max(self._counts.lookup_tokens, 1),
                committed_tokens=self._counts.committed_tokens,
                runs_known=self._known.index.num_nodes,
                blocks_known=sum(allocator.num_retained for allocator in self._known.allocators),
                bytes_known=self._known.num_bytes,
                bytes_allocated=cache.bytes_allocated,
                evictions=sum(allocator.evictions for allocator in self._known.allocators),
                copies=cache.copies,
                why=self._never,
            )

    def runs(self) -> list[KnownRun]:
        """What is known, block by block: a run of tokens comes after the one that it follows."""
        runs: list[KnownRun] = []
        with self._lock:
            for namespace, root in self._trees.items():
                places: dict[PrefixNode | None, int | None] = {root: None}
                for node in self._known.index.runs_after(root):
                    places[node] = len(runs)
                    is_held = self._known.is_held(node)
                    parent = places[node.parent]
                    runs.append(KnownRun(tokens_of(node.run), parent, is_held, namespace.salt, namespace.content_key))
        return runs

    def _begin(
        self,
        prompts: Prompts,
        namespace: Namespace,
        num_computed: int = 0,
        why: str = "",
        *,
        is_unknown: bool = False,
        stops: Sequence[int] = (),
    ) -> PagedCache:
        """A cache with what is known of the prompts.

        Args:
            num_computed: tokens that this very call has computed and made known.
            why: why nothing may be looked up; empty if it may.
            is_unknown: whether nothing may become known of it either.
            stops: tokens before which the part that is looked up ends.
        """
        with self._lock:
            cache = self._root.fork()
            for group in cache.groups:
                group.keeps_past = not is_unknown
            matches = [] if why else self._known.match(self._tree(namespace), prompts, stops)
            num_columns, why_less = self._known.common_columns(prompts, matches), why
            try:
                padding = self._adopt(cache, prompts, matches, num_columns)
            except OutOfBlocks:
                why_less = "there is no room for what would have to be read from the file"
                num_columns = self._known.common_columns(prompts, matches, in_memory=True)
                padding = self._adopt(cache, prompts, matches, num_columns)
            reused = max(int((num_columns - padding).sum()) - num_computed, 0)
        cache.origin = Origin(self._known, namespace, prompts.rows, prompts.padding, reused, why_less, is_unknown)
        return cache

    def _adopt(self, cache: PagedCache, prompts: Prompts, matches: Sequence[Match], num_columns: int) -> np.ndarray:
        """Lets an empty cache begin with the first columns of the prompts; how many of them are padding in each row,
        int32 `[num_rows]`."""
        padding = np.minimum(prompts.padding, num_columns).astype(np.int32)
        if num_columns:
            self._known.begin(cache.groups, matches, num_columns, padding)
        return padding

    def _compute_parts(self, prompts: Prompts, namespace: Namespace) -> int:
        """Computes what rows share or lack, where it pays.

        Returns:
            How many tokens that was.
        """
        if len(prompts.rows) == 1:
            return 0
        with self._lock:
            matches = self._known.match(self._tree(namespace), prompts)
            known = [
                self._known.usable_tokens(match, len(tokens) - 1)
                for match, tokens in zip(matches, prompts.rows, strict=True)
            ]
        parts = plan_parts(prompts.rows, known, prompts.padding.tolist(), least_saved=self._root.block_size)
        num_computed, caches = 0, []
        for row, num_tokens in parts:
            try:
                cache = self._compute(prompts.rows[row][:num_tokens], namespace)
            except OutOfBlocks:
                break
            caches.append(cache)  # so that a later part does not take its blocks
            num_computed += num_tokens - cache.origin.reused_tokens
        return num_computed

    def _compute(self, tokens: np.ndarray, namespace: Namespace) -> PagedCache:
        """Computes and makes known all of `tokens`; the cache that holds them."""
        # One more, for which `generate` may go on; what it is does not matter.
        ids = torch.from_numpy(np.append(tokens, tokens[-1:]))[None].to(self.model.device)
        prompts = read_prompts(ids, None)
        cache = self._begin(prompts, namespace)
        if cache.get_seq_length() < len(tokens):
            prefill(self.model, cache, input_ids=ids, attention_mask=torch.ones_like(ids))
            with self._lock:
                self._known.add(cache.groups, 0, self._tree(namespace), tokens)
        return cache

    def _current_identity(self) -> Identity:
        """What the model is now. Blocks are made for one dtype, so with another all are given up."""
        identity = self._identity.current()
        with self._lock:
            if self._dtype not in (None, identity.dtype):
                self.clear()
            self._dtype = identity.dtype
        return identity

    def _tree(self, namespace: Namespace) -> PrefixNode:
        if namespace not in self._trees:
            self._trees = {known: root for known, root in self._trees.items() if root.children is not None}
            self._trees[namespace] = self._known.index.new_root()
        return self._trees[namespace]
