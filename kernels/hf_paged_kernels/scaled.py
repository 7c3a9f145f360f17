"""Blocks of 8-bit codes with a scale for each token and head: `int8` and `fp8`.

    x  =  code * scale         scale = max |x| / largest code, float16

A token is quantized when it is written, by itself, so nothing about it changes later.
"""

from dataclasses import dataclass

import torch

from hf_paged_kernels.layout import Blocks, Part, TokenIndex

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LARGEST_SCALE = torch.finfo(torch.float16).max


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

    @property
    def dims(self) -> tuple[int, int]:
        return self.key.shape[-1], self.value.shape[-1]

    def read_blocks(self, part: Part, block_ids: torch.Tensor) -> torch.Tensor:
        planes = (getattr(self, part), getattr(self, f"{part}_scale"))
        codes, scale = (plane.index_select(1, block_ids) for plane in planes)
        return (codes.view(self.code_dtype).float() * scale.float()[..., None]).to(self.dtype)

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
    states, largest = states.float(), LARGEST_CODE[dtype]
    scale = (states.abs().amax(-1) / largest).clamp(max=LARGEST_SCALE).half()
    # The codes are those of the rounded scale. Zeros have scale 0 and codes 0.
    codes = (states / scale.float()[..., None]).nan_to_num(0.0, largest, -largest).clamp(-largest, largest)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale
