"""A batch of prompts as `generate` is going to get it, and what of it may be looked up and committed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_paged_cache.errors import InvalidArgumentError
from hf_paged_cache.options import generate_options, refuse_unknown
from hf_paged_cache.prefix.extra_keys import keys_of_rows, spans_of
from hf_paged_cache.prefix.image_inputs import Beside, inputs_after, inputs_beside_tokens, num_images
from hf_paged_cache.prefix.prompts import Prompts, inferred_mask, read_prompts
from hf_paged_cache.prefix.resumable import counts_columns, placeholders


@dataclass(frozen=True, eq=False)
class Request:
    """A batch of prompts, and the inputs that belong to it.

    Attributes:
        input_ids: `[batch, tokens]`
        attention_mask: `[batch, tokens]`, or none.
        inputs: all other inputs of `generate`.
        beside: those of them that keys and values depend on.
        prompts: the rows.
        why: why nothing of it can be cached, in words; empty if something can.
        divides: whether inputs of images that are cached are left out.
        has_certain_positions: whether it is certain how far each image that has a key moves the tokens behind it.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    inputs: Mapping[str, Any]
    beside: Beside
    prompts: Prompts
    why: str
    divides: bool
    has_certain_positions: bool = True

    @property
    def why_less(self) -> str:
        """Why only a part of it can be cached, in words; empty if all can."""
        unnamed = [
            pad + span.start
            for spans, pad in zip(self.prompts.spans, self.prompts.padding.tolist(), strict=True)
            for span in spans
            if span.name is None
        ]
        if not unnamed:
            return ""
        if not self.has_certain_positions:
            return f"it is not certain how far the images from column {min(unnamed)} on move what follows"
        return f"tokens from column {min(unnamed)} on depend on images or the like that no extra_key= names"

    def columns_to_begin_with(self, num_cached: int) -> int:
        """How many columns, up to `num_cached`, a cache may begin with, so that the rest can be computed."""
        if self.beside.images and (not self.divides or self.inputs_after(num_cached) is None):
            return min(num_cached, self.prompts.columns_before_images)
        return num_cached

    def inputs_after(self, num_columns: int) -> dict[str, Any] | None:
        """What `generate` has to be given beside `input_ids` and `attention_mask`, if these columns are cached; `None`
        if that is not certain."""
        if not self.divides:
            return dict(self.inputs)
        return inputs_after(num_columns, self.prompts, self.beside.images, self.inputs)

    @property
    def can_be_computed_first(self) -> bool:
        """Whether all but the last column can be computed before `generate` gets the same inputs."""
        is_whole = all(
            self.prompts.uncut(row, len(tokens) - 1) == len(tokens) - 1 for row, tokens in enumerate(self.prompts.rows)
        )
        return is_whole and (self.divides or not self.beside.images)


def read_request(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    extra_key: Any,
    inputs: Mapping[str, Any],
    *,
    divides: bool,
) -> Request:
    """What `BlockStore.cache_for` was asked for.

    Raises:
        InvalidArgumentError: an argument has no meaning.
    """
    if "content_key" in inputs:
        raise InvalidArgumentError("content_key= is extra_key=, which takes a key for each image too")
    if attention_mask is None:
        ends, pads = generate_options(model, inputs).ends_and_pads
        attention_mask = inferred_mask(input_ids, pads, ends)
    prompts = read_prompts(input_ids, attention_mask)
    tokens = placeholders(model.config)
    beside = inputs_beside_tokens(inputs, input_ids, tokens)
    # Tensors and images are weighed as inputs, whoever takes them. Anything else would be passed over.
    weighed = {*beside.images, *beside.others}
    refuse_unknown(
        model,
        {name: it for name, it in inputs.items() if name not in weighed and not isinstance(it, torch.Tensor)},
    )
    keys = keys_of_rows(extra_key, len(prompts.rows))
    spans = [
        spans_of(row, key, tokens, names_whole=bool(beside.others)) if len(row) else ()
        for row, key in zip(prompts.rows, keys, strict=True)
    ]
    prompts = prompts._replace(spans=spans)
    if beside.images and all(isinstance(key, list | tuple) for key in keys):
        _check_images(sum(map(len, keys)), num_images(beside.images, inputs))
    why = prompts.why_unknown
    if beside.others and not all(isinstance(key, str) for key in keys):
        why = why or (
            f"the input has {', '.join(beside.others)} beside tokens, and no extra_key= that names all of it, one str "
            "a row"
        )
    if beside.images and not any(prompts.images):
        why = why or f"the input has {', '.join(beside.images)} beside tokens, and no tokens that stand for them"
    if prompts.padding.any() and counts_columns(model):
        why = why or "the model takes no positions, so those of padded rows may be others"
    return Request(input_ids, attention_mask, inputs, beside, prompts, why, divides)


def _check_images(num_named: int, num_given: int | None) -> None:
    if num_given is not None and num_given < num_named:
        raise InvalidArgumentError(
            f"extra_key names {num_named} images of the prompt, but the inputs hold {num_given}: pass those of all "
            "images, of which `cache_and_inputs` and sessions leave out what is cached, or of none if all are cached"
        )
