"""Quantization as its definition says it, in NumPy and float64, and inputs that are hard to quantize.

It is given numbers and returns what they read as afterwards. It shares no code with what it judges.
"""

from __future__ import annotations

import numpy as np
import torch

from hf_paged_cache import KVQuant

LARGEST_STATE = 2.0**100
# e4m3: sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa; no infinity, and one NaN for each sign.
_BITS = np.arange(256)
_EXPONENT, _MANTISSA = _BITS >> 3 & 15, _BITS & 7
_MAGNITUDE = np.where(_EXPONENT == 0, _MANTISSA / 8 * 2.0**-6, (1 + _MANTISSA / 8) * 2.0 ** (_EXPONENT - 7))
E4M3 = np.where(_BITS & 127 == 127, np.nan, np.where(_BITS < 128, _MAGNITUDE, -_MAGNITUDE))
"""The value of each byte as 8-bit floating point."""
LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}


def with_offset(keys: np.ndarray, first_key: np.ndarray, name: str) -> np.ndarray:
    """What keys `[..., tokens, dim]` of a block that begins with `first_key` `[..., 1, dim]` read as."""
    offset = outlying(first_key)
    shifted = single(keys - offset)
    is_plain = np.abs(keys).max(-1, keepdims=True) < np.abs(shifted).max(-1, keepdims=True)
    return np.where(is_plain, token_wise(keys, name), token_wise(shifted, name) + offset)


