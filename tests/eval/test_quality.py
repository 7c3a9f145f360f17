"""`eval.quality` and the modules beside it, on a tiny random model."""

from __future__ import annotations

import json
import math
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from eval.quality import caches as quality_caches
from eval.quality import command as quality
from eval.quality import report as quality_report
from eval.quality import text as quality_text
from eval.quality.bench import Bench
from eval.quality.bits import BitCounter
from eval.quality.caches import CACHES, CacheKind, missing_requirement
from eval.quality.journal import Journal, JournalError
from eval.quality.likelihood import likelihood_row, make_windows
from eval.quality.reader import Reader, kept_attention
from eval.quality.retrieval import Haystack, Prompt, passkey_prompts, passkey_row, recall_prompts, recall_row
from eval.quality.text import Text, encode
from tests.support.word_models import letter_tokenizer, word_llama

POSITIONS = 1024
TEXT = Text("a story", " ".join(f"On day {day} the cat saw {day * day} mice." for day in range(200)))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tokenizer = letter_tokenizer()
    # Heads of 64, as QuantizedCache's groups; large weights, so that what a token attends to decides what it predicts.
    sizes = {"hidden_size": 256, "max_position_embeddings": POSITIONS, "initializer_range": 0.1}
    word_llama(tokenizer, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture
def make_bench(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Callable[..., Bench]:
    """`make_bench(kind, ...)`: measures with the reference and these caches, 16 tokens in a forward pass."""

    def make(*kinds: CacheKind, on: object = model, journal: Journal | None = None) -> Bench:
        by_name = {kind.name: kind for kind in (CACHES["dynamic"], *kinds)}
        return Bench(on, tokenizer, by_name, prefill_chunk=64, chunk=16, journal=journal or Journal({}))

    return make


def kind_of(make: Callable[[PreTrainedModel], object], name: str = "test") -> CacheKind:
    return replace(CACHES["dynamic"], name=name, label=f"{name} cache", family="paged", make=make)


def measure(bench: Bench, tasks: list, row: Callable) -> list[dict | None]:
    """The rows of all caches."""
    with kept_attention(bench.model) if isinstance(bench.model, PreTrainedModel) else torch.no_grad():
        for task in tasks:
            if kinds := bench.missing(task):
                task.measure(bench, kinds)
        return [row(bench, tasks, kind) for kind in bench.kinds.values()]


class NoisyCache(DynamicCache):
    """Gives back old values from `first` on with noise."""

    def __init__(self, first: int = 0, **options) -> None:
        super().__init__(**options)
        self.first = first

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        old = values[:, :, self.first : values.shape[2] - value_states.shape[2]]
        noise = 0.5 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
        return keys, torch.cat([values[:, :, : self.first], old + noise, values[:, :, self.first + old.shape[2] :]], 2)


def test_all_sections_in_text_json_and_markdown(model_folder, tmp_path, capsys):
    files = {name: tmp_path / f"quality.{name}" for name in ("json", "md")}
    caches = ["dynamic", "raw", "int8", "int4"]
    options = {"model": model_folder, "caches": ",".join(caches), "contexts": "300,400", "limit": 200, "depths": "0,1"}
    options |= {"pairs": 2, "details": "int4:exact_sinks=0", "json": files["json"], "markdown": files["md"]}
    status = quality.main([f"--{name}={value}" for name, value in options.items()])
    text = capsys.readouterr().out
    results = json.loads(files["json"].read_text())
    markdown = files["md"].read_text()

    assert status == 0
    assert results["failures"] == []
    measured = [(row["section"], row["context"], row["cache"]) for row in results["rows"]]
    assert measured == [
        (section, context, cache)
        for section in ("likelihood", "passkey", "recall")
        for context in (300, 400)
        for cache in [*caches, "int4:exact_sinks=0"]
    ]
    assert results["machine"]["model"] == "tiny-llama"
    assert results["settings"]["sha256"] == quality_text.python_text().sha256
    assert "300 tokens: PagedCache, raw predicts what DynamicCache does" in text
    for output in (text, markdown):
        assert quality_report.machine_line(results["machine"]) in output
        for _, title, _, _ in quality_report.TABLES:
            assert title in output
    for output in (text, markdown, json.dumps(results)):
        assert str(model_folder.parent) not in output


def test_plot(model_folder, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "quality.png"
    quality.main(
        f"--quick --model {model_folder} --caches int8 --sections likelihood,passkey --limit 64 --plot {file}".split()
    )
    assert file.read_bytes().startswith(b"\x89PNG")


def test_exact_blocks_change_nothing_and_codes_little(make_bench, model, tokenizer):
    bench = make_bench(CACHES["raw"], CACHES["int8"], CACHES["kivi2"])
    tasks = make_windows(tokenizer, TEXT, context=512, stored=0.5, limit=512)
    dynamic, raw, int8, kivi2 = measure(bench, tasks, likelihood_row)
    assert dynamic["kl_mean"] == 0
    assert abs(raw["kl_mean"]) < 1e-6
    assert raw["top1"] == 1
    assert 1e-6 < int8["kl_mean"] < kivi2["kl_mean"]
    assert int8["bytes"] < raw["bytes"]
    assert model.config._attn_implementation == "eager"


def test_rows_say_what_was_measured(make_bench, tokenizer):
    tasks = make_windows(tokenizer, TEXT, context=100, stored=0.4, limit=100)
    dynamic, noisy = measure(make_bench(kind_of(lambda model: NoisyCache())), tasks, likelihood_row)

    assert [task.passes(make_bench()) for task in tasks] == [[40, 16, 16, 16, 12]] * 2
    assert noisy["scored_tokens"] == 2 * 60
    assert noisy["kl_mean"] > 1e-3
    assert noisy["kl_error"] > 0
    assert noisy["kl_p99"] > noisy["kl_mean"]
    assert noisy["top1"] < 1
    assert noisy["perplexity"] / dynamic["perplexity"] - 1 == pytest.approx(noisy["perplexity_change"], abs=1e-4)
    assert noisy["bytes"] == 2 * 2 * 2 * 100 * 64 * 4


def test_scores_are_those_of_one_pass_when_nothing_is_lost(make_bench, model, tokenizer):
    (window,) = make_windows(tokenizer, TEXT, context=100, stored=0.5, limit=50)
    (row,) = measure(make_bench(), [window], likelihood_row)
    logits = model(window.ids[:, :-1]).logits[0, 50:]
    loss = torch.nn.functional.cross_entropy(logits, window.ids[0, 51:])
    assert row["perplexity"] == pytest.approx(math.exp(loss.item()), rel=1e-4)


def test_divergence_by_position(make_bench, tokenizer):
    late = kind_of(lambda model: NoisyCache(first=80))
    tasks = make_windows(tokenizer, TEXT, context=128, stored=0.5, limit=64)
    _, noisy = measure(make_bench(late), tasks, likelihood_row)
    first, second, third, fourth = noisy["kl_quarters"]
    # Scored from token 64 on; 80 tokens are stored when the second quarter is read.
    assert first == second == 0
    assert third > 0
    assert fourth > 0


def test_nothing_need_be_stored_first(make_bench, tokenizer):
    (window,) = make_windows(tokenizer, TEXT, context=64, stored=0.0, limit=64)
    (row,) = measure(make_bench(), [window], likelihood_row)
    assert row["scored_tokens"] == 64


def test_an_interrupted_run_is_continued(make_bench, tokenizer, tmp_path, monkeypatch):
    tasks = make_windows(tokenizer, TEXT, context=64, stored=0.5, limit=96)
    expected = measure(make_bench(CACHES["int8"]), tasks, likelihood_row)
    file = tmp_path / "run.jsonl"
    pieces_read = []
    read = Reader.read

    def counted(self, ids):
        pieces_read.append(ids)
        if len(pieces_read) == 10:  # in the third window, of two pieces for each of two caches
            raise KeyboardInterrupt
        return read(self, ids)

    monkeypatch.setattr(Reader, "read", counted)
    with pytest.raises(KeyboardInterrupt):
        measure(make_bench(CACHES["int8"], journal=Journal({"chunk": 16}, file)), tasks, likelihood_row)
    with file.open("a") as lines:
        lines.write('{"key": ["likelihood", 64, "win')  # what a killed run leaves
    rows = measure(make_bench(CACHES["int8"], journal=Journal({"chunk": 16}, file)), tasks, likelihood_row)
    assert rows == expected
    assert len(pieces_read) == 10 + 4

    kinds = CACHES["int8"], CACHES["fp8"]
    *rows, fp8 = measure(make_bench(*kinds, journal=Journal({"chunk": 16}, file)), tasks, likelihood_row)
    assert rows == expected
    assert fp8["scored_tokens"] == 96
    with pytest.raises(JournalError, match="is of another run \\(chunk was 16, is 1\\)"):
        Journal({"chunk": 1}, file)


class Oracle:
    """A model that predicts what follows, or always the same token."""

    def __init__(self, knows: bool, vocabulary: int) -> None:
        self.knows = knows
        self.vocabulary = vocabulary
        self.device = torch.device("cpu")
        self.config = SimpleNamespace(_attn_implementation="sdpa")

    def forward(self, ids, cache):
        following = ids.roll(-1, dims=1) if self.knows else torch.zeros_like(ids)
        return SimpleNamespace(logits=100.0 * torch.nn.functional.one_hot(following, self.vocabulary))

    __call__ = forward


@pytest.mark.parametrize("knows", [True, False])
def test_what_is_known_is_found(make_bench, tokenizer, knows):
    bench = make_bench(replace(CACHES["dynamic"], make=lambda model: DynamicCache()), on=Oracle(knows, len(tokenizer)))
    haystack = Haystack(encode(tokenizer, TEXT.content))
    keys = passkey_prompts(tokenizer, haystack, context=256, depths=[0.0, 0.5, 1.0], trials=2)
    (row,) = measure(bench, keys, passkey_row)
    assert row["depths"] == [0.0, 0.5, 1.0]
    assert row["found"] == [float(knows)] * 3
    assert (row["found_count"], row["asked"]) == (6 if knows else 0, 6)

    lists = recall_prompts(tokenizer, haystack, context=256, pairs=4, trials=2)
    (row,) = measure(bench, lists, recall_row)
    assert (row["found_count"], row["asked"], row["pairs"]) == (8 if knows else 0, 8, 4)


def test_found_is_what_greedy_decoding_gives(make_bench, model, tokenizer):
    stored, question = encode(tokenizer, TEXT.content[:60]), encode(tokenizer, "The cat")
    generated = model.generate(torch.tensor([stored + question]), max_new_tokens=5, do_sample=False)
    answer = generated[0, len(stored) + len(question) :].tolist()
    for wrong in (None, *range(5)):
        ids = [token if index != wrong else (token + 1) % 256 for index, token in enumerate(answer)]
        span = (len(question), len(question) + 5)
        questions = torch.tensor([question + ids])
        prompt = Prompt("recall", f"wrong {wrong}", 0.0, torch.tensor([stored]), questions, (span,))
        (row,) = measure(make_bench(), [prompt], recall_row)
        assert row["found_count"] == (wrong is None)


@pytest.mark.parametrize(
    ("name", "added", "stored"),
    [
        ("dynamic", 16, 16),
        ("raw", 16, 16),
        # A scale for each token, and an offset of keys for each channel of 64 tokens.
        ("int8", 8 + 16 / 64 + 16 / 64 / 2, 8 + 16 / 64 + 16 / 64 / 2),
        # A scale and a zero for 64 tokens of a channel, or 64 channels of a token.
        ("int4", 4 + 32 / 64, None),
        ("quanto4", 4 + 32 / 64, 4 + 32 / 64),
        ("quanto2", 2 + 32 / 64, 2 + 32 / 64),
        ("transformers-fp8", 8, 8),
    ],
)
def test_bits(model, name, added, stored):
    if missing_requirement(CACHES[name]) is not None:
        pytest.skip(missing_requirement(CACHES[name]))
    bits = BitCounter(model)
    assert bits.added(CACHES[name]) == pytest.approx(added, rel=1e-3)
    if stored is not None:
        assert bits.stored(CACHES[name], [256, 128, 128]) == pytest.approx(stored, rel=1e-3)
    else:
        assert bits.stored(CACHES[name], [256, 128, 128]) > added
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["quanto4", "quanto2", "hqq4", "hqq2", "transformers-fp8"])
def test_transformers_quantized_caches_are_measured(make_bench, tokenizer, name):
    if missing_requirement(CACHES[name]) is not None:
        pytest.skip(missing_requirement(CACHES[name]))
    tasks = make_windows(tokenizer, TEXT, context=256, stored=0.5, limit=128)
    _, row = measure(make_bench(CACHES[name]), tasks, likelihood_row)
    assert row["kl_mean"] > 1e-5
    assert row["bits_added"] < 9


def test_what_is_not_installed_is_told(model_folder, monkeypatch, capsys):
    monkeypatch.setattr(quality_caches, "is_optimum_quanto_available", lambda: False)
    quality.main(f"--quick --model {model_folder} --caches quanto4 --sections recall --pairs 2".split())
    output = capsys.readouterr().out
    assert "Not measured: QuantizedCache (quanto, 4 bit): optimum-quanto is not installed" in output


def test_a_cache_that_fails_is_left_out_with_its_reason(make_bench, tokenizer):
    def fail(model):
        raise ValueError("no room in /data/models/cache\nsecond line")

    bench = make_bench(kind_of(fail, "broken"), CACHES["raw"])
    dynamic, broken, raw = measure(bench, make_windows(tokenizer, TEXT, 64, 0.5, 32), likelihood_row)
    assert broken is None
    assert dynamic["kl_mean"] == 0
    assert raw["kl_mean"] < 1e-8
    reason = "broken cache (likelihood, context 64, window 0): ValueError: no room in cache"
    assert bench.failures == {"broken": reason}


def test_a_failing_reference_stops_the_run(make_bench, tokenizer):
    bench = make_bench(replace(CACHES["dynamic"], make=lambda model: None + 1))
    with pytest.raises(RuntimeError, match=r"the reference failed \(likelihood, context 64, window 0\): TypeError"):
        measure(bench, make_windows(tokenizer, TEXT, 64, 0.5, 32), likelihood_row)


def test_one_report_of_several_models(model_folder, tmp_path, monkeypatch, capsys):
    file, notes = tmp_path / "quality.json", tmp_path / "notes.md"
    quality.main(f"--quick --model {model_folder} --caches raw --sections recall --pairs 2 --json {file}".split())
    notes.write_text("Use int8.\n")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["eval.quality.report", str(file), str(file), "--notes", str(notes)])
    quality_report.main()
    output = capsys.readouterr().out
    assert output.startswith("# Quality of KV caches\n\nUse int8.\n\n## tiny-llama\n")
    assert output.count("### Key-value recall") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--contexts 16,x", "'x' is not a whole number of at least 1"),
        ("--caches int8,int9", "'int9' is unknown, choose from dynamic, raw"),
        ("--key-bias 200", "'200': expected such as 200:30,31 or 100:3:0.03"),
        ("--key-bias 200:99", "the pairs (99,) are not among the 32 of a head_dim of 64"),
        ("--details int4:sinks=0", "'int4:sinks=0': expected such as int4:exact_sinks=0,exact_recent=128"),
        ("--details int4", "'int4': expected such as"),
        ("--sections likelihood,needle", "'needle' is unknown, choose from likelihood, passkey, recall"),
        ("--stored 2", "'2' is not a number from 0 to 1"),
        ("--stored 1", "--stored must be less than 1"),
        ("--depths 0.5,deep", "'deep' is not a number from 0 to 1"),
        ("--pairs 33", "--pairs must be at most 32"),
        ("--text a.txt --dataset wikitext", "not allowed with argument --text"),
        ("--text no/such/file.txt", "no/such/file.txt cannot be read as text"),
        ("--json no/such/folder/quality.json", "the folder of no/such/folder/quality.json does not exist"),
        ("--sections recall --plot quality.png", "add one of them to --sections"),
        ("--contexts 2000", "tokens does not fit the model's 1024 positions"),
        ("--contexts 64", "a context of 64 tokens is too short"),
        ("--model no/such/model", "no/such/model"),
    ],
)
def test_bad_arguments(model_folder, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        quality.main(["--quick", "--model", str(model_folder), *arguments.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_runs_as_a_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eval.quality", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("eval.quality", run_name="__main__")
    assert stop.value.code == 0
    assert "--resume" in capsys.readouterr().out
