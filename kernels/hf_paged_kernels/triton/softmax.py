"""The softmax that every attention kernel here shares: online, in base 2, safe for rows that see nothing.

A program holds for each of its rows the `maximum` of the scores so far, the `total` of `exp2(score - maximum)`, and
the sum `acc` of the values weighted by the same. Scores are in units of log2, so that the exponential is one operation;
`log2(e)` is folded into the factor of the scores. See Milakov and Gimelshein, "Online normalizer calculation for
softmax", and Dao et al., "FlashAttention".
"""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))


def score_factor(scale: float, softcap: float | None) -> float:
    """The factor that `scaled` takes, from the scale of the scores and their softcap."""
    return (scale if softcap is None else 2 * scale / softcap) * LOG2_E.value


@triton.jit
def scaled(scores, scale_log2, SOFTCAP: tl.constexpr, shift=None):
    """Raw products as scores in units of log2.

    `scale_log2`, one number or one for each key, comes from `score_factor`: the scale times log2(e), with a softcap
    2 * scale / softcap * log2(e). `shift`, if any, is added once they are multiplied by it.
    `softcap * tanh(x)` is computed as `softcap * (1 - 2 / (1 + exp(2 x)))`, which saturates instead of overflowing.
    """
    scores = scores * scale_log2
    if shift is not None:
        scores = scores + shift
    if SOFTCAP > 0.0:
        scores = (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
    return scores


@triton.jit
def updated(scores, maximum, total, MASKED: tl.constexpr):
    """Takes a tile of scores in.

    Args:
        scores: float32 `[rows, tile]`, -inf where a row does not see a key.
        maximum, total: float32 `[rows]`
        MASKED: whether a row may have seen nothing so far, so that its maximum is -inf.

    Returns:
        Weights of the tile `[rows, tile]`, the factor for what was summed so far `[rows]`, and the new `maximum` and
        `total`.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    # exp2(-inf - -inf) would be NaN; against 0 it is 0.
    safe_maximum = tl.where(new_maximum == -float("inf"), 0.0, new_maximum) if MASKED else new_maximum
    weights = tl.exp2(scores - safe_maximum[:, None])
    factor = tl.exp2(maximum - safe_maximum)
    return weights, factor, new_maximum, total * factor + tl.sum(weights, 1)


@triton.jit
def with_sink(sink, maximum, total):
    """Takes in one key that has the learned score `sink`, a natural one, and no value.

    Returns:
        The factor for what was summed so far, and the new `maximum` and `total`.
    """
    sink = sink.to(tl.float32) * LOG2_E
    new_maximum = tl.maximum(maximum, sink)
    safe_maximum = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    factor = tl.exp2(maximum - safe_maximum)
    return factor, new_maximum, total * factor + tl.exp2(sink - safe_maximum)


@triton.jit
def finished(maximum, total):
    """The factor that normalises what was summed, 0 for a row that saw nothing, and its log2-sum-exp2."""
    saw_any = total != 0.0  # NaN included
    safe_total = tl.where(saw_any, total, 1.0)
    return tl.where(saw_any, 1.0 / safe_total, 0.0), tl.where(saw_any, maximum + tl.log2(safe_total), -float("inf"))
