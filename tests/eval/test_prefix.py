"""`eval.prefix` and the modules beside it, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from eval.common import variants
from eval.prefix import command, index, sections, tables
from tests.support.word_models import letter_tokenizer, word_llama

POSITIONS = 512
SIZES = {
    "prompt": 200,
    "known": 150,
    "history": 100,
    "document": 300,
    "questions": 3,
    "new-tokens": 2,
    "index-blocks": 60,
    "index-prompt": 256,
    "repeats": 2,
    "document-repeats": 1,
}
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head_dim, float32


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return letter_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    # Large weights: what a row attends to then decides which token it makes.
    return word_llama(tokenizer, max_position_embeddings=POSITIONS, initializer_range=0.3)


@pytest.fixture(scope="module")
def model_folder(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def bench(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> sections.PrefixBench:
    return sections.PrefixBench(model, tokenizer, repeats=2, memory="8MiB", codecs=["raw"])


def rows_of(bench: sections.PrefixBench) -> dict[str, dict[str, Any]]:
    return {row.get("cache", row["label"]): row for row in bench.rows}


def test_all_sections_in_text_json_and_markdown(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"prefix.{name}" for name in ("json", "md")}
    options = SIZES | {"model": model_folder, "memory": "8MiB", "json": files["json"], "markdown": files["md"]}
    assert command.main([*(f"--{name}={value}" for name, value in options.items())]) == 0
    text = capsys.readouterr().out
    results = json.loads(files["json"].read_text())
    markdown = files["md"].read_text()

    measured = {(row["section"], row.get("cache") or row.get("shape") or row["label"]) for row in results["rows"]}
    stores = {"raw", "int8", "int4"}
    assert measured - {("batching", "generate_batch (transformers)")} == {
        *((section, way) for section in ("known", "chat") for way in {"dynamic", "paged"} | stores),
        *(("document", way) for way in ("dynamic", "deepcopy", "store", "store batch")),
        *(("batching", f"BlockStore, {way}") for way in ("one after the other", "one batch")),
        *(("index", shape) for shape in ("chains", "children")),
    }
    assert results["machine"]["model"] == "tiny-llama"
    for output in (text, markdown):
        for section in tables.SECTIONS.values():
            assert section.title in output
    for output in (text, markdown, json.dumps(results)):
        assert str(model_folder.parent) not in output


def test_of_a_prompt_that_begins_alike_the_beginning_is_reused(bench: sections.PrefixBench) -> None:
    bench.known(prompt_tokens=200, cached_tokens=150)
    rows = rows_of(bench)
    assert {name: row["reused_tokens"] for name, row in rows.items()} == {"dynamic": 0, "paged": 0, "raw": 150}
    assert all(row["tokens_equal"] for row in rows.values())
    assert rows["dynamic"]["first_ratio"] == 1
    assert rows["raw"]["first_ms_min"] <= rows["raw"]["first_ms"]
    assert 0 < rows["raw"]["lookup_ms"] < rows["raw"]["first_ms"]
    assert rows["raw"]["commit_ms"] > 0
    assert bench.differences == bench.failures == []
    assert bench.model.config._attn_implementation == "sdpa"


def test_a_second_turn_reuses_all_but_the_last_token_of_the_answer(bench: sections.PrefixBench) -> None:
    bench.chat(history_tokens=100)
    row = rows_of(bench)["raw"]
    assert row["prompt_tokens"] == 100 + sections.QUESTION_TOKENS
    assert row["reused_tokens"] == 100 - 1
    assert row["tokens_equal"]


def test_a_document_is_held_once(bench: sections.PrefixBench) -> None:
    bench.document(document_tokens=256, num_questions=3, new_tokens=2, repeats=1)
    rows = rows_of(bench)
    own = sections.QUESTION_TOKENS + 1  # the last new token never is in a cache
    assert rows["dynamic"]["num_bytes"] == 3 * (256 + own) * TOKEN_BYTES
    assert rows["deepcopy"]["num_bytes"] == (256 + 3 * (256 + own)) * TOKEN_BYTES
    # Four blocks of the document, and one of each question.
    assert rows["store"]["num_bytes"] == rows["store batch"]["num_bytes"] == (4 + 3) * 64 * TOKEN_BYTES
    assert [row["reused_tokens"] for row in rows.values()] == [0, 2 * 256, 2 * 256, 2 * 256]
    assert bench.differences == bench.failures == []


def test_continuous_batching_shares_blocks_of_256_tokens(bench: sections.PrefixBench) -> None:
    pytest.importorskip("psutil")
    bench.batching(document_tokens=300, num_questions=3)
    if bench.failures:
        pytest.skip(bench.failures[0])
    rows = rows_of(bench)
    assert rows["generate_batch (transformers)"]["reused_by_prompt"] == [0, 256, 256]
    assert rows["BlockStore, one after the other"]["reused_by_prompt"] == [0, 300, 300]
    assert rows["BlockStore, one batch"]["reused_tokens"] == 2 * 300


def test_what_continuous_batching_cannot_do_is_told(
    bench: sections.PrefixBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("not here")

    monkeypatch.setattr(sections, "shared_prefix_tokens", refuse)
    bench.batching(document_tokens=70, num_questions=2)
    assert bench.failures == ["generate_batch (transformers): RuntimeError: not here"]
    assert {row["label"] for row in bench.rows} == {"BlockStore, one after the other", "BlockStore, one batch"}


def test_a_lossy_store_may_differ(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = sections.PrefixBench(model, tokenizer, repeats=1, memory="8MiB", codecs=["int8"])
    warm = sections.PrefixBench._warm

    def other(*arguments: Any) -> sections.FirstToken:
        call = warm(*arguments)
        return sections.FirstToken(**{**vars(call), "token": -1})

    monkeypatch.setattr(sections.PrefixBench, "_warm", other)
    bench.known(prompt_tokens=80, cached_tokens=64)
    (sentence,) = bench.differences
    assert sentence.startswith("BlockStore (int8) (known): another first token")
    assert sentence.endswith("so this is expected.")


def test_a_failing_baseline_stops_the_run(bench: sections.PrefixBench, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = variants.Variant("dynamic", "DynamicCache", "sdpa", lambda *_: 1 / 0)
    monkeypatch.setitem(variants.VARIANTS, "dynamic", broken)
    with pytest.raises(RuntimeError, match="the baseline failed"):
        bench.known(prompt_tokens=80, cached_tokens=64)


def test_the_index_is_filled_looked_up_and_left_as_it_was() -> None:
    chains, children = index.measure_index(num_blocks=64, prompt_tokens=512, repeats=1)
    assert (chains["blocks"], chains["cached_tokens"]) == (64, 512)
    assert (children["blocks"], children["cached_tokens"]) == (64 + index.PARENTS, 128)
    for row in (chains, children):
        assert 0 < row["lookup_ms_min"] <= row["lookup_ms"]
        assert 50 < row["bytes_a_block"] < 600


def test_the_index_is_given_the_same_sequences_every_time() -> None:
    for sequences in (lambda: index._chains(3, 2), lambda: index._children(3)):
        assert all(np.array_equal(first, second) for first, second in zip(sequences(), sequences(), strict=True))


def test_goals_are_judged_with_the_default_sizes_only() -> None:
    rows = [
        {"section": "known", "cache": "raw", "first_ratio": 0.07},
        {"section": "index", "shape": "chains", "lookup_ms": 4.0, "bytes_a_block": 150.0},
    ]
    results = {"rows": rows, "differences": [], "failures": ["that"], "settings": {"has_goals": True}}
    assert tables.conclusions(results) == [
        "reached: the first token, 0.070 of the time without reuse (goal: 0.08)",
        "missed: a lookup, 4.000 ms (goal: 3)",
        "reached: the index, 150 bytes a block in sequences (goal: 200)",
        "Not measured: that",
    ]
    results["settings"]["has_goals"] = False
    assert tables.conclusions(results) == ["Not measured: that"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--known 256 --prompt 256", "--known must be less than --prompt"),
        ("--history 64", "--history must be more than 64"),
        ("--index-prompt 64", "--index-prompt must be at least 128"),
        ("--questions 0", "'0' is not a whole number of at least 1"),
        ("--kv raw,int3", "'int3' is unknown, choose from raw,"),
        ("--sections chats", "'chats' is unknown, choose from known, chat, document, batching, index"),
        ("--prompt 600", f"600 tokens and 1 new ones does not fit the model's {POSITIONS} positions"),
        ("--model no/such/model", "no/such/model"),
        ("--json no/such/folder/prefix.json", "the folder of no/such/folder/prefix.json does not exist"),
    ],
)
def test_bad_arguments(model_folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(["--quick", "--model", str(model_folder), *arguments.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])
    assert stop.value.code == 0
    assert "--document-repeats" in capsys.readouterr().out
