"""What codes say, computed in registers: from bytes to operands of a product.

8-bit codes that have a scale for each token stay codes: `number / unit`, exact in 16 bits, with the scales applied to
scores and weights by the caller, and so is the offset of a block's keys: its product with the query is the same for all
that have it. Codes in groups become `(code + zero) * scale`, rounded to the model's dtype as
`GroupedBlocks.read_blocks` does. Folding their scales into query and weights instead would save under a tenth of the
loop's instructions, since a tile has as many keys as a program has rows or few more, and would round twice.

Bytes hold several channels (`formats.grouped`): unpacked, they are runs of neighbouring channels, one after
the other. Where a run is no power of two wide it is padded to one, and so is everything that it is multiplied with:

    channels of a width of 80, 4 bits    0 .. 39 | 24 times nothing | 40 .. 79 | 24 times nothing
"""

import triton
import triton.language as tl

from hf_paged_kernels.formats import scaled

FP8_SCALES = tl.constexpr(scaled.FP8_SCALES)
LARGEST_STATE = tl.constexpr(scaled.LARGEST_STATE)
OUTLIER_FACTOR = tl.constexpr(scaled.OUTLIER_FACTOR)
MEDIAN_SHIFT = tl.constexpr(scaled.MEDIAN_SHIFT)
ABOVE_ALL_MAGNITUDES = tl.constexpr(1 << (31 - scaled.MEDIAN_SHIFT))
HIGHEST_BIT = tl.constexpr(30 - scaled.MEDIAN_SHIFT)
LARGEST_OFFSET_EXPONENT = tl.constexpr(scaled.LARGEST_OFFSET_EXPONENT)


@triton.jit
def channels_of(BEGIN: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, RUNS: tl.constexpr):
    """The channels at the positions `BEGIN .. BEGIN + SIZE - 1`, and which of them there are, each `[SIZE]`."""
    positions = BEGIN + tl.arange(0, SIZE)
    channels, inside = positions, positions < DIM
    if RUNS > 1 and SIZE != DIM:
        RUN: tl.constexpr = DIM // RUNS
        WIDTH: tl.constexpr = SIZE // RUNS
        channels = positions // WIDTH * RUN + positions % WIDTH
        inside = positions % WIDTH < RUN
    return channels, inside


