"""`BlockStore`: blocks that outlive a call, found again by their tokens."""

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
from hf_paged_cache.errors import CacheStateError, InvalidArgumentError, UnsupportedError
from hf_paged_cache.options import generate_options
from hf_paged_cache.prefix.cached_blocks import CachedBlocks
from hf_paged_cache.prefix.cached_prompts import CachedPrompts
from hf_paged_cache.prefix.extra_keys import runs_of
from hf_paged_cache.prefix.identity import Identity, Namespace
from hf_paged_cache.prefix.in_process import InProcess
from hf_paged_cache.prefix.lookups import Lookups
from hf_paged_cache.prefix.model_identity import ModelIdentity
from hf_paged_cache.prefix.prompts import read_prompts
from hf_paged_cache.prefix.requests import Request, read_request
from hf_paged_cache.prefix.resumable import layer_device, placeholders, why_never, why_not_now
from hf_paged_cache.prefix.session import Pin, Session
from hf_paged_cache.prefix.smallest import check_room_for_a_block
from hf_paged_cache.prefix.store_file import StoreFile, write_store_file
from hf_paged_cache.prefix.store_stats import CachedNode, Counts, StoreStats


class BlockStore(InProcess):
    """Keys and values of earlier prompts and answers, for later ones that begin alike.

    ```python
    >>> store = BlockStore(model, memory="1GiB")
    >>> cache = store.cache_for(**inputs)  # begins with what is cached of the prompt
    >>> output = model.generate(**inputs, past_key_values=cache)
    >>> store.commit(cache, output)  # caches prompt and answer
    ```

    A prompt is matched token by token from its beginning, and `generate` computes the rest, at least the last token.
    Blocks stay where they are: caches hold the same ones, and copy one when they write into it. When memory is short,
    what was used longest ago is given up, the ends of sequences first. What a changed model has computed is not found
    any more, see `invalidate` for changes that cannot be seen.

    Calls may come from several threads: each takes the lock of the pools while it changes the index.

    Args:
        model: a decoder-only model with `generate`.
        memory: hard limit of the bytes of all blocks, those that caches of the store hold included: a number or text
            such as `"4GiB"`.
        kv, block_size, backend: as in `PagedCache`.

    Raises:
        InvalidArgumentError: an argument has no meaning, or `memory` has no room for the keys and values of one block
            in all layers, as far as the config tells their size.
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
        check_room_for_a_block(self._root, model)
        self._cached = CachedBlocks(self._root.groups, block_size)
        self._prompts = CachedPrompts(self._cached)
        self._lock = self._root.lock
        self._pins: dict[int, Pin] = {}
        self._counts = Counts()
        self._dtype: str | None = None
        self._never = why_never(self._root, model)
        self._lookups = Lookups(model, self._root, self._cached, self._prompts, self._never)

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"BlockStore({stats.blocks_cached} blocks cached, {stats.hit_tokens} of {stats.lookup_tokens} tokens of "
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
        extra_key: str | Sequence[Any] | None = None,
        **inputs: Any,
    ) -> PagedCache:
        """A cache that begins with what is cached of a batch of prompts.

        `generate` goes on from one column in all rows. The shortest cached prefix in the batch decides.

        Args:
            input_ids: `[batch, tokens]`, the whole prompts, as `generate` is going to get them.
            attention_mask: `[batch, tokens]`, with padding on the left.
            copies: beams or samples of each row: rows stand that many times in a row, and their prompts are computed
                here, once, if they come without images.
            reuse: whether to look anything up. Otherwise the cache is empty, and can be committed all the same. For
                assisted decoding, which transformers can only begin with an empty cache.
            share: where it saves work, compute here once what several rows begin with, and what is cached for other
                rows only. Otherwise the cache begins with what is cached already.
            salt: nothing is shared between callers with different ones.
            extra_key: names what is in the input beside tokens (images, say): one text for all of it, or a list with a
                text for each image, in the order of their placeholder tokens. For several rows a list with the key of
                each row, or `None`. Nothing is cached from the first placeholder on that no key names. With the
                images, what comes before the first of them is reused; later turns may leave them out and give the keys
                only, and reuse all. See `cache_and_inputs`.
            **inputs: the other inputs of `generate`, if there are any.

        Returns:
            The cache; its `stats()` say how many tokens were reused, and why it is not more.

        Raises:
            InvalidArgumentError: an argument has no meaning, there are not as many keys as images, or images that a
                key names are neither given nor cached.
            OutOfBlocksError: `copies` prompts do not fit beside what other caches hold.
        """
        request = read_request(self.model, input_ids, attention_mask, extra_key, inputs, divides=False)
        return self._cache_for(request, copies=copies, reuse=reuse, share=share, salt=salt)

    def cache_and_inputs(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        copies: int = 1,
        reuse: bool = True,
        share: bool = True,
        salt: str | None = None,
        extra_key: str | Sequence[Any] | None = None,
        **inputs: Any,
    ) -> tuple[PagedCache, dict[str, Any]]:
        """`cache_for`, and the inputs that `generate` has to be given with the cache: without images that are in it.

        A model puts all images that it is given in the place of all placeholders that it computes. So images can be
        reused one by one where the inputs can be divided: if each has one part for each image, in their order, or
        patches that a `grid_thw` counts. Otherwise what comes before the first image is reused, or everything.

        ```python
        >>> cache, rest = store.cache_and_inputs(**inputs, extra_key=["digest of image 1", "digest of image 2"])
        >>> output = model.generate(**rest, past_key_values=cache)
        ```

        Args, errors: as of `cache_for`.

        Returns:
            The cache, and the inputs: `input_ids`, the attention mask if there is one, and what is left of `inputs`.
        """
        request = read_request(self.model, input_ids, attention_mask, extra_key, inputs, divides=True)
        cache = self._cache_for(request, copies=copies, reuse=reuse, share=share, salt=salt)
        mask = {} if attention_mask is None else {"attention_mask": attention_mask}
        return cache, {"input_ids": input_ids, **mask, **request.inputs_after(cache.num_columns)}

    def _cache_for(self, request: Request, *, copies: int, reuse: bool, share: bool, salt: str | None) -> PagedCache:
        if not is_integer(copies) or copies < 1:
            raise InvalidArgumentError(f"copies={copies!r}: expected at least 1")
        namespace = Namespace(self._current_identity(), salt)
        cache = self._lookups.cache_for(request, namespace, copies=copies, reuse=reuse, share=share)
        with self._lock:
            self._counts.add_lookup(request.prompts, cache.provenance)
        return cache

    def commit(self, cache: PagedCache, output: Any) -> int:
        """Caches what a cache from `cache_for` holds.

        After beam search, which moves rows, the prompts; else all tokens up to the end of each answer. A cache knows no
        tokens, so the output has to be what was generated with it last.

        Args:
            cache: the cache. It can be used further.
            output: what `generate` returned: ids `[batch, tokens]`, prompts included, or an object with `sequences`.

        Returns:
            Tokens of all rows that are cached now.

        Raises:
            InvalidArgumentError: the cache is not of this store, or `output` does not begin with its prompts.
            CacheStateError: the model has changed since `cache_for`, a forward pass stopped half-way, or the cache was
                not given the prompts of `cache_for` under their mask.
        """
        if not isinstance(cache, PagedCache) or cache.provenance is None or cache.provenance.store is not self._cached:
            raise InvalidArgumentError("commit takes a cache that `cache_for` of this store has made")
        if cache.provenance.is_unknown or not cache.get_seq_length():
            return 0
        table = cache.groups[0].table
        provenance = cache.provenance.for_rows(table.num_rows)
        if provenance is None or (table.padding != np.minimum(provenance.padding, table.num_columns)).any():
            raise CacheStateError(
                f"the cache has {table.num_rows} rows with {table.padding.tolist()} columns of padding; `cache_for` "
                f"was given {len(cache.provenance.rows)} with {cache.provenance.padding.tolist()}: give it the "
                "attention_mask that `generate` gets, and `copies` for beams and samples"
            )
        differences = self._identity.current().differences(provenance.namespace.identity, "then")
        if differences:
            raise CacheStateError(
                f"the model has changed since `cache_for` ({'; '.join(differences)}): what the cache holds is of no "
                "use to later calls"
            )
        cache.check_finished()
        sequences = getattr(output, "sequences", output)
        ends, pads = generate_options(self.model, {}).ends_and_pads
        rows = provenance.known_rows(table.num_columns, table.seq_lens.tolist(), sequences, ends, pads)
        images = placeholders(self.model.config)
        with self._lock:
            num_tokens = self._prompts.add(cache.groups, provenance.namespace, rows, provenance.spans, images)
            self._counts.committed_tokens += num_tokens
            cache.provenance = provenance.committed(rows)
        return num_tokens

    def session(self, *, salt: str | None = None) -> Session:
        """A conversation: `generate` on it looks up, generates and commits, and keeps hold of the last turn."""
        return Session(self, salt)

    def pin(self, input_ids: torch.Tensor, *, salt: str | None = None) -> Pin:
        """Computes a prompt if it is not cached, and keeps it until `release()` of what is returned, or `clear()`.

        Args:
            input_ids: `[tokens]` or `[1, tokens]`: a system prompt, or a document.

        Raises:
            InvalidArgumentError: it is a batch, or has tokens that stand for images.
            OutOfBlocksError: it does not fit beside what other caches hold.
        """
        if isinstance(input_ids, torch.Tensor) and input_ids.ndim == 1:
            input_ids = input_ids[None]
        prompts = read_prompts(input_ids, None)
        if len(prompts.rows) != 1:
            raise InvalidArgumentError(f"pin takes one prompt, not a batch of {len(prompts.rows)}")
        why = self._never or why_not_now(self.model)
        if why:
            raise UnsupportedError(f"nothing can be pinned: {why}")
        if runs_of(prompts.rows[0], placeholders(self.model.config)):
            raise InvalidArgumentError("pin takes text, but the prompt has tokens that stand for images or the like")
        namespace = Namespace(self._current_identity(), salt)
        cache = self._lookups.compute(prompts.rows[0], namespace)
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
            self._prompts.clear()
            for group in self._root.groups:
                group.pool.give_back_memory()

    def evict(self, num_bytes: int) -> int:
        """Forgets what was used longest ago, until so many bytes of blocks are free for other tokens.

        Returns:
            Bytes that became free: fewer if caches and pins hold the rest. The memory stays the store's.
        """
        with self._lock:
            return self._cached.evict(num_bytes)

    def invalidate(self) -> None:
        """Forgets everything, because the model has changed.

        Weights that an optimizer, `load_state_dict` or an adapter has changed are noticed without it; changes through
        `.data`, in hooks, or in code are not.
        """
        with self._lock:
            self._identity.invalidate()
            self.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what the present model has committed to a file, for `load`.

        A file that is there is replaced when the new one is whole and on the disk, and stays if anything goes wrong.
        Salts and extra keys are in the file as text, and tokens can be read from it like the prompts themselves.
        Other calls may go on meanwhile, but what is being saved cannot make room for their blocks.

        Args:
            path: the file, a safetensors file.

        Raises:
            OSError: it cannot be written.
        """
        identity = self._identity.current()
        with self._lock:
            held, salts, names = self._prompts.hold(identity)
        try:
            write_store_file(path, identity, salts, names, held.kinds, held.nodes, held.tensors)
        finally:
            with self._lock:
                held.release()

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any, *, memory: int | str, backend: Any = None) -> "BlockStore":
        """A store with what another one has saved, also one of another process.

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
        store._prompts.attach(file, identity, partial(layer_device, model))
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
                nodes=self._cached.index.num_nodes,
                blocks_cached=sum(allocator.num_cached for allocator in self._cached.allocators),
                bytes_cached=self._cached.num_bytes,
                bytes_allocated=cache.bytes_allocated,
                reclaimed_blocks=sum(allocator.reclaimed_blocks for allocator in self._cached.allocators),
                copies=cache.copies,
                why=self._never,
            )

    def nodes(self) -> list[CachedNode]:
        """What is cached, block by block: parents come first."""
        with self._lock:
            return self._prompts.nodes()

    def _current_identity(self) -> Identity:
        """What the model is now. Blocks are made for one dtype, so with another all are given up."""
        identity = self._identity.current()
        with self._lock:
            if self._dtype not in (None, identity.dtype):
                self.clear()
            self._dtype = identity.dtype
        return identity
