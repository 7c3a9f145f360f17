"""What holds on to blocks of a `BlockStore` between calls: a conversation, and a pinned prompt."""

import logging
from typing import TYPE_CHECKING, Any

import torch

from hf_paged_cache.cache import PagedCache
from hf_paged_cache.errors import CacheStateError, InvalidArgumentError
from hf_paged_cache.in_process import InProcess
from hf_paged_cache.prefill import CACHE_ARGUMENT

if TYPE_CHECKING:
    from hf_paged_cache.store import BlockStore

logger = logging.getLogger(__name__)

# Options of `generate` that let rows of the batch stand several times.
_COPIES = ("num_beams", "num_return_sequences")
# Those that ask for assisted decoding, which begins with an empty cache.
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")


class Session(InProcess):
    """A conversation on a store: every turn begins with what is known, and is known afterwards.

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

    def __init__(self, store: "BlockStore", salt: str | None = None) -> None:
        self.store = store
        self.salt = salt
        self.cache: PagedCache | None = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the last turn. What is known of it stays in the store while there is room."""
        self.cache = None

    def generate(self, input_ids: torch.Tensor, *, extra_key: Any = None, **inputs: Any) -> Any:
        """`model.generate`, with what the store knows of the prompt.

        Args:
            input_ids: `[batch, tokens]`, the whole conversation.
            extra_key: see `BlockStore.cache_for`. Images that are known are left out of what the model is given.
            **inputs: what `generate` takes.

        Returns:
            What `generate` returns.

        Raises:
            InvalidArgumentError: `use_cache=False` is asked for.
        """
        if inputs.get("use_cache") is False:
            raise InvalidArgumentError("use_cache=False: a session generates with a cache; call model.generate instead")
        generation_config = inputs.get("generation_config") or self.store.model.generation_config
        asked = {name: inputs.get(name) or getattr(generation_config, name, None) for name in (*_COPIES, *_ASSISTED)}
        cache, inputs = self.store.cache_and_inputs(
            input_ids,
            copies=max(asked[name] or 1 for name in _COPIES),
            reuse=not any(asked[name] for name in _ASSISTED),
            salt=self.salt,
            extra_key=extra_key,
            **inputs,
        )
        # It holds what it shares with the last turn. The rest of that may make room.
        self.cache = cache
        output = self.store.model.generate(**inputs, **{CACHE_ARGUMENT: cache})
        try:
            self.store.commit(cache, output)
        except CacheStateError as error:  # the answer is there all the same
            logger.warning("a turn is not known to the store: %s", error)
        return output


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