@triton.jit
def operand(states, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """States, or the numbers that 8-bit codes stand for divided by their unit, as an operand of dtype `DTYPE`."""
    if FORMAT[0] == "int8":
        # 2**17 has ulps of 1/64: a whole number in its lowest bits counts 64ths. Cheaper than a conversion.
        bits = (states ^ 0x80).to(tl.int32) | 0x48000000
        states = (bits.to(tl.float32, bitcast=True) - (131072.0 + 128.0 / FORMAT[1])).to(DTYPE)
    elif FORMAT[0] == "fp8":
        states = e4m3_numbers(states, 1.0 / FORMAT[1]).to(DTYPE)
    return states


@triton.jit
def e4m3_numbers(codes, FACTOR: tl.constexpr):
    """The numbers of e4m3 codes, given as bytes, times a power of two, float32."""
    bits = codes.to(tl.int32)
    # In the place of float32's sign, exponent and mantissa they are too small by the difference of the biases.
    bits = (bits & 0x80) << 24 | (bits & 0x7F) << 20
    return bits.to(tl.float32, bitcast=True) * (2.0**120 * FACTOR)


@triton.jit
def scaled_codes(states, FORMAT: tl.constexpr):
    """Codes of tokens as bytes and their scales, bit for bit as `formats.scaled.quantized`. Among scales of `fp8` whose
    errors differ by rounding only, another may win.

    Args:
        states: float32 `[tokens, dims]`
    """
    largest: tl.constexpr = 127.0 if FORMAT[0] == "int8" else 448.0
    is_nan = states != states
    states = tl.where(is_nan, states, tl.minimum(tl.maximum(states, -LARGEST_STATE), LARGEST_STATE))
    smallest = tl.div_rn(tl.max(tl.abs(states), 1), largest)
    # A maximum passes over NaN, which makes the scale of its token NaN.
    smallest = tl.where(tl.max(is_nan.to(tl.int32), 1) > 0, float("nan"), smallest)
    codes, scale = codes_of_scale(states, smallest, largest, FORMAT)
    if FORMAT[0] == "fp8":
        least_error = squared_error(states, codes, scale)
        for candidate in tl.static_range(1, FP8_SCALES):
            other_codes, other_scale = codes_of_scale(
                states, smallest * 2.0 ** (candidate / FP8_SCALES), largest, FORMAT
            )
            error = squared_error(states, other_codes, other_scale)
            is_better = error < least_error
            codes = tl.where(is_better[:, None], other_codes, codes)
            scale = tl.where(is_better, other_scale, scale)
            least_error = tl.where(is_better, error, least_error)
    return codes, scale


@triton.jit
def outlying(states, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """As `formats.scaled.outlying`, of tokens float32 `[tokens, WIDTH]` of which `DIM` channels are there."""
    bits = states.to(tl.int32, bitcast=True)
    magnitudes = (bits & 0x7FFFFFFF) >> MEDIAN_SHIFT
    if WIDTH > DIM:
        magnitudes = tl.where((tl.arange(0, WIDTH) < DIM)[None, :], magnitudes, ABOVE_ALL_MAGNITUDES)
    # The median, bit by bit: as many as come before it in their order are smaller.
    median = tl.sum(magnitudes * 0, 1)
    for bit in tl.static_range(HIGHEST_BIT, -1, -1):
        candidate = median | (1 << bit)
        smaller = tl.sum((magnitudes < candidate[:, None]).to(tl.int32), 1)
        median = tl.where(smaller <= (DIM - 1) // 2, candidate, median)
    threshold = OUTLIER_FACTOR * (median << MEDIAN_SHIFT).to(tl.float32, bitcast=True)
    stands_out = (tl.abs(states) >= threshold[:, None]) & ((bits >> 23 & 0xFF) < LARGEST_OFFSET_EXPONENT)
    return tl.where(stands_out, (bits + 0x8000) & -0x10000, 0).to(tl.float32, bitcast=True)


@triton.jit
def without_offset(states, offset):
    """As `hf_paged_kernels.formats.scaled.without_offset`, of float32 `[tokens, dims]`."""
    shifted = states - offset
    is_plain = largest_magnitude(states) < largest_magnitude(shifted)
    return tl.where(is_plain[:, None], states, shifted), is_plain


@triton.jit
def largest_magnitude(states):
    """The largest magnitude of each token, NaN if there is one."""
    # As bits magnitudes have the order of the numbers, and NaN is the largest.
    return tl.max(states.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)


@triton.jit
def with_sign(scale, is_negative):
    """Scales that are not negative with a sign bit, of 0 too."""
    bits = scale.to(tl.float32).to(tl.int32, bitcast=True) | (is_negative.to(tl.int32) << 31)
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def squared_error(states, codes, scale):
    """The squared error `[tokens]` of e4m3 codes."""
    error = e4m3_numbers(codes, 1.0) * scale.to(tl.float32)[:, None] - states
    return tl.sum(error * error, 1)


@triton.jit
def codes_of_scale(states, scale, largest: tl.constexpr, FORMAT: tl.constexpr):
    """The codes nearest to `states` under a scale rounded to bfloat16, and that scale."""
    scale = scale.to(tl.bfloat16)
    numbers = tl.div_rn(states, tl.broadcast_to(scale.to(tl.float32)[:, None], states.shape))
    numbers = tl.where(numbers == numbers, tl.minimum(tl.maximum(numbers, -largest), largest), 0.0)
    if FORMAT[0] == "int8":
        codes = rounded(numbers).to(tl.int32)
    else:
        bits = numbers.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # The exponent with e4m3's bias, and 3 bits of mantissa: the nearest, of two equally near ones the even.
        normal = (magnitude + 0x7FFFF + (magnitude >> 20 & 1) >> 20) - (120 << 3)
        subnormal = rounded(tl.abs(numbers) * 2.0**9).to(tl.int32)
        codes = tl.where(tl.abs(numbers) < 2.0**-6, subnormal, normal) | (bits >> 24 & 0x80)
    return (codes & 0xFF).to(tl.uint8), scale


@triton.jit
def rounded(numbers):
    """The nearest whole numbers, of two equally near ones the even; for magnitudes below 2**22."""
    # The ulp of numbers around 1.5 * 2**23 is 1.
    return numbers + 12582912.0 - 12582912.0


@triton.jit
def unpacked(words, BITS: tl.constexpr):
    """Codes `[tile, words]` in words of several bytes as float32 `[tile, channels]`."""
    BYTES: tl.constexpr = words.dtype.primitive_bitwidth // 8
    RUNS: tl.constexpr = 8 // BITS
    # A run is what certain bits of each byte say, byte by byte and word by word.
    shifts = (tl.arange(0, RUNS) * BITS)[:, None] + (tl.arange(0, BYTES) * 8)[None, :]
    numbers = words.to(tl.int32)[:, None, :, None] >> shifts[None, :, None, :]
    numbers = tl.reshape(numbers, words.shape[0], RUNS * words.shape[1] * BYTES)
    # The lowest bits of 2**23 count ones.
    return (numbers & (2**BITS - 1) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def grouped_keys(
    words,  # [tile, words]
    scale_ptr,  # bfloat16 [groups of a block, DIM], those of the block
    zero_ptr,  # float16, the same
    first,  # token of the block that the tile begins with
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,  # tokens that share scale and zero
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
):
    """A tile of keys, `[SIZE, TILE]`, from codes that have scale and zero for each channel of a group of tokens."""
    UNIT: tl.constexpr = TILE if GROUP % TILE == 0 else (GROUP & -GROUP)
    channels, inside = channels_of(0, SIZE, DIM, 8 // BITS)
    groups = (first + tl.arange(0, TILE // UNIT) * UNIT) // GROUP
    offsets = groups[:, None] * DIM + channels[None, :]
    scale = tl.load(scale_ptr + offsets, mask=inside[None, :], other=0.0).to(tl.float32)
    zero = tl.load(zero_ptr + offsets, mask=inside[None, :], other=0.0).to(tl.float32) * scale
    states = unpacked(words, BITS)
    if UNIT == TILE:
        states = states * scale + zero
    else:
        states = tl.reshape(states, TILE // UNIT, UNIT, SIZE) * scale[:, None, :] + zero[:, None, :]
        states = tl.reshape(states, TILE, SIZE)
    return tl.trans(states.to(DTYPE))


@triton.jit
def grouped_values(
    words,  # [tile, words]
    scale_ptr,  # bfloat16 [tokens, DIM / GROUP]
    zero_ptr,  # float16, the same
    offsets,  # tokens [tile]
    readable,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,  # channels that share scale and zero
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
):
    """A tile of values, `[TILE, SIZE]`, from its codes. They have scale and zero for each group of channels of a token;
    0 for tokens that are not `readable`."""
    RUNS: tl.constexpr = 8 // BITS if SIZE != DIM else 1
    RUN: tl.constexpr = DIM // RUNS
    WIDTH: tl.constexpr = SIZE // RUNS
    # The largest power of two that divides runs and groups: channels that lie together and share a scale.
    UNIT: tl.constexpr = (GROUP & -GROUP) if (GROUP & -GROUP) < (RUN & -RUN) else (RUN & -RUN)
    UNITS: tl.constexpr = SIZE // UNIT
    positions = tl.arange(0, UNITS) * UNIT
    groups = (positions // WIDTH * RUN + positions % WIDTH) // GROUP
    there = readable[:, None] & (positions % WIDTH < RUN)[None, :]
    offsets = offsets[:, None] * (DIM // GROUP) + groups[None, :]
    scale = tl.load(scale_ptr + offsets, mask=there, other=0.0).to(tl.float32)
    zero = tl.load(zero_ptr + offsets, mask=there, other=0.0).to(tl.float32) * scale
    states = unpacked(words, BITS)
    if UNITS == 1:
        states = states * scale + zero
    else:
        states = tl.reshape(states, TILE, UNITS, UNIT) * scale[:, :, None] + zero[:, :, None]
        states = tl.reshape(states, TILE, SIZE)
    return states.to(DTYPE)
