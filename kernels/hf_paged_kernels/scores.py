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


def weighted_values(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`[batch, num_heads, query_length, value_dim]` in the dtype of `weights`."""
    batch, num_heads, query_length, kv_length = weights.shape
    grouped = weights.reshape(batch, value.shape[1], -1, kv_length)
    return matmul(grouped, value.to(weights.dtype)).view(batch, num_heads, query_length, -1)


def work_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32
