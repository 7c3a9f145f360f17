"""Attention by its scores, in float32 or, for a float64 query, float64."""

import torch

from hf_paged_kernels.modes import matmul

# Bound of the score matrix of one tile of queries, in elements.
MAX_SCORES = 1 << 24


def attention_scores(query: torch.Tensor, key: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """`[batch, num_heads, query_length, kv_length]` in float32, in float64 for a float64 query."""
    batch, num_heads, query_length, dim = query.shape
    work = work_dtype(query)
    # The query heads of a group are the rows of one product.
    grouped = (query.to(work) * scale).reshape(batch, key.shape[1], -1, dim)
    scores = matmul(grouped, key.to(work).transpose(-1, -2))
    scores = scores.view(batch, num_heads, query_length, -1)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights like `scores`, zero where all scores are -inf, and the log-sum-exp `[batch, num_heads, query_length]`."""
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    lse = scores.logsumexp(-1)
    # A query that sees nothing has lse -inf; 0 in its place gives exp(-inf - 0) = 0.
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))
    return (weights if sinks is None else weights[..., :-1]), lse


def weighted_values(weights: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
    """`[batch, num_heads, query_length, value_dim]` in the dtype of `weights`.

    Args:
        weights: `[batch, num_heads, query_length, kv_length]`, 0 for what a query does not see.
        value: `[batch, num_kv_heads, kv_length, value_dim]`
        visible: what each query sees, bool `[1 or batch, 1, query_length, kv_length]`; `None` for all. NaN and
            infinity in other values, which 0 would make NaN of, are then passed over.
    """
    value = value.to(weights.dtype)
    if visible is None:
        return _products(weights, value)
    if value.device.type == "cpu":
        out = _products(weights, value)
        return out if bool(out.isfinite().all()) else _seen_products(weights, value, visible)
    # To ask an accelerator whether there are such values would be to wait for it.
    if visible.shape[-2] == 1:
        return _products(weights, value.masked_fill(~visible.transpose(-1, -2), 0.0))
    return _seen_products(weights, value, visible)


def _seen_products(weights: torch.Tensor, value: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """`weighted_values` with values in the dtype of `weights`, whatever numbers they have."""
    seen = visible.expand_as(weights).to(weights.dtype)
    out = _products(weights, value.nan_to_num(0.0, 0.0, 0.0))
    for kind, number in ((value.isposinf(), torch.inf), (value.isneginf(), -torch.inf), (value.isnan(), torch.nan)):
        out = torch.where(_products(seen, kind.to(weights.dtype)) > 0, out + number, out)
    return out


def _products(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    batch, num_heads, query_length, kv_length = weights.shape
    grouped = weights.reshape(batch, value.shape[1], -1, kv_length)
    return matmul(grouped, value).view(batch, num_heads, query_length, -1)


def work_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32
