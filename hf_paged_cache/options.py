"""Options of `generate`, found where `generate` finds them.

They come from the call, from the `generation_config` of the call, then from that of the model. No other module looks
for one.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode

from hf_paged_cache.errors import InvalidArgumentError

# The name of `generate`'s cache: renamed in transformers 5.24, where the old one gives a warning.
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

# What `generate` takes beside inputs of the model and attributes of a `GenerationConfig`.
_ARGUMENTS = (inspect.signature(GenerationMixin.generate).parameters.keys() - {"self", "kwargs"}) | {
    "assistant_tokenizer",
    "tokenizer",
    "trust_remote_code",
}
_ATTRIBUTES = frozenset(name for name in vars(GenerationConfig()) if name[0] != "_") - {"transformers_version"}
# Attributes that decide how a prompt is computed, or what its attention mask is.
_OF_PROMPTS = (
    "bos_token_id",
    "compile_config",
    "disable_compile",
    "eos_token_id",
    "pad_token_id",
    "prefill_chunk_size",
)


class GenerateOptions(NamedTuple):
    """What a call of `generate` is asked for.

    Attributes:
        config: all options, as `generate` resolves them.
        given: the arguments of the call.
    """

    config: GenerationConfig
    given: Mapping[str, Any]

    @property
    def copies(self) -> int:
        """How many times each prompt stands in the batch that is computed."""
        return max(self.config.num_beams or 1, self.config.num_return_sequences or 1)

    @property
    def why_empty(self) -> str:
        """Why `generate` has to begin with an empty cache, in words; empty if it may begin with known tokens."""
        if self.config.get_generation_mode(self.given.get("assistant_model")) == GenerationMode.ASSISTED_GENERATION:
            return "transformers begins assisted decoding with an empty cache"
        if self.config.token_healing:
            return "token healing may change the prompt"
        if self.given.get("custom_generate") is not None:
            return "custom_generate may not go on from cached tokens"
        return ""

    @property
    def ends_and_pads(self) -> tuple[list[int], list[int]]:
        """The tokens that end an answer, and those that fill rows up."""
        return _token_ids(self.config.eos_token_id), _token_ids(self.config.pad_token_id)

    def for_own_cache(self) -> dict[str, Any]:
        """The options that have to be added for `generate` to use a cache that is made for it.

        What the model's `generation_config` says of caches is a default, which the cache replaces.

        Raises:
            InvalidArgumentError: the call itself asks for another cache, or for none.
        """
        for name in ("cache", "past_key_values"):
            if self.given.get(name) is not None:
                raise InvalidArgumentError(f"{name}=: the cache is made here. Call model.generate to use one of yours")
        options: dict[str, Any] = {}
        if self.config.use_cache is False:
            if self._asked("use_cache") is not None:
                raise InvalidArgumentError(
                    "use_cache=False is asked for, but this generates with a cache; call model.generate instead"
                )
            options["use_cache"] = True
        if self.config.cache_implementation is not None:
            if self._asked("cache_implementation") not in (None, "dynamic"):  # a cache that grows, as this one
                raise InvalidArgumentError(
                    f"cache_implementation={self.config.cache_implementation!r} is asked for, but this generates with "
                    "a cache of its own; leave it out, or call model.generate instead"
                )
            options["cache_implementation"] = None
        return options

    def for_prompt(self) -> dict[str, Any]:
        """The arguments with which `generate` computes the prompt once, whatever comes after it.

        Raises:
            InvalidArgumentError: as in `for_own_cache`.
        """
        self.for_own_cache()
        defaults = self.config._get_default_generation_params()
        return {
            **_for_model(self.given),
            **{name: defaults.get(name) for name in _ATTRIBUTES},
            **{name: getattr(self.config, name) for name in _OF_PROMPTS},
            "max_length": None,
            "max_new_tokens": 1,
            "synced_gpus": self.given.get("synced_gpus"),
        }

    def _asked(self, name: str) -> Any:
        """The option as the call gives it, not as a default of the model."""
        given = self.given.get(name)
        return getattr(self.given.get("generation_config"), name, None) if given is None else given


def generate_options(model: Any, given: Mapping[str, Any]) -> GenerateOptions:
    """The options of `model.generate(**given)`."""
    config = given.get("generation_config")
    attributes = {name: value for name, value in given.items() if name in _ATTRIBUTES}
    return GenerateOptions(model._prepare_generation_config(config, **attributes)[0], given)


def refuse_unknown(model: Any, given: Mapping[str, Any]) -> None:
    """Checks the names of arguments of `model.generate(**given)`, by the model's own rule.

    Raises:
        InvalidArgumentError: neither `generate` nor the model takes one.
    """
    if given.get("custom_generate") is not None:  # which may take anything
        return
    for_model = _for_model(given)
    for_model.pop("adapter_names", None)
    try:
        model._validate_model_kwargs(for_model)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from error


def _for_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that are neither options nor arguments of `generate` itself."""
    return {name: value for name, value in given.items() if name not in _ATTRIBUTES | _ARGUMENTS}


def _token_ids(tokens: int | list[int] | None) -> list[int]:
    return [] if tokens is None else list(tokens) if isinstance(tokens, list | tuple) else [tokens]
