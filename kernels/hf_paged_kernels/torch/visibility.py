"""Which tokens the queries of a step see: causality, window, leading padding and holes, as ranges and as masks."""

import numpy as np
import torch

from hf_paged_kernels.step import StepMetadata


def visible_range(step: StepMetadata, window: int | None, *, past_only: bool) -> tuple[int, int]:
    """The tokens `first..last - 1` that some query of some row sees.

    Args:
        step: the forward pass.
        window: as in `paged_attention`.
        past_only: leave out the tokens of this step.
    """
    lengths = step.past_lens if past_only else step.seq_lens
    last = int(lengths.max())
    if window is None:
        return 0, last
    first_query = step.seq_lens - step.query_length
    first = int(np.maximum(first_query - window + 1, 0).min())
    return min(first, last), last


def block_visibility(
    step: StepMetadata,
    first: int,
    last: int,
    *,
    past_only: bool,
    window: int | None,
    key_mask: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor | None:
    """What each query sees of the tokens `first..last - 1` of its row.

    Returns:
        bool `[batch, query_length, last - first]`; `None` if every query sees all of them.
    """
    lengths = step.past_lens if past_only else step.seq_lens
    first_query, last_query = step.seq_lens - step.query_length, step.seq_lens - 1
    sees_all = (
        key_mask is None
        and last <= int(lengths.min())
        and last - 1 <= int(first_query.min())
        and (window is None or first > int(last_query.max()) - window)
    )
    if sees_all:
        return None
    tokens = np.arange(first, last)[None]
    tokens = np.where(tokens < lengths[:, None], tokens, -1)
    return _mask(step, tokens, window, key_mask, device)


def new_visibility(
    step: StepMetadata, *, window: int | None, key_mask: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """What each query sees of the new tokens.

    Returns:
        bool `[batch, query_length, query_length]`; `None` if every query sees all of them.
    """
    if step.query_length == 1 and not step.has_empty_queries and key_mask is None:
        return None
    tokens = (step.seq_lens - step.query_length)[:, None] + np.arange(step.query_length)[None]
    return _mask(step, np.maximum(tokens, -1), window, key_mask, device)


def _mask(
    step: StepMetadata,
    tokens: np.ndarray,
    window: int | None,
    key_mask: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """bool `[batch, query_length, keys]` for keys that are the tokens `tokens` (`[batch, keys]`, -1 for none)."""
    queries = (step.seq_lens - step.query_length)[:, None] + np.arange(step.query_length)[None]
    query = torch.from_numpy(queries.astype(np.int64)).to(device)[:, :, None]
    token = torch.from_numpy(tokens.astype(np.int64)).to(device)
    key = token[:, None]
    visible = (key >= 0) & (key <= query)
    if window is not None:
        visible &= key > query - window
    if key_mask is not None:
        visible &= key_mask.gather(1, token.clamp(min=0, max=key_mask.shape[1] - 1))[:, None]
    return visible
