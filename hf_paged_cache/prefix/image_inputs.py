"""The inputs of `generate` beside tokens: what they may change, and which of them a cached prefix leaves out."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged_cache.prefix.extra_keys import Span
from hf_paged_cache.prefix.prompts import Prompts

# Inputs that are put in the place of placeholder tokens, and what describes such.
_IMAGES = re.compile(
    "pixel|image|video|audio|vision|speech|patch|grid|aspect_ratio|spatial_shape|target_sizes|second_per|mm_encoder|"
    "input_features|feature_attention_mask|input_values|padding_mask|tiles"
)
# Numbers for each token that say which ones are placeholders.
_TOKEN_TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids")
# Arrays that choose tokens, and that no key or value depends on: the negative prompt has a cache of its own.
_FOR_CHOOSING = ("negative_prompt_attention_mask", "negative_prompt_ids")


class Beside(NamedTuple):
    """The names of inputs that keys and values depend on beside tokens.

    Attributes:
        images: those that are put in the place of placeholder tokens.
        others: those that any token may depend on: embeddings, positions of one's own, adapters chosen for each row.
    """

    images: list[str]
    others: list[str]


def inputs_beside_tokens(inputs: Mapping[str, Any], input_ids: torch.Tensor, placeholders: Sequence[int]) -> Beside:
    """The inputs beside tokens of a call of `generate`.

    Args:
        inputs: all but `input_ids` and `attention_mask`.
        input_ids: `[batch, tokens]`.
        placeholders: tokens that stand for images and the like.
    """
    images, others = [], []
    for name, value in inputs.items():
        if name == "adapter_names" and value is not None:
            others.append(name)
        elif name in _FOR_CHOOSING or not _holds_arrays(value):
            continue
        elif name in _TOKEN_TYPES:
            if not _marks_placeholders(value, input_ids, placeholders):
                others.append(name)
        else:
            (images if _IMAGES.search(name) else others).append(name)
    return Beside(sorted(images), sorted(others))


def num_images(names: Sequence[str], inputs: Mapping[str, Any]) -> int | None:
    """How many images the inputs of `generate` hold; `None` if their shapes do not tell.

    Args:
        names: the inputs that belong to images.
        inputs: all inputs.
    """
    tensors = {name: inputs[name] for name in names if isinstance(inputs[name], torch.Tensor)}
    grids = [value for name, value in tensors.items() if name.endswith("grid_thw")]
    if grids:
        return sum(map(len, grids))
    pixels = tensors.get("pixel_values")
    return len(pixels) if len(names) == 1 and pixels is not None and pixels.ndim == 4 else None


def _marks_placeholders(types: Any, input_ids: torch.Tensor, placeholders: Sequence[int]) -> bool:
    """Whether token types are zero but for placeholders, which stand for something of their own anyway."""
    types = torch.as_tensor(types, device="cpu")
    if not types.any():
        return True
    ids = input_ids.cpu()
    return types.shape == ids.shape and not types[~torch.isin(ids, torch.tensor([*placeholders]))].any()


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_arrays, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_arrays, value))
    return isinstance(value, torch.Tensor | np.ndarray)


def inputs_after(
    num_columns: int, prompts: Prompts, names: Sequence[str], inputs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What is left of the inputs of `generate` when the first columns are cached, which end in no image.

    A model puts the features of all images that it is given in the place of all placeholders that it is given.

    Args:
        num_columns: columns that are cached.
        prompts: the prompts.
        names: the inputs that belong to images.
        inputs: all inputs.

    Returns:
        The inputs; without those of images if none is left. `None` if some are left and it is not certain which parts
        of the inputs belong to these.
    """
    if not names:
        return dict(inputs)
    spans = [
        (span, pad + span.start >= num_columns)
        for row, pad in zip(prompts.images, prompts.padding.tolist(), strict=True)
        for span in row
    ]
    is_left = np.array([left for _, left in spans], dtype=bool)
    if is_left.all():
        return dict(inputs)
    others = {name: value for name, value in inputs.items() if name not in names}
    if not is_left.any():
        return others
    divided = _divided(is_left, spans, len(prompts.rows), {name: inputs[name] for name in names})
    return None if divided is None else others | divided


def _divided(
    is_left: np.ndarray, spans: Sequence[tuple[Span, bool]], num_rows: int, images: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The parts of inputs that belong to some of the images; `None` if that is not certain."""
    num_images, names = len(spans), [span.name for span, _ in spans]
    if None in names or len({name.token for name in names}) != 1:  # images beside videos, say, with inputs of their own
        return None
    if not all(isinstance(value, torch.Tensor) and value.ndim for value in images.values()):
        return None
    chosen = torch.from_numpy(is_left)
    grids = [value for name, value in images.items() if name.endswith("grid_thw")]
    if len(grids) > 1 or (not grids and num_rows > 1):  # a batch may have a dimension of its own
        return None
    patches = grids[0].prod(dim=-1).cpu() if grids and len(grids[0]) == num_images else None
    divided = {}
    for name, value in images.items():
        if len(value) == num_images:
            divided[name] = value[chosen.to(value.device)]
        elif patches is not None and len(value) == int(patches.sum()):
            divided[name] = value[chosen.repeat_interleave(patches).to(value.device)]
        else:
            return None
    return divided
