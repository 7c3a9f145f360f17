"""Time that a cache spends in its own code: the calls a model makes of it, without model and attention."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import Cache, LlamaConfig, LlamaForCausalLM

from eval.common.timing import interleave, median_ratio, now
from eval.common.variants import BASELINE, Variant
from hf_paged_cache import PagedCache

ROWS, PROMPT = 8, 256


def step_seconds(cache: Cache, steps: int) -> list[float]:
    """Seconds of a cache of one layer in each of `steps` decode steps after a prompt of 256 tokens, batch 8. Keys and
    values are tiny, `[8, 1, tokens, 8]`, so that copying them hardly counts."""
    prompt = torch.randn(ROWS, 1, PROMPT, 8)
    token = torch.randn(ROWS, 1, 1, 8)
    cache.get_mask_sizes(PROMPT, 0)
    cache.update(prompt, prompt, 0)
    seconds = []
    for _ in range(steps):
        start = now(token.device)
        cache.get_seq_length()
        cache.get_mask_sizes(1, 0)
        cache.update(token, token, 0)
        seconds.append(now(token.device) - start)
    return seconds


def opening_steps(seconds: Sequence[float]) -> list[float]:
    """Those of the steps in which each row's token is the first of a new block of `PagedCache`."""
    block_size = inspect.signature(PagedCache).parameters["block_size"].default
    return [second for step, second in enumerate(seconds) if (PROMPT + step) % block_size == 0]


def measure_bookkeeping(
    variants: Sequence[Variant], steps: int, repeats: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Runs the lossless caches in turn. Variants that differ in their attention only are the same here, and are
    measured once. `steps` should be many blocks' worth.

    Returns:
        One row a cache, and in plain words which could not be measured.
    """
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    # Attention that reads blocks: for others the cache copies keys out of them, which is not bookkeeping.
    model = LlamaForCausalLM._from_config(config, attn_implementation="hf_paged")
    distinct: dict[Callable, Variant] = {}
    for variant in variants:
        if not variant.lossy:
            distinct.setdefault(variant.make, variant)
    caches = {variant.name: variant for variant in distinct.values()}

    def run(variant: Variant) -> list[float]:
        return step_seconds(variant.make(model, {}, 1), steps)

    runs = {name: partial(run, variant) for name, variant in caches.items()}
    # One round more, of which the first is warm-up.
    results, failures = interleave(runs, 1 + repeats)
    medians = {name: [statistics.median(seconds) for seconds in rounds[1:]] for name, rounds in results.items()}
    rows = [
        {
            "section": "bookkeeping",
            "cache": name,
            "label": caches[name].cache,
            "context": PROMPT + steps,
            "batch": ROWS,
            "step_us": 1e6 * statistics.median(medians[name]),
            "step_us_mean": 1e6 * statistics.mean(statistics.mean(seconds) for seconds in rounds[1:]),
            "step_us_new_block": 1e6 * statistics.median(s for seconds in rounds[1:] for s in opening_steps(seconds)),
            "step_ratio": median_ratio(medians[name], medians[BASELINE]),
        }
        for name, rounds in results.items()
    ]
    return rows, [f"{caches[name].cache}, bookkeeping: {reason}" for name, reason in failures.items()]
