"""Blocks of 2-, 4- or 8-bit codes in groups: `int4`, `k4v2`, `k8v4`, `kivi2`.

    keys     (code + zero) * scale      scale and zero for each channel, over a group of tokens of a block
    values   (code + zero) * scale      scale and zero for each token, over a group of channels

Keys have channels that are large in every token, values do not (Liu et al., "KIVI", arXiv 2402.02750), so a block is
quantized when it is full, once. The scale, bfloat16, has the range of float32, and the zero, float16, counts steps: so
numbers of any magnitude can be stored, with 11 bits for what a group has in common. The codes cover the range of their
group or, where few codes are spread better so, the middle part of it.

Codes are packed along the channels: a byte of 4-bit codes holds the channels `d` and `d + dim / 2`, one of 2-bit codes
`d`, `d + dim / 4`, `d + dim / 2`, `d + 3 dim / 4`. Unpacking by shifts then gives runs of neighbouring channels.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from hf_paged_kernels.formats.blocks import Blocks, KVBlocks, Part, in_model_dtype
from hf_paged_kernels.formats.scaled import LARGEST_STATE

LARGEST_ZERO = 60_000.0
"""Steps that a zero is at most. Float16 holds it even if the step is rounded down."""


@dataclass(frozen=True, eq=False)
class GroupedBlocks(Blocks):
    """All blocks of one layer that have been quantized.

    Attributes:
        key: codes, uint8 `[num_kv_heads, num_blocks, block_size, key_dim * key_bits / 8]`
        value: codes, uint8 `[num_kv_heads, num_blocks, block_size, value_dim * value_bits / 8]`
        key_scale, key_zero: bfloat16 and float16 `[num_kv_heads, num_blocks, block_size / group, key_dim]`
        value_scale, value_zero: likewise `[num_kv_heads, num_blocks, block_size, value_dim / group]`
        key_bits, value_bits: 2, 4 or 8.
        key_coverage, value_coverage: part of the range of a group that its codes cover.
        dtype: the model's.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor
    key_zero: torch.Tensor
    value_scale: torch.Tensor
    value_zero: torch.Tensor
    key_bits: int
    value_bits: int
    key_coverage: float
    value_coverage: float
    dtype: torch.dtype

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        return (self.key, self.value, self.key_scale, self.key_zero, self.value_scale, self.value_zero)

    @cached_property
    def dims(self) -> tuple[int, int]:
        return self.key.shape[-1] * 8 // self.key_bits, self.value.shape[-1] * 8 // self.value_bits

    def read_blocks(self, part: Part, block_ids: torch.Tensor) -> torch.Tensor:
        planes = (getattr(self, part), getattr(self, f"{part}_scale"), getattr(self, f"{part}_zero"))
        codes, scale, zero = (plane.index_select(1, block_ids) for plane in planes)
        scale, zero = scale.float(), zero.float()
        if part == "key":
            groups = unpacked(codes, self.key_bits).unflatten(2, (scale.shape[2], -1))
            states = ((groups + zero[:, :, :, None]) * scale[:, :, :, None]).flatten(2, 3)
        else:
            groups = unpacked(codes, self.value_bits).unflatten(-1, (scale.shape[-1], -1))
            states = ((groups + zero[..., None]) * scale[..., None]).flatten(-2)
        return in_model_dtype(states, self.dtype)

    def quantize(self, key: torch.Tensor, value: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Quantizes and stores whole blocks.

        Args:
            key, value: `[num_kv_heads, n, block_size, dim]`
            block_ids: int64 `[n]`
        """
        key = key.float().unflatten(2, (self.key_scale.shape[2], -1))
        value = value.float().unflatten(-1, (self.value_scale.shape[-1], -1))
        key_codes, key_scale, key_zero = quantized(key, self.key_bits, 3, self.key_coverage)
        value_codes, value_scale, value_zero = quantized(value, self.value_bits, -1, self.value_coverage)
        new = (
            packed(key_codes.flatten(2, 3), self.key_bits),
            packed(value_codes.flatten(-2), self.value_bits),
            key_scale.squeeze(3),
            key_zero.squeeze(3),
            value_scale.squeeze(-1),
            value_zero.squeeze(-1),
        )
        for plane, states in zip(self.planes, new, strict=True):
            plane.index_copy_(1, block_ids, states)


@dataclass(frozen=True, eq=False)
class MixedBlocks(Blocks):
    """All blocks of one layer: the quantized ones, and apart from them those that are still exact.

    Attributes:
        quantized: codes by block id.
        exact: keys and values in the model's dtype, by exact block.
    """

    quantized: GroupedBlocks
    exact: KVBlocks

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        return self.quantized.planes

    @cached_property
    def dims(self) -> tuple[int, int]:
        return self.exact.dims

    def read_blocks(self, part: Part, block_ids: torch.Tensor) -> torch.Tensor:
        return self.quantized.read_blocks(part, block_ids)


def quantized(
    states: torch.Tensor, bits: int, axis: int, coverage: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale and zero of groups that run along `axis`.

    Infinity counts as `LARGEST_STATE`. NaN makes the scale of its group NaN, and so the group. Where a group's numbers
    are more than `LARGEST_ZERO` times as large as its steps would be, which float16 cannot count, steps are larger.

    Args:
        states: float32 of any shape.
        coverage: part of the range of a group, in the middle of it, that the codes cover.

    Returns:
        Codes uint8 like `states`; scale bfloat16 and zero float16, 1 long in `axis`.
    """
    largest = 2**bits - 1
    states = states.clamp(-LARGEST_STATE, LARGEST_STATE)
    lowest, highest = states.aminmax(dim=axis, keepdim=True)
    margin = (highest - lowest) * ((1 - coverage) / 2)
    first = lowest + margin
    step = torch.maximum((highest - lowest - 2 * margin) / largest, first.abs() / LARGEST_ZERO)
    scale = step.bfloat16()
    # Rounded up: 255 steps of one that is rounded down end a step before the highest number.
    scale = torch.where(scale.float() < step, scale.nextafter(scale.new_tensor(torch.inf)), scale)
    # The codes are those of the rounded scale and zero. Zeros have scale 0, zero 0 and codes 0.
    zero = (first / scale.float()).nan_to_num(0.0).half()
    codes = (states / scale.float() - zero.float()).nan_to_num(0.0, largest, 0.0).round().clamp(0, largest)
    return codes.to(torch.uint8), scale, zero


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 `[..., dim]` as bytes `[..., dim * bits / 8]`."""
    per_byte = 8 // bits
    parts = codes.unflatten(-1, (per_byte, -1))
    packed = parts[..., 0, :]
    for position in range(1, per_byte):
        packed = packed | parts[..., position, :] << bits * position
    return packed


def unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """What was packed, float32 `[..., dim]`."""
    parts = [codes >> shift & 2**bits - 1 for shift in range(0, 8, bits)] if bits < 8 else [codes]
    return torch.cat(parts, dim=-1).float()
