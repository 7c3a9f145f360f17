"""The stages with a model: what `eval.speed` measures, in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from eval.card.kernels import device_of
from eval.card.model import load
from eval.card.settings import Settings
from eval.card.worker import Measured, Piece
from eval.common.variants import BASELINE, VARIANTS, Variant, missing_requirement, quantized_variant
from eval.speed.sections import Bench, Case, beam_cases, decode_cases, padding_cases


def generation(settings: Settings) -> Mapping[str, Piece]:
    """A piece for each batch: greedy decoding with its prefill, beam search, left padding."""
    names = ("quantized", "paged", "paged+gather")
    variants = [VARIANTS[name] for name in (BASELINE, *names) if missing_requirement(name) is None]
    cases = decode_cases(variants, settings.model_contexts, settings.model_batches)
    cases += beam_cases([VARIANTS[BASELINE], VARIANTS["paged"]], settings.beam_contexts)
    cases += padding_cases([VARIANTS[BASELINE], VARIANTS["paged"]], min(settings.model_contexts[-1], 8192))
    return _pieces(settings, cases)


def codecs(settings: Settings) -> Mapping[str, Piece]:
    """A piece for each batch: greedy decoding with every codec."""
    variants: list[Variant] = [VARIANTS[BASELINE], VARIANTS["paged"]]
    variants += [quantized_variant(kv) for kv in settings.formats if kv != "raw"]
    return _pieces(
        settings,
        [
            Case("codecs", tuple(variants), (context,) * batch)
            for batch in settings.model_batches
            for context in settings.model_contexts
        ],
    )


def _pieces(settings: Settings, cases: Sequence[Case]) -> Mapping[str, Piece]:
    model, tokenizer = load(settings, device_of(settings))
    bench = Bench(model, tokenizer, settings.new_tokens, settings.repeats)
    return {str(case): partial(_measure, bench, case) for case in cases}


def _measure(bench: Bench, case: Case) -> Measured:
    num_rows, num_failures = len(bench.rows), len(bench.failures)
    bench.measure(case, lambda: None)
    return Measured(bench.rows[num_rows:], bench.failures[num_failures:])
