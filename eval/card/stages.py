"""The stages, in the order in which they tell most."""

from __future__ import annotations

from dataclasses import dataclass

from eval.card import generation, kernels, tests, uploads
from eval.card.worker import MakePieces


@dataclass(frozen=True)
class Stage:
    """A part of what is measured.

    Attributes:
        about: what it measures, in a line.
        make_pieces: from the settings, its pieces by name.
        uses_model: whether its results depend on the model.
    """

    about: str
    make_pieces: MakePieces
    uses_model: bool = False


STAGES = {
    "tests": Stage("the tests that run on a card where there is one", tests.make_pieces),
    "correctness": Stage("the Triton kernels against plain PyTorch, all formats", kernels.correctness),
    "attention": Stage("attention beside SDPA, flash-attn, FlashInfer and copying", kernels.attention),
    "formats": Stage("attention over codes beside SDPA and copying", kernels.formats),
    "generation": Stage("greedy decoding, prefill, beam search, padding", generation.generation, uses_model=True),
    "codecs": Stage("greedy decoding with every codec", generation.codecs, uses_model=True),
    "uploads": Stage("metadata of a step, copies between host and device, waits", uploads.make_pieces, uses_model=True),
    "tuning": Stage("a search of each row of the launch table", kernels.tuning),
}
