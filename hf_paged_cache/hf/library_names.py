"""Names inside transformers that are no interface, and that this package looks for on the call stack.

If a release renames one, results stay right, but something is lost. That is said once, when the package is imported.
"""

import logging
from typing import NamedTuple

from transformers import GenerationMixin, masking_utils

logger = logging.getLogger(__name__)

# The function that asks a cache for the sizes of a mask, and its variables that hold the 2-D mask and the positions.
MASK_ARGUMENTS = "_preprocess_mask_arguments"
MASK_VARIABLE = "attention_mask"
MASK_POSITIONS = "position_ids"
# The method of `generate` that computes the prompt.
PREFILL = "_prefill"
ASSISTED_DECODING = "_assisted_decoding"


class LibraryName(NamedTuple):
    """A name, whether the installed transformers has it, and what is lost without it."""

    name: str
    is_there: bool
    lost: str


def library_names() -> list[LibraryName]:
    """Every name that is looked for."""
    mask_arguments = getattr(masking_utils, MASK_ARGUMENTS, None)
    variables = mask_arguments.__code__.co_varnames if mask_arguments is not None else ()
    return [
        LibraryName(
            f"masking_utils.{MASK_ARGUMENTS}({MASK_VARIABLE}, {MASK_POSITIONS})",
            {MASK_VARIABLE, MASK_POSITIONS}.issubset(variables),
            "left padding is stored like text, and attention masks and positions are not checked",
        ),
        LibraryName(
            f"GenerationMixin.{PREFILL}",
            hasattr(GenerationMixin, PREFILL),
            "a cache that holds another prompt is noticed by positions only",
        ),
        LibraryName(
            f"GenerationMixin.{ASSISTED_DECODING}",
            hasattr(GenerationMixin, ASSISTED_DECODING),
            "assisted decoding with a cache that holds tokens is not refused",
        ),
    ]


def report_missing() -> None:
    """Logs a line for each name that the installed transformers does not have."""
    for name, is_there, lost in library_names():
        if not is_there:
            logger.warning(f"transformers has no {name} any more: {lost}. Please report it with your version.")


report_missing()
