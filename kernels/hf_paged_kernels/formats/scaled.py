"""Blocks of 8-bit codes with a scale for each token and head: `int8` and `fp8`.

    x  =  code * scale                      scale bfloat16;  int8: max |x| / 127,  fp8: at least max |x| / 448
    x  =  code * |scale| + offset           keys; offset bfloat16, one for each channel of a block
    x  =  code * |scale|                    keys whose scale has its sign bit set

Floating-point codes lie the closer the smaller they are, in steps that repeat with each factor of 2. Which scale rounds
a token best depends on all its values, so `fp8` tries some over a factor of 2 and takes the one of the least squared
error. A token is quantized when it is written, by itself, so nothing about it changes later.

Some models (Qwen2) add a bias to keys that is hundreds of times larger than the rest in a few channels, and then all of
a token's steps are as coarse as those channels need. So a block keeps an offset, and its codes say what is left without
it. The offset is that of the block's first key in the channels where it stands out, and 0 in the others. It depends on
that token alone, and with it the codes of the block: rows that share tokens share codes.

The first key may be the only one that stands out, as an attention sink does. So a key is coded as it is if the offset
would make its largest magnitude larger, and the sign bit of its scale says so: scales are never negative. Where the
offset is 0 both magnitudes are the same, and no sign bit is set.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from hf_paged_kernels.formats.blocks import Blocks, Part, TokenIndex, in_model_dtype

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LARGEST_STATE = 2.0**100
"""Larger numbers, infinity among them, count as this one: scores and sums of values have to fit in float32."""
# The divergence that `eval.quality` measures falls by a third with 8 scales, and by a tenth more with 16.
FP8_SCALES = 16
# Bounds what the search takes besides, and keeps it in the processor's cache.
VALUES_AT_A_TIME = 2**18
OUTLIER_FACTOR = 6.0
"""A channel stands out if it is that many times as large as the median of its token's magnitudes: of normally
distributed numbers, hardly one in 10,000."""
MEDIAN_SHIFT = 19
"""Bits of a float32 that the median leaves out: it has an exponent and 4 bits of mantissa."""
LARGEST_OFFSET_EXPONENT = 127 + 100
"""The exponent, as float32 stores it, of the largest number, which has no offset any more."""


@dataclass(frozen=True, eq=False)
class ScaledBlocks(Blocks):
    """All blocks of one layer.

    Attributes:
        key, value: codes as int8, `[num_kv_heads, num_blocks, block_size, dim]`; of fp8 their bits.
        key_scale, value_scale: bfloat16 `[num_kv_heads, num_blocks, block_size]`; the sign bit of a key's, where there
            are offsets, says that its codes are those of the key itself.
        code_dtype: int8 or float8_e4m3fn.
        dtype: the model's.
        key_offset: bfloat16 `[num_kv_heads, num_blocks, key_dim]`, what the keys of a block have besides; `None` for
            codes of the keys themselves.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor
    value_scale: torch.Tensor
    code_dtype: torch.dtype
    dtype: torch.dtype
    key_offset: torch.Tensor | None = None

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        planes = (self.key, self.value, self.key_scale, self.value_scale)
        return planes if self.key_offset is None else (*planes, self.key_offset)

    @cached_property
    def dims(self) -> tuple[int, int]:
        return self.key.shape[-1], self.value.shape[-1]

    def read_blocks(self, part: Part, block_ids: torch.Tensor) -> torch.Tensor:
        planes = (getattr(self, part), getattr(self, f"{part}_scale"))
        codes, scale = (plane.index_select(1, block_ids) for plane in planes)
        states = codes.view(self.code_dtype).float() * scale.float().abs()[..., None]
        if part == "key" and self.key_offset is not None:
            offset, is_added = self.key_offset.index_select(1, block_ids).float(), ~scale.signbit()
            states.addcmul_(is_added.float()[..., None], offset[:, :, None])
        return in_model_dtype(states, self.dtype)

    def write(self, part: Part, states: torch.Tensor, index: TokenIndex) -> None:
        """Quantizes and stores tokens `[batch, num_kv_heads, tokens, dim]` at `index`.

        The first key of a block sets its offset. Keys without it among them are stored by the offset that their block
        has.
        """
        states, rows = states.reshape(-1, states.shape[-1]), index.rows
        if index.stored is not None:
            states, rows = states.index_select(0, index.stored), rows.index_select(0, index.stored)
        is_plain = None
        if part == "key" and self.key_offset is not None:
            states, is_plain = without_offset(states.float(), self._offsets(states, rows))
        plane, scales = getattr(self, part), getattr(self, f"{part}_scale")
        codes, scale = quantized(states, self.code_dtype)
        if is_plain is not None:
            scale = torch.where(is_plain, -scale, scale)
        plane.view(-1, plane.shape[-1]).index_copy_(0, rows, codes.view(torch.int8))
        scales.view(-1).index_copy_(0, rows, scale)

    def _offsets(self, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The offsets of keys `[n, dim]` that belong at `rows` `[n]`, once those of blocks that begin here are set."""
        offsets, blocks = self.key_offset.view(-1, keys.shape[-1]), rows // self.block_size
        begins = (rows % self.block_size == 0).nonzero()[:, 0]
        first_keys = keys.index_select(0, begins)
        offsets.index_copy_(0, blocks.index_select(0, begins), outlying(first_keys).to(offsets.dtype))
        return offsets.index_select(0, blocks).float()


def outlying(states: torch.Tensor) -> torch.Tensor:
    """What stands out of tokens `[..., dim]`, rounded to what bfloat16 holds, float32; 0 in all other channels.

    Nothing here is rounded but the result, so that every kernel finds the same. Infinity and NaN do not stand out: they
    are for their token alone.
    """
    states = states.float().contiguous()
    bits = states.view(torch.int32)
    magnitudes = (bits & 0x7FFFFFFF) >> MEDIAN_SHIFT
    median = magnitudes.sort(-1).values[..., (states.shape[-1] - 1) // 2, None] << MEDIAN_SHIFT
    stands_out = states.abs() >= OUTLIER_FACTOR * median.view(torch.float32)
    stands_out &= bits >> 23 & 0xFF < LARGEST_OFFSET_EXPONENT
    rounded = (bits + 0x8000) & -0x10000
    return torch.where(stands_out, rounded, 0).view(torch.float32)


def without_offset(keys: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What keys `[n, dim]` are quantized as under offsets `[n, dim]`, and which of them are so as they are, bool `[n]`.

    Of two equal maxima the offset wins, and so it does for NaN.
    """
    shifted = keys - offset
    is_plain = keys.abs().amax(-1) < shifted.abs().amax(-1)
    return torch.where(is_plain[:, None], keys, shifted), is_plain


def quantized(states: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of tokens.

    Scales have the range of float32, so that no token vanishes for being small. Infinity counts as `LARGEST_STATE`. NaN
    makes the scale of its token NaN, and so the token.

    Args:
        states: `[..., dim]`
        dtype: int8 or float8_e4m3fn.

    Returns:
        Codes `[..., dim]`, scales bfloat16 `[...]`.
    """
    states = states.float().clamp(-LARGEST_STATE, LARGEST_STATE)
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
    """The codes nearest to `states` `[..., dim]` under scales `[...]` rounded to bfloat16, and those.

    A scale that is rounded down makes the largest number at most 127.5 steps: nearest to the largest code still.
    """
    largest = LARGEST_CODE[dtype]
    scale = scale.bfloat16()
    # Zeros have scale 0 and codes 0.
    codes = (states / scale.float()[..., None]).nan_to_num(0.0, largest, -largest).clamp(-largest, largest)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale


def _best_codes(states: torch.Tensor, smallest: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of tokens `[n, dim]`, where each takes the best scale from `smallest` `[n]` to twice as much."""
    codes, scales = _codes(states, smallest * scale_factors(states.device)[:, None], dtype)
    errors = (codes.float() * scales.float()[..., None] - states).square().sum(-1)
    best, token = errors.argmin(0), torch.arange(len(states), device=states.device)
    return codes.view(torch.uint8)[best, token].view(dtype), scales[best, token]
