"""What kernels are told of the blocks of a layer: worked out once for as long as their planes are the same tensors."""

from typing import NamedTuple

import torch

from hf_paged_kernels.formats.blocks import Blocks, KVBlocks, Part
from hf_paged_kernels.formats.grouped import MixedBlocks
from hf_paged_kernels.formats.scaled import ScaledBlocks
from hf_paged_kernels.numba.call import DTYPES
from hf_paged_kernels.numba.machine import LANES


class Format(NamedTuple):
    """How keys, or values, are stored: the fields of `PART` from `dim` on, as they are explained there."""

    dim: int
    width: int
    dtype: int
    bits: int
    group: int


class StoredPart(NamedTuple):
    """Keys, or values, in blocks.

    Attributes:
        format: how.
        dtype: of those that are no codes, new ones included.
        exact: those that are no codes, `[num_kv_heads, num_blocks, block_size, dim]`; `None` if all are codes.
        codes, scale, zero, offset: the others; `None` if there are none.
    """

    format: Format
    dtype: torch.dtype
    exact: torch.Tensor | None
    codes: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    offset: torch.Tensor | None = None


class Stored(NamedTuple):
    """Blocks of a layer.

    Attributes:
        key, value: the parts.
        formats: theirs, the number of KV heads, and whether there are exact blocks. Layers with the same ones are told
            the same of a step.
        num_exact_blocks: 0 without exact blocks.
    """

    key: StoredPart
    value: StoredPart
    formats: tuple[Format, Format, int, bool]
    num_exact_blocks: int


def unsupported_blocks(blocks: Blocks) -> str | None:
    """What the kernels do not take about some blocks; `None` if they take them."""
    if not isinstance(blocks, KVBlocks | ScaledBlocks | MixedBlocks):
        return type(blocks).__name__
    dtypes = (_stored_part(blocks, part).dtype for part in ("key", "value"))
    return next((f"dtype {dtype}" for dtype in dtypes if dtype not in DTYPES), None)


def stored(blocks: Blocks) -> Stored:
    """What the kernels are told of blocks that they take."""
    return blocks.memo(stored, lambda: _stored(blocks))


def _stored(blocks: Blocks) -> Stored:
    key, value = (_stored_part(blocks, part) for part in ("key", "value"))
    is_mixed = isinstance(blocks, MixedBlocks)
    formats = (key.format, value.format, blocks.num_kv_heads, is_mixed)
    return Stored(key, value, formats, blocks.exact.num_blocks if is_mixed else 0)


def _stored_part(blocks: KVBlocks | ScaledBlocks | MixedBlocks, part: Part) -> StoredPart:
    dim = blocks.dims[part == "value"]
    width = -(-dim // LANES) * LANES
    plane = getattr(blocks.exact if isinstance(blocks, MixedBlocks) else blocks, part)
    dtype = blocks.dtype if isinstance(blocks, ScaledBlocks) else plane.dtype
    number = DTYPES.get(dtype, -1)
    if isinstance(blocks, KVBlocks):
        return StoredPart(Format(dim, width, number, 0, 0), dtype, plane)
    if isinstance(blocks, ScaledBlocks):
        bits = 8 if blocks.code_dtype == torch.int8 else 0
        scale, offset = getattr(blocks, f"{part}_scale"), blocks.key_offset if part == "key" else None
        return StoredPart(Format(dim, width, number, bits, 0), dtype, None, plane, scale, None, offset)
    quantized = blocks.quantized
    codes, scale, zero, bits = (getattr(quantized, f"{part}{name}") for name in ("", "_scale", "_zero", "_bits"))
    # Tokens, or channels, that share a scale.
    group = codes.shape[2] // scale.shape[2] if part == "key" else dim // scale.shape[-1]
    return StoredPart(Format(dim, width, number, bits, group), dtype, plane, codes, scale, zero)
