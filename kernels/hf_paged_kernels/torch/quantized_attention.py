"""Attention over quantized blocks in plain PyTorch: they are dequantized some at a time, never all of them."""

from collections.abc import Iterator

import torch

from hf_paged_kernels.formats.blocks import Blocks
from hf_paged_kernels.step import StepMetadata
from hf_paged_kernels.torch.reading import read_block_range
from hf_paged_kernels.torch.scores import MAX_SCORES, attention_scores, softmax, weighted_values
from hf_paged_kernels.torch.visibility import block_visibility, new_visibility, visible_range

# Values of keys, or of as many values, that are dequantized at a time.
CHUNK = 1 << 18


def quantized_attention(
    query: torch.Tensor,
    blocks: Blocks,
    step: StepMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    new_kv: tuple[torch.Tensor, torch.Tensor] | None,
    key_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, see `paged_attention`."""
    batch, num_heads, query_length, key_dim = query.shape
    past_only = new_kv is not None
    first, last = visible_range(step, window, past_only=past_only)
    num_keys = last - first + (query_length if past_only else 0)
    tile = max(1, MAX_SCORES // (batch * num_heads * max(num_keys, 1)))
    spans = list(_spans(first, last, step.block_size, CHUNK // (batch * blocks.num_kv_heads * key_dim)))

    def visible(start: int, stop: int) -> torch.Tensor | None:
        # The entry holds `key_mask`, so that its id stays its own.
        options = {"past_only": past_only, "window": window, "key_mask": key_mask, "device": query.device}
        return step.memo(
            ("visible blocks", start, stop, window, past_only, id(key_mask), query.device),
            lambda: (key_mask, block_visibility(step, start, stop, **options)),
        )[1]

    outs, lses = [], []
    for begin in range(0, query_length, tile):
        rows = slice(begin, begin + tile)
        scores, seen = [], []
        for start, stop in spans:
            key = _tokens(blocks, "key", step, start, stop, past_only)
            seen.append(_rows(visible(start, stop), rows))
            scores.append(_masked(attention_scores(query[:, :, rows], key, scale, softcap), seen[-1]))
        if new_kv is not None:
            seen.append(_rows(new_visibility(step, window=window, key_mask=key_mask, device=query.device), rows))
            scores.append(_masked(attention_scores(query[:, :, rows], new_kv[0], scale, softcap), seen[-1]))
        weights, lse = softmax(torch.cat(scores, dim=-1), sinks)
        parts = weights.split([part.shape[-1] for part in scores], dim=-1)
        out = sum(
            weighted_values(part, _tokens(blocks, "value", step, start, stop, past_only), seen_part)
            for part, seen_part, (start, stop) in zip(parts, seen, spans, strict=False)
        )
        if new_kv is not None:
            out = out + weighted_values(parts[-1], new_kv[1], seen[-1])
        outs.append(out.to(query.dtype))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _spans(first: int, last: int, block_size: int, num_tokens: int) -> Iterator[tuple[int, int]]:
    """The tokens `first..last - 1` in spans that begin and end with whole blocks, save the ends of it all."""
    length = max(num_tokens // block_size, 1) * block_size
    while first < last:
        stop = min(first // block_size * block_size + length, last)
        yield first, stop
        first = stop


def _tokens(blocks: Blocks, part: str, step: StepMetadata, first: int, last: int, past_only: bool) -> torch.Tensor:
    """Keys or values of the tokens `first..last - 1` of every row, `[batch, num_kv_heads, tokens, dim]`."""
    size = step.block_size
    dense = read_block_range(blocks, part, step, first // size, -(-last // size), past_only=past_only)
    return dense[:, :, first % size : first % size + last - first]


def _rows(visible: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """What some queries see, broadcastable over heads."""
    return None if visible is None else visible[:, None, rows]


def _masked(scores: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    return scores if visible is None else scores.masked_fill(~visible, -torch.inf)
