"""No model class gives, under `"hf_paged"` or over a `PagedCache`, another result than transformers without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf

from tests.sweep.comparison import ModelClass, Outcome, compare, distance, model_classes
from tests.sweep.runner import PIECES, Runner, dynamic, paged, words
from tests.sweep.table import note_row, refusal_row

PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text()

# One class for each way in which models differ from the plain decoder.
REPRESENTATIVES = {
    "MoshiForCausalLM": "some in blocks, some copied",  # a window of the cache alone
    "BigBirdPegasusForCausalLM": "in blocks",  # modules that say is_causal=False
    "MoonshineForConditionalGeneration": "some in blocks, some copied",  # calls that say it
    "TrOCRForCausalLM": "copied",  # attention code of its own, which adds the mask
    "DeepseekV32ForCausalLM": "nothing is paged",  # `indices`
    "DeepseekV4ForCausalLM": "nothing is paged",  # a bias by block, beside the mask
    "MiniMaxM3VLForCausalLM": "in blocks",  # `block_indices`
    "Inkling2ForCausalLM": "copied",  # `sinks` by query, `position_bias`
    "DogeForCausalLM": "copied",  # a mask of its own
}


def check(model_class: ModelClass) -> Outcome:
    outcome = compare(model_class)
    assert outcome.wrong == []
    return outcome


@pytest.mark.parametrize("model_class", [each for each in model_classes() if each.name in REPRESENTATIVES], ids=str)
def test_a_representative_of_each_kind(model_class: ModelClass) -> None:
    outcome = check(model_class)
    assert not outcome.not_built
    assert not outcome.refused
    assert outcome.how == REPRESENTATIVES[model_class.name]


def test_the_installed_transformers_has_most_representatives() -> None:
    assert len([each for each in model_classes() if each.name in REPRESENTATIVES]) > 6


@pytest.mark.evidence
@pytest.mark.parametrize("model_class", model_classes(), ids=str)
def test_every_class(model_class: ModelClass) -> None:
    outcome = check(model_class)
    if f"transformers {hf.__version__} know" in PAGE:
        assert f"{model_class.name}" in PAGE
        for row in (*refusal_row(model_class, outcome), *note_row(model_class, outcome)):
            assert row in PAGE


def test_the_page_names_every_class_of_its_release() -> None:
    if f"transformers {hf.__version__} know" not in PAGE:
        pytest.skip("the page was made with another release")
    assert [each.name for each in model_classes() if each.name not in PAGE] == []


def test_a_decoder_of_trocr_behind_an_image_encoder() -> None:
    def build(attention: str) -> Runner:
        torch.manual_seed(0)
        encoder = hf.ViTConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        )
        decoder = hf.TrOCRConfig(
            vocab_size=128,
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=64,
            scale_embedding=True,
        )
        config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        model = hf.VisionEncoderDecoderModel._from_config(config, attn_implementation=attention).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(20)
        return Runner.of(model)

    eager, ours = build("eager"), build("hf_paged")
    ids = words(1, 41, seed=1)
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 128
    expected, result = (runner.logits(ids, use_cache=False) for runner in (eager, ours))
    assert distance(expected, result) < 1e-4
    assert distance(result[:, :-1], ours.logits(changed, use_cache=False)[:, :-1]) < 1e-4
    assert distance(eager.in_pieces(ids, None, dynamic, PIECES), ours.in_pieces(ids, None, paged, PIECES)) < 1e-4
