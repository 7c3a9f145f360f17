"""What holds on to blocks of a `BlockStore` between calls: a conversation, and a pinned prompt."""

import logging
from typing import Any, Protocol

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_paged_cache.cache import PagedCache
from hf_paged_cache.errors import CacheStateError, PagedCacheError
from hf_paged_cache.options import CACHE_ARGUMENT, generate_options
from hf_paged_cache.prefix.in_process import InProcess

logger = logging.getLogger(__name__)


class ConversationStore(Protocol):
    """What a session needs of a `BlockStore`; see the methods there.

    Attributes:
        model: the model that the store belongs to.
    """

    model: Any

    def cache_and_inputs(self, input_ids: torch.Tensor, **options: Any) -> tuple[PagedCache, dict[str, Any]]: ...

    def commit(self, cache: PagedCache, output: Any) -> int: ...


class _Progress(StoppingCriteria):
    """Stops nothing, but sees the tokens after every step.

    Attributes:
        sequences: ids `[rows, tokens]`, prompts included.
    """

    def __init__(self, sequences: torch.Tensor) -> None:
        self.sequences = sequences

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.sequences = input_ids
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Session(InProcess):
    """A conversation on a store: every turn begins with what is cached, and is cached afterwards.

    ```python
    >>> with store.session() as chat:
    ...     output = chat.generate(**inputs, max_new_tokens=200)
    ```

    It keeps hold of its last turn, so that it is not given up while the conversation lasts. Use one in one thread.

    Args:
        store: the store.
        salt: see `BlockStore.cache_for`.

    Attributes:
        cache: of the last turn, or the one that is being generated; `None` before the first one.
    """

    def __init__(self, store: ConversationStore, salt: str | None = None) -> None:
        self.store = store
        self.salt = salt
        self.cache: PagedCache | None = None
        self._progress: _Progress | None = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the last turn. What it has cached stays in the store while there is room."""
        self.cache = self._progress = None

    @property
    def sequences(self) -> torch.Tensor | None:
        """The tokens of the last turn as far as it came, ids `[rows, tokens]`, prompts included; `None` if it has not
        begun to generate. After beam search the rows are those of the beams."""
        return None if self._progress is None else self._progress.sequences

    def generate(self, input_ids: torch.Tensor, *, extra_key: Any = None, **inputs: Any) -> Any:
        """`model.generate`, with what the store knows of the prompt.

        Options are read as `generate` reads them. Where it has to begin with an empty cache (assisted decoding, token
        healing, `custom_generate`) nothing is reused. An answer that cannot be committed is returned all the same,
        with a warning. One that was interrupted is in `sequences`, see `keep_interrupted`.

        Args:
            input_ids: `[batch, tokens]`, the whole conversation.
            extra_key: see `BlockStore.cache_for`. Images that are cached are left out of what the model is given.
            **inputs: what `generate` takes.

        Returns:
            What `generate` returns.

        Raises:
            InvalidArgumentError: the call asks for `use_cache=False` or for another cache. What the model's
                `generation_config` says of caches is replaced.
        """
        model = self.store.model
        options = generate_options(model, inputs)
        replaced = options.for_own_cache()
        self._progress = None
        cache, inputs = self.store.cache_and_inputs(
            input_ids,
            copies=options.copies,
            reuse=not options.why_empty,
            salt=self.salt,
            extra_key=extra_key,
            **inputs,
        )
        # It holds what it shares with the last turn. The rest of that may make room.
        self.cache = cache
        self._progress = _Progress(input_ids.repeat_interleave(options.copies, dim=0))
        # First, so that it has seen the tokens of the cache when another one raises.
        inputs["stopping_criteria"] = StoppingCriteriaList([self._progress, *(inputs.get("stopping_criteria") or ())])
        output = model.generate(**(inputs | replaced), **{CACHE_ARGUMENT: cache})
        try:
            self.store.commit(cache, output)
        except Exception as error:  # the answer is there all the same
            is_unforeseen = not isinstance(error, PagedCacheError)
            logger.warning("a turn was not committed to the store: %s", error, exc_info=is_unforeseen)
        return output

    def keep_interrupted(self) -> int:
        """Commits what an interrupted turn has computed: by Ctrl-C, by a streamer or a callback that raised, or by
        `OutOfBlocksError`.

        A forward pass that stopped half-way is taken back, and drafts of assisted decoding that were not accepted yet.

        ```python
        >>> try:
        ...     output = chat.generate(**inputs, streamer=streamer)
        ... except KeyboardInterrupt:
        ...     chat.keep_interrupted()
        ...     output = chat.sequences
        ```

        Returns:
            Tokens of all rows that are cached now; 0 if nothing was computed.

        Raises:
            CacheStateError: there is no turn, or the model has changed since.
        """
        if self.cache is None or self.sequences is None:
            raise CacheStateError("there is no turn to keep: `generate` has not begun, or the session was closed")
        self.cache.rollback()
        num_ahead = self.cache.get_seq_length() - self.sequences.shape[1]
        if num_ahead > 0:
            self.cache.crop(-num_ahead)
        return self.store.commit(self.cache, self.sequences)


class Pin(InProcess):
    """A prompt that a store keeps until `release`.

    Attributes:
        num_tokens: tokens of it.
    """

    def __init__(self, cache: PagedCache, pins: "dict[int, Pin]") -> None:
        self.num_tokens = cache.get_seq_length()
        self._cache: PagedCache | None = cache
        self._pins = pins
        pins[id(self)] = self

    def release(self) -> None:
        """Lets the prompt be given up like any other."""
        self._cache = None
        self._pins.pop(id(self), None)
