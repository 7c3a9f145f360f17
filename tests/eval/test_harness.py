"""`eval.harness` on a tiny random model and tasks made here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from eval.quality.caches import CACHES, CacheKind, missing_requirement, quantized_tokens
from tests.support.word_models import letter_tokenizer, word_llama

try:
    importlib.metadata.version("lm_eval")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("lm_eval is not installed", allow_module_level=True)

from lm_eval import evaluate
from lm_eval.tasks import TaskManager

from eval.harness import cached_lm, command

STORY = " ".join(f"On day {day} the cat saw {day * day} mice." for day in range(12))
DOCUMENTS = [{"text": STORY[start:], "choices": [" one", " two"], "answer": 1} for start in (0, 40)]
TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    "predict": {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "continue": {
        "output_type": "generate_until",
        "doc_to_target": "{{text[:1]}}",
        "generation_kwargs": {"until": ["never"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tokenizer = letter_tokenizer()
    word_llama(tokenizer, max_position_embeddings=1024, initializer_range=0.3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Knows the tasks above and none of the harness's."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, task in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "datasets")},
            "test_split": "test",
            "num_fewshot": 0,
            "doc_to_text": "" if name == "predict" else "{{text}}",
        }
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(common | task))
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture
def run(model: PreTrainedModel, manager: object) -> Callable[..., tuple[dict, list]]:
    """`run(lm, "choose")`: the task's figures, and for each document what the model answered."""

    def run_task(lm: object, task: str) -> tuple[dict, list]:
        outcome = evaluate(lm=lm, task_dict=manager.load([task]), bootstrap_iters=0)
        return outcome["results"][task], [sample["resps"] for sample in outcome["samples"][task]]

    return run_task