def outlying(states: np.ndarray) -> np.ndarray:
    """The channels of tokens `[..., dim]` that are at least 6 times as large as the median, rounded down to 5 bits, of
    their magnitudes; to 8 bits. Of others nothing."""
    median = np.sort(np.abs(states), axis=-1)[..., (states.shape[-1] - 1) // 2, None]
    mantissa, exponent = np.frexp(median)
    median = np.ldexp(np.floor(mantissa * 32) / 32, exponent)
    exponents = np.frexp(states)[1]
    ulp = 2.0 ** (exponents - 8.0)
    rounded = np.sign(states) * np.floor(np.abs(states) / ulp + 0.5) * ulp
    return np.where(np.abs(states) >= 6 * median, rounded, 0.0)


def token_wise(states: np.ndarray, name: str) -> np.ndarray:
    """What tokens `[..., dim]` read as under `"int8"` or `"fp8"`."""
    largest = LARGEST_CODE[name]
    smallest = np.abs(states).max(-1, keepdims=True) / largest
    if name == "int8":
        return np.round(_in_units_of(bfloat(smallest), states, largest)) * bfloat(smallest)
    # Of the scales over a factor of 2 the one that rounds the token best.
    scales = bfloat(smallest * 2 ** (np.arange(16).reshape(16, *[1] * states.ndim) / 16))
    read = nearest_e4m3(_in_units_of(scales, states, largest)) * scales
    with np.errstate(invalid="ignore", over="ignore"):
        errors = ((read - states) ** 2).sum(-1, keepdims=True)
    return np.take_along_axis(read, errors.argmin(0)[None], axis=0)[0]


def _in_units_of(scale: np.ndarray, states: np.ndarray, largest: float) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(states / scale, nan=0.0, posinf=largest, neginf=-largest).clip(-largest, largest)


def grouped(states: np.ndarray, bits: int, axis: int, coverage: float) -> np.ndarray:
    """What groups that run along `axis` read as with codes of `bits` bits, a scale and a zero, for codes that cover
    the middle of their range."""
    largest = 2**bits - 1
    lowest, highest = (bound(states, axis=axis, keepdims=True) for bound in (np.min, np.max))
    extent = single(highest - lowest)
    margin = single(extent * (1 - coverage) / 2)
    first = single(lowest + margin)
    # A zero counts steps in float16.
    step = single(np.maximum((extent - 2 * margin) / largest, np.abs(first) / 60_000))
    scale = bfloat(step)
    scale = np.where(scale < step, bfloat(step * (1 + 2**-8)), scale)
    with np.errstate(divide="ignore", invalid="ignore"):
        zero = half(np.nan_to_num(first / scale))
        codes = np.nan_to_num(states / scale - zero, nan=0.0, posinf=largest, neginf=0.0).clip(0, largest)
    return (np.round(codes) + zero) * scale


def block_keys(keys: np.ndarray, quant: KVQuant) -> np.ndarray:
    """What the keys `[..., block_size, dim]` of a block read as: groups of tokens, for each channel."""
    groups = keys.reshape(*keys.shape[:-2], -1, divisor(keys.shape[-2], quant.key_group), keys.shape[-1])
    return grouped(groups, quant.key_bits, -2, quant.key_coverage).reshape(keys.shape)


def block_values(values: np.ndarray, quant: KVQuant) -> np.ndarray:
    """What values `[..., dim]` read as: groups of channels, for each token."""
    groups = values.reshape(*values.shape[:-1], -1, divisor(values.shape[-1], quant.value_group))
    return grouped(groups, quant.value_bits, -1, quant.value_coverage).reshape(values.shape)


def rotated(states: np.ndarray) -> np.ndarray:
    """`[..., dim]` times a Hadamard matrix, in pieces of the largest power of two that divides `dim`. Done twice it
    changes nothing."""
    size = states.shape[-1] & -states.shape[-1]
    signs = [[1 - 2 * ((row & column).bit_count() % 2) for column in range(size)] for row in range(size)]
    pieces = states.reshape(*states.shape[:-1], -1, size)
    return (pieces @ (np.array(signs) / size**0.5)).reshape(states.shape)


def divisor(size: int, group: int) -> int:
    """The largest divisor of `size` up to `group`."""
    return max(number for number in range(1, group + 1) if size % number == 0)


def half(numbers: np.ndarray) -> np.ndarray:
    """Rounded to float16."""
    return single(numbers).astype(np.float16).astype(np.float64)


def bfloat(numbers: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16."""
    return torch.from_numpy(numbers.astype(np.float32)).bfloat16().double().numpy()


def single(numbers: np.ndarray) -> np.ndarray:
    """Rounded to float32, in which scales are computed: rounded at once, some would become another float16."""
    return numbers.astype(np.float32).astype(np.float64)


def nearest_e4m3(numbers: np.ndarray) -> np.ndarray:
    """The nearest e4m3 value, of two equally near ones that with an even mantissa."""
    values = E4M3[:127]  # the positive ones, in order
    above = np.searchsorted(values, np.abs(numbers)).clip(1, len(values) - 1)
    to_below, to_above = np.abs(numbers) - values[above - 1], values[above] - np.abs(numbers)
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return np.copysign(values[np.where(takes_above, above, above - 1)], numbers)


def assert_as_near(read: torch.Tensor, expected: np.ndarray, exact: torch.Tensor, axis: int) -> None:
    """Fails unless `read` is what is expected, or the other code that is equally near where a number lies in the
    middle of two: which of them it becomes is for the last bit of a division to decide.

    Args:
        read: in the model's dtype; may differ by its rounding of the largest number along `axis`.
        expected, exact: like `read`, float64.
        axis: along which a group runs.
    """
    of_dtype = torch.finfo(read.dtype)
    rounding = (of_dtype.eps + 1e-6) * exact.abs().amax(axis, keepdim=True) + of_dtype.smallest_normal * of_dtype.eps
    largest = of_dtype.max
    read, expected = read.double(), torch.from_numpy(expected).clamp(-largest, largest)
    is_same = (read - expected).abs() <= rounding
    is_equally_near = ((read - exact).abs() - (expected - exact).abs()).abs() <= rounding
    assert bool((is_same | is_equally_near).all())
    assert float(is_same.double().mean()) > 0.9


def hard_inputs(shape: tuple[int, ...], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Keys or values `[..., tokens, dim]` of several kinds, float32."""
    noise = torch.randn(shape, generator=generator)
    # As in Qwen2.5: a few channels that are large, and so in every token.
    outliers = noise.clone()
    outliers[..., ::7] = 50 * outliers[..., ::7] + 120
    growth = 2.0 ** torch.arange(shape[-2])[:, None].remainder(24)
    return {
        "random": noise,
        "outlier channels": outliers,
        "growing magnitude": noise * growth / 2**8,
        "zeros": torch.zeros(shape),
        "a constant": torch.full(shape, -3.7),
        "one token that is not zero": noise * (torch.arange(shape[-2]) == 3)[:, None],
        "very small": noise * 1e-7,
        "as large as float16": noise.clamp(-2, 2) * 32_752,
        "from 1e-7 to 1e4": noise * 10.0 ** torch.linspace(-7, 4, shape[-2])[:, None],
    }
