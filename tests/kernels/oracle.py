"""Attention as its definition says it: for each row, query and KV head on its own, in float64.

It knows no blocks, steps or paddings. It is given the tokens of each row, as plain tensors, and shares no code with
what it judges.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Row(NamedTuple):
    """All tokens of one sequence.

    Attributes:
        key: `[num_kv_heads, tokens, key_dim]`
        value: `[num_kv_heads, tokens, value_dim]`
    """

    key: torch.Tensor
    value: torch.Tensor

    @property
    def length(self) -> int:
        return self.key.shape[1]

    def then(self, key: torch.Tensor, value: torch.Tensor) -> "Row":
        """The row with more tokens at its end."""
        return Row(torch.cat([self.key, key], dim=1), torch.cat([self.value, value], dim=1))


def attention(
    query: torch.Tensor,
    rows: Sequence[Row],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `paged_attention` has to return.

    Args:
        query: `[batch, num_heads, query_length, key_dim]`; query `i` is token `length - query_length + i` of its row.
        rows: the tokens of each row, those of the queries included.
        scale, window, softcap, sinks, key_mask: as in `paged_attention`.

    Returns:
        float64 output `[batch, num_heads, query_length, value_dim]` and log-sum-exp `[batch, num_heads, query_length]`.
    """
    batch, num_heads, query_length, _ = query.shape
    out = torch.zeros(batch, num_heads, query_length, rows[0].value.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, num_heads, query_length), -math.inf, dtype=torch.float64)
    for b, row in enumerate(rows):
        key, value = row.key.double(), row.value.double()
        group_size = num_heads // key.shape[0]
        allowed = torch.ones(row.length, dtype=torch.bool) if key_mask is None else key_mask[b, : row.length]
        for i in range(query_length):
            position = row.length - query_length + i
            first = 0 if window is None else max(position - window + 1, 0)
            seen = [token for token in range(first, position + 1) if allowed[token]]
            for kv_head in range(key.shape[0]):
                heads = slice(kv_head * group_size, (kv_head + 1) * group_size)
                scores = query[b, heads, i].double() @ key[kv_head, seen].T * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                logits = scores if sinks is None else torch.cat([scores, sinks[heads, None].double()], dim=1)
                lse[b, heads, i] = logits.logsumexp(1)
                if seen:
                    out[b, heads, i] = (scores - lse[b, heads, i, None]).exp() @ value[kv_head, seen]
    return out, lse


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp over a union of disjoint key sets, from those over each set."""
    outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp().nan_to_num(0)
    return (weights[..., None] * outs).sum(0), lse