class ForgetfulCache(DynamicCache):
    """Gives back nothing but zeros for values of the passes before."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        old = values.shape[2] - value_states.shape[2]
        return keys, torch.cat([torch.zeros_like(values[:, :, :old]), values[:, :, old:]], dim=2)


def kind_of(make: Callable[[PreTrainedModel], object], is_exact: bool = True) -> CacheKind:
    return replace(CACHES["dynamic"], label="TestCache", make=make, is_exact=is_exact)


def log_likelihoods(responses: list) -> torch.Tensor:
    """A figure for each document, or for each choice of each."""
    first = [[answer[0] for answer in answers] for answers in responses]
    return torch.tensor([[one[0] if isinstance(one, tuple) else one for one in answers] for answers in first])


@pytest.mark.parametrize("task", ["choose", "predict"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_log_likelihoods_are_those_of_the_harness_if_nothing_is_lost(model, tokenizer, run, task, batch_size):
    plain = cached_lm.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    _, expected = run(plain, task)
    lm = cached_lm.CachedLM(model, tokenizer, CACHES["raw"], batch_size=batch_size)
    _, found = run(lm, task)
    assert model.config._attn_implementation == "hf_paged"
    torch.testing.assert_close(log_likelihoods(found), log_likelihoods(expected), atol=1e-3, rtol=1e-5)
    lm.check()


@pytest.mark.parametrize("task", ["choose", "predict"])
def test_log_likelihoods_feel_the_cache(model, tokenizer, run, task):
    plain = cached_lm.HFLM(pretrained=model, tokenizer=tokenizer)
    _, expected = run(plain, task)
    lm = cached_lm.CachedLM(model, tokenizer, kind_of(lambda model: ForgetfulCache()))
    _, found = run(lm, task)
    assert (log_likelihoods(found) - log_likelihoods(expected)).abs().min() > 0.01


@pytest.mark.parametrize("batch_size", [1, 2])
def test_each_batch_is_generated_with_a_new_cache(model, tokenizer, run, batch_size):
    made = []

    def make(model):
        made.append(CACHES["raw"].make(model))
        return made[-1]

    _, expected = run(cached_lm.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size), "continue")
    lm = cached_lm.CachedLM(model, tokenizer, replace(CACHES["raw"], make=make), batch_size=batch_size)
    _, found = run(lm, "continue")
    assert found == expected
    assert [cache.stats().rows for cache in made] == [batch_size] * (2 // batch_size)
    assert lm.passes == len(made) * 8


def test_passes_that_read_quantized_tokens_are_counted(model, tokenizer, run):
    lm = cached_lm.CachedLM(model, tokenizer, CACHES["int8"], chunk=100)
    run(lm, "predict")
    lengths = [len(document["text"]) for document in DOCUMENTS]
    passes = [-(-length // 100) for length in lengths]
    assert lm.passes == sum(passes)
    # The first pass of each document finds an empty cache.
    assert lm.quantized_passes == lm.passes - len(DOCUMENTS)
    lm.check()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (kind_of(lambda model: DynamicCache(), is_exact=False), {}),
        # One pass for each document, as in the harness: it reads nothing.
        (CACHES["int8"], {"chunk": 1000}),
        # What is stored is exact, as it is not older than the exact window.
        (CACHES["int4"], {"max_length": 64}),
    ],
)
def test_it_is_an_error_if_nothing_quantized_was_read(model, tokenizer, run, kind, options):
    lm = cached_lm.CachedLM(model, tokenizer, kind, **options)
    run(lm, "predict")
    with pytest.raises(cached_lm.NothingQuantizedError, match=r"none of \d+ forward passes read a quantized token"):
        lm.check()


def test_quantized_tokens_of_transformers_caches(model):
    if missing_requirement(CACHES["quanto4"]) is not None:
        pytest.skip(missing_requirement(CACHES["quanto4"]))
    cache = CACHES["quanto4"].make(model)
    assert quantized_tokens(cache) == 0
    states = torch.randn(1, 2, 140, 64)
    # What is new stays exact until there are 128 of it.
    for length, expected in ((140, 140), (100, 140), (28, 268)):
        cache.update(states[:, :, :length], states[:, :, :length], 0)
        assert quantized_tokens(cache) == expected


def test_command(model_folder, manager, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "task_manager", lambda include_path, metadata: manager)
    file = tmp_path / "results.json"
    arguments = f"--model {model_folder} --tasks choose,predict --kv raw,int8 --limit 1 --json {file}"
    assert command.main(arguments.split()) == 0
    results = json.loads(file.read_text())
    assert {(row["task"], row["metric"], row["cache"]) for row in results["rows"]} == {
        (task, metric, cache)
        for task, metric in (("choose", "acc"), ("predict", "bits_per_byte"))
        for cache in ("raw", "int8")
    }
    output = capsys.readouterr().out
    assert "PagedCache, int8" in output
    assert "bits_per_byte" in output


def test_command_fails_if_nothing_quantized_was_read(model_folder, manager, monkeypatch, capsys):
    monkeypatch.setattr(command, "task_manager", lambda include_path, metadata: manager)
    arguments = f"--model {model_folder} --tasks predict --kv raw,int8 --chunk 1000"
    assert command.main(arguments.split()) == 1
    output = capsys.readouterr().out
    assert "PagedCache, raw" in output
    assert "PagedCache, int8: none of 2 forward passes read a quantized token" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tasks predict,nothing", "unknown tasks: nothing"),
        ("--tasks predict --kv int9", "'int9' is unknown, choose from dynamic, raw"),
        ("--tasks predict --metadata [1]", "'[1]' is no JSON object"),
        ("--kv int8", "the following arguments are required: --tasks"),
    ],
)
def test_bad_arguments(model_folder, manager, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(command, "task_manager", lambda include_path, metadata: manager)
    with pytest.raises(SystemExit) as stop:
        command.main(["--model", str(model_folder), *arguments.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_harness_is_told_to_be_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(SystemExit):
        command.main(["--tasks", "predict"])
    assert ': pip install "hf-paged-cache[lm-eval]"' in capsys.readouterr().err


def test_runs_as_a_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eval.harness", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("eval.harness", run_name="__main__")
    assert stop.value.code == 0
    assert "--num-fewshot" in capsys.readouterr().out
