"""Blocks of 8-bit codes with a scale for each token and head: `int8` and `fp8`.

    x  =  code * scale         scale float16;  int8: max |x| / 127,  fp8: at least max |x| / 448

Floating-point codes lie the closer the smaller they are, in steps that repeat with each factor of 2. Which scale rounds
a token best depends on all its values, so `fp8` tries some over a factor of 2 and takes the one of the least squared
error. A token is quantized when it is written, by itself, so nothing about it changes later.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from hf_paged_kernels.layout import Blocks, Part, TokenIndex, in_model_dtype

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LARGEST_SCALE = torch.finfo(torch.float16).max
# The divergence that `eval/quality.py` measures falls by a third with 8 scales, and by a tenth more with 16.
FP8_SCALES = 16
# Bounds what the search takes besides, and keeps it in the processor's cache.
VALUES_AT_A_TIME = 2**18


@dataclass(frozen=True, eq=False)
class ScaledBlocks(Blocks):
    """All blocks of one layer.

    Attributes:
        key, value: codes as int8, `[num_kv_heads, num_blocks, block_size, dim]`; of fp8 their bits.
        key_scale, value_scale: float16 `[num_kv_heads, num_blocks, block_size]`
        code_dtype: int8 or float8_e4m3fn.
        dtype: the model's.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor
    value_scale: torch.Tensor
    code_dtype: torch.dtype
    dtype: torch.dtype

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        return (self.key, self.value, self.key_scale, self.value_scale)

    @cached_property
    def dims(self) -> tuple[int, int]:
        return self.key.shape[-1], self.value.shape[-1]

    def read_blocks(self, part: Part, block_ids: torch.Tensor) -> torch.Tensor:
        planes = (getattr(self, part), getattr(self, f"{part}_scale"))
        codes, scale = (plane.index_select(1, block_ids) for plane in planes)
        return in_model_dtype(codes.view(self.code_dtype).float() * scale.float()[..., None], self.dtype)

    def write(self, part: Part, states: torch.Tensor, index: TokenIndex) -> None:
        """Quantizes and stores tokens `[batch, num_kv_heads, tokens, dim]` at `index`."""
        states, rows = states.reshape(-1, states.shape[-1]), index.rows
        if index.stored is not None:
            states, rows = states.index_select(0, index.stored), rows.index_select(0, index.stored)
        plane, scales = getattr(self, part), getattr(self, f"{part}_scale")
        codes, scale = quantized(states, self.code_dtype)
        plane.view(-1, plane.shape[-1]).index_copy_(0, rows, codes.view(torch.int8))
        scales.view(-1).index_copy_(0, rows, scale)


def quantized(states: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of tokens.

    Infinity counts as the largest value that can be stored. NaN makes the scale of its token NaN, and so the token.

    Args:
        states: `[..., dim]`
        dtype: int8 or float8_e4m3fn.

    Returns:
        Codes `[..., dim]`, scales float16 `[...]`.
    """
    states = states.float()
    smallest = states.abs().amax(-1) / LARGEST_CODE[dtype]
    if dtype == torch.int8:
        return _codes(states, smallest, dtype)
    rows, smallest_of_rows = states.view(-1, states.shape[-1]), smallest.view(-1)
    chunk = max(1, VALUES_AT_A_TIME // (FP8_SCALES * rows.shape[-1]))
    parts = [_best_codes(*part, dtype) for part in zip(rows.split(chunk), smallest_of_rows.split(chunk), strict=True)]
    codes, scale = (torch.cat(part) if len(parts) > 1 else part[0] for part in zip(*parts, strict=True))
    return codes.view(states.shape), scale.view(smallest.shape)


def scale_factors(device: torch.device) -> torch.Tensor:
    """What fp8 tries the smallest scale times of: float32 `[FP8_SCALES]`, from 1 to less than 2."""
    return 2 ** (torch.arange(FP8_SCALES, dtype=torch.float32, device=device) / FP8_SCALES)


def _codes(states: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes nearest to `states` `[..., dim]` under scales `[...]` rounded to float16, and those."""
    largest = LARGEST_CODE[dtype]
    scale = scale.clamp(max=LARGEST_SCALE).half()
    # Zeros have scale 0 and codes 0.
    codes = (states / scale.float()[..., None]).nan_to_num(0.0, largest, -largest).clamp(-largest, largest)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale


def _best_codes(states: torch.Tensor, smallest: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of tokens `[n, dim]`, where each takes the best scale from `smallest` `[n]` to twice as much."""
    codes, scales = _codes(states, smallest * scale_factors(states.device)[:, None], dtype)
    errors = (codes.float() * scales.float()[..., None] - states).square().sum(-1)
    best, token = errors.argmin(0), torch.arange(len(states), device=states.device)
    return codes.view(torch.uint8)[best, token].view(dtype), scales[best, token]
