"""Texts, prompts, comparisons and files of `eval.quality`: what needs no model."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from eval.quality import report as quality_report
from eval.quality import text as quality_text
from eval.quality.caches import detailed_kind
from eval.quality.journal import Journal, JournalError
from eval.quality.likelihood import make_windows
from eval.quality.retrieval import Haystack, passkey_prompts
from eval.quality.text import Text, TextError, encode, windows
from tests.support.word_models import letter_tokenizer

TEXT = Text("a story", " ".join(f"On day {day} the cat saw {day * day} mice." for day in range(200)))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return letter_tokenizer()


def test_a_low_limit_scores_the_end_of_one_window(tokenizer):
    (window,) = make_windows(tokenizer, TEXT, context=512, stored=0.5, limit=10)
    assert (window.context, window.stored, window.scored) == (512, 502, 10)
    assert [w.scored for w in make_windows(tokenizer, TEXT, context=512, stored=0.5, limit=600)] == [256] * 3


def test_windows_are_spread_and_do_not_overlap(tokenizer):
    length = len(encode(tokenizer, TEXT.content))
    pieces = windows(tokenizer, TEXT, length // 3, 3)
    assert tokenizer.decode(pieces[0][0]) == TEXT.content[: length // 3]
    assert tokenizer.decode(pieces[-1][0]) == TEXT.content[-(length // 3) :]
    with pytest.raises(TextError, match=r"a story has [\d,]+ tokens, 4 windows of [\d,]+ are needed"):
        windows(tokenizer, TEXT, length // 3, 4)


def test_windows_begin_as_the_tokenizer_begins(tokenizer):
    def beginning(text, add_special_tokens=True, **options):
        ids = tokenizer(text, **options)["input_ids"]
        return {"input_ids": [0, *ids] if add_special_tokens else ids}

    for piece in windows(beginning, TEXT, 20, 2):
        assert piece.shape == (1, 20)
        assert piece[0, 0] == 0


def test_texts(tmp_path, monkeypatch):
    file = tmp_path / "story.txt"
    file.write_text("Once upon a time")
    assert quality_text.file_text(file) == Text("story.txt", "Once upon a time")
    with pytest.raises(TextError, match="cannot be read as text"):
        quality_text.file_text(tmp_path)
    with pytest.raises(TextError, match="expected wikitext, or repository:configuration:split:column"):
        quality_text.dataset_text("a/b")

    datasets = SimpleNamespace(load_dataset=lambda *name, split: {"text": ["one", "two"]})
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    text = quality_text.dataset_text("wikitext")
    assert text == Text("Salesforce/wikitext, wikitext-2-raw-v1, test", "one\n\ntwo")
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, split: 1 / 0)
    with pytest.raises(TextError, match="wikitext cannot be loaded: division by zero"):
        quality_text.dataset_text("wikitext")


def test_facts_are_hidden_where_they_are_said_to_be(tokenizer):
    haystack = Haystack(encode(tokenizer, "x"))
    first, last = passkey_prompts(tokenizer, haystack, context=250, depths=[0.25, 1.0], trials=1)
    for prompt, depth in ((first, 0.25), (last, 1.0)):
        text = tokenizer.decode(prompt.stored[0])
        begin, end = prompt.answers[0]
        key = tokenizer.decode(prompt.questions[0, begin:end])
        assert len(key) == 5
        assert key.isdecimal()
        assert text.count(key) == 2
        before, after = (
            text.partition("\n\nThe pass key")[0].count("xx"),
            text.rpartition("pass key.\n\n")[2].count("xx"),
        )
        assert before / (before + after) == pytest.approx(depth, abs=0.05)
    with pytest.raises(TextError, match="a context of 50 tokens is too short"):
        passkey_prompts(tokenizer, haystack, context=50, depths=[0.5], trials=1)


def test_a_file_of_something_else_is_not_touched(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("not ours\n")
    with pytest.raises(JournalError, match="is no file of --resume"):
        Journal({}, file)
    assert file.read_text() == "not ours\n"


def test_details_of_a_codec():
    kind = detailed_kind("int4:exact_sinks=0,exact_recent=128")
    assert kind.name == "int4:exact_sinks=0,exact_recent=128"
    assert kind.label == "PagedCache, int4:exact_sinks=0, exact_recent=128"
    assert not kind.is_exact


def test_codecs_are_compared_with_the_nearest_in_size():
    def row(label, family, bits, kl):
        figures = {"section": "likelihood", "context": 64, "cache": label, "label": label, "family": family}
        return figures | {"is_exact": False, "bits_added": bits, "kl_mean": kl}

    rows = [
        row("ours", "paged", 4.5, 0.01),
        row("small", "quantized", 2.5, 1.0),
        row("near", "quantized", 4.5, 0.05),
        row("near, worse", "quantized", 4.5, 0.06),
    ]
    (line,) = quality_report.conclusions({"rows": rows, "failures": []})
    assert line == (
        "64 tokens: ours at 4.50 bits has a KL divergence 5.0 times lower than near at 4.50 bits, the nearest in size."
    )
