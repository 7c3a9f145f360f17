"""`eval.speed` and the modules beside it, on a tiny random model."""

import json
import runpy
import sys
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from eval.common import (
    memory,
    prompts,
    report,
    timing,
    variants,
)
from eval.speed import (
    bookkeeping,
    command,
    sections,
    tables,
)

LAYERS, KV_HEADS, HEAD_DIM, POSITIONS = 2, 2, 16, 512


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        # Large weights: what a row attends to then decides which token it makes.
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    letters = ["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letter_tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    letter_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=letter_tokenizer, pad_token="<pad>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture
def bench(model, tokenizer):
    return sections.Bench(model, tokenizer, new_tokens=4, repeats=2)


def nothing():
    """For `after_run`, where no progress is shown."""


def test_all_sections_in_text_json_and_markdown(model_folder, tmp_path, capsys):
    files = {name: tmp_path / f"speed.{name}" for name in ("json", "md")}
    caches = ["dynamic", "paged", "paged+gather"]
    options = {"model": model_folder, "caches": ",".join(caches), "new-tokens": 4, "beam-contexts": "16,70"}
    options |= {"contexts": "16,130", "batches": 2}
    options |= {"json": files["json"], "markdown": files["md"]}
    status = command.main(["--quick", *(f"--{name}={value}" for name, value in options.items())])
    text = capsys.readouterr().out
    results = json.loads(files["json"].read_text())
    markdown = files["md"].read_text()

    assert status == 0
    assert results["differences"] == results["failures"] == []
    assert "All measured caches made the same tokens as DynamicCache." in text
    measured = {(row["section"], row["context"], row["batch"], row["cache"]) for row in results["rows"]}
    assert measured == {
        *(("decode", context, 2, cache) for context in (16, 130) for cache in caches),
        *(("beam", context, 1, cache) for context in (16, 70) for cache in [*caches, "paged+fork"]),
        *(("padding", 130, 2, cache) for cache in caches),
        *(("bookkeeping", 256 + command.BOOKKEEPING_STEPS, 8, cache) for cache in ("dynamic", "paged")),
    }
    assert results["machine"]["model"] == "tiny-llama"
    assert results["machine"]["dtype"] == "float32"
    assert results["settings"] == {"new_tokens": 4, "repeats": 1}
    for output in (text, markdown):
        assert report.machine_line(results["machine"]) in output
        for title in (section.title for section in tables.SECTIONS.values()):
            assert title in output
    for output in (text, markdown, json.dumps(results)):
        assert str(model_folder.parent) not in output


def test_plot(model_folder, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "speed.png"
    command.main(
        f"--quick --model {model_folder} --caches dynamic --sections decode,beam --contexts 8,16 --beam-contexts 8 "
        f"--plot {file}".split()
    )
    assert file.read_bytes().startswith(b"\x89PNG")


def test_rows_say_what_was_measured(bench, model):
    (case,) = sections.padding_cases([variants.VARIANTS["dynamic"]], 130)
    bench.measure(case, nothing)

    (row,) = bench.rows
    token_bytes = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
    tokens_made = 4 - 1  # that are in the cache: the last one never is
    assert case.lengths == (65, 130)
    assert row["prompt_tokens"] == 65 + 130
    assert row["bytes_used"] == 2 * (130 + tokens_made) * token_bytes
    assert row["bytes_real"] == (65 + 130 + 2 * tokens_made) * token_bytes
    assert row["bytes_real_ratio_less_blocks"] == row["bytes_real_ratio"]
    assert row["step_ratio"] == row["prefill_ratio"] == row["bytes_ratio"] == 1
    assert row["step_ms_min"] <= row["step_ms"]
    assert row["decode_tokens_per_second"] == pytest.approx(2 / (row["step_ms"] / 1e3))
    assert model.config._attn_implementation == "eager"


class ForgetfulCache(DynamicCache):
    """Loses the first token of the prompt's values."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, torch.cat([torch.zeros_like(values[:, :, :1]), values[:, :, 1:]], dim=2)


def test_a_paged_cache_may_waste_a_block_a_row(bench):
    (case,) = sections.padding_cases([variants.VARIANTS["dynamic"], variants.VARIANTS["paged"]], 130)
    bench.measure(case, nothing)

    paged = bench.rows[1]
    # 65 and 130 tokens and the 3 new ones fill 2 and 3 blocks of 64.
    assert paged["block_size"] == 64
    assert paged["bytes_real_ratio"] == pytest.approx(5 * 64 / (65 + 130 + 6))
    assert paged["bytes_real_ratio_less_blocks"] == pytest.approx((5 - 2) * 64 / (65 + 130 + 6))


def test_other_tokens_are_told(bench):
    dynamic = variants.VARIANTS["dynamic"]
    wrong = variants.Variant("wrong", "ForgetfulCache", "sdpa", lambda model, *_: ForgetfulCache(config=model.config))
    (case,) = sections.decode_cases([dynamic, wrong], [12], [2])
    bench.measure(case, nothing)

    assert [row["tokens_equal"] for row in bench.rows] == [True, False]
    (sentence,) = bench.differences
    assert sentence.startswith(
        "ForgetfulCache, sdpa did not make DynamicCache's tokens (decode, context 12, batch 2): row"
    )
    assert sentence.endswith("In float32 this is a fault, or a tie to the last bits.")
    assert "DIFFERENT" in tables.text_section("decode", bench.rows)
    results = {"rows": bench.rows, "differences": bench.differences, "failures": []}
    assert tables.conclusions(results) == [f"Other tokens: {sentence}"]


def test_a_lossy_cache_may_differ(bench):
    dynamic = variants.VARIANTS["dynamic"]
    lossy = variants.Variant(
        "wrong", "RoundedCache", "sdpa", lambda model, *_: ForgetfulCache(config=model.config), lossy=True
    )
    (case,) = sections.decode_cases([dynamic, lossy], [12], [1])
    bench.measure(case, nothing)
    assert bench.differences[0].endswith("It stores rounded keys and values, so this is expected.")


def test_a_cache_that_fails_is_left_out_with_its_reason(bench):
    def fail(*_):
        raise ValueError("no room in /data/models/cache\nsecond line")

    dynamic = variants.VARIANTS["dynamic"]
    (case,) = sections.decode_cases(
        [dynamic, replace(dynamic, name="broken", cache="BrokenCache", make=fail)], [12], [1]
    )
    bench.measure(case, nothing)
    assert [row["cache"] for row in bench.rows] == ["dynamic"]
    assert bench.failures == ["BrokenCache, sdpa (decode, context 12, batch 1): ValueError: no room in cache"]


def test_a_failing_baseline_stops_the_run(bench):
    dynamic = variants.VARIANTS["dynamic"]
    (case,) = sections.decode_cases([replace(dynamic, make=lambda *_: None)], [12], [1])
    with pytest.raises(RuntimeError, match=r"the baseline failed \(decode, context 12, batch 1\)"):
        bench.measure(case, nothing)


def test_missing_quanto_is_told(model_folder, monkeypatch, capsys):
    monkeypatch.setattr(variants, "is_optimum_quanto_available", lambda: False)
    command.main(f"--model {model_folder} --caches quantized --sections bookkeeping --repeats 1".split())
    output = capsys.readouterr().out
    assert "Not measured: QuantizedCache (quanto, 4 bit), sdpa: optimum-quanto is not installed" in output


@pytest.mark.parametrize("beams", [1, 4])
def test_every_step_is_timed_and_the_model_restored(model, tokenizer, beams):
    inputs = prompts.text_prompts(tokenizer, [12])
    config = model.generation_config
    with variants.plain_generation(model, "sdpa"):
        call, cache = timing.timed_generate(model, variants.VARIANTS["dynamic"], inputs, new_tokens=5, beams=beams)
    assert call.tokens.shape == (1, 5)
    assert len(call.step_seconds) == 4
    assert len(call.reorder_seconds) == (5 if beams > 1 else 0)
    assert call.prefill_seconds + sum(call.step_seconds) < call.total_seconds
    assert sum(call.reorder_seconds) < call.total_seconds
    assert "reorder_cache" not in vars(cache)
    assert model.generation_config is config
    assert model.config._attn_implementation == "eager"


def test_runs_take_turns():
    order = []

    def run(name):
        order.append(name)
        if name == "b" and len(order) > 3:
            raise ValueError("enough")
        return len(order)

    results, failures = timing.interleave({name: lambda name=name: run(name) for name in "abc"}, rounds=3)
    assert "".join(order) == "abcabcac"
    assert results == {"a": [1, 4, 7], "c": [3, 6, 8]}
    assert failures == {"b": "ValueError: enough"}


def test_ratios_are_taken_within_a_round():
    assert timing.median_ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == 3.0


def test_what_the_context_costs_is_taken_against_the_shortest_one():
    def row(cache: str, batch: int, context: int, step_ms: float, least: float) -> dict:
        return {"cache": cache, "batch": batch, "context": context, "step_ms": step_ms, "step_ms_min": least}

    rows = [
        row("dynamic", 1, 512, 30.0, 29.0),
        row("dynamic", 1, 16, 10.0, 9.0),
        row("dynamic", 8, 512, 99.0, 98.0),
        row("paged", 1, 16, 11.0, 10.0),
        row("paged", 1, 512, 16.0, 14.0),
    ]
    rows = tables.with_cost_of_context(rows)
    costs = [(row.get("context_ms"), row.get("context_ratio")) for row in rows]
    assert costs == [(20.0, 1.0), (None, None), (None, None), (None, None), (5.0, 0.25)]
    assert [row.get("context_ratio_min") for row in rows] == [1.0, None, None, None, 0.2]


def test_steps_that_open_a_block():
    # After a prompt of 256 tokens, four blocks of 64, the first step opens one, and every 64th after it.
    assert bookkeeping.opening_steps(list(range(200))) == [0, 64, 128, 192]


def test_held_bytes_count_storage_once_and_whole():
    cache = DynamicCache()
    keys = torch.zeros(1, 2, 10, 8)
    cache.update(keys, keys, 0)
    assert memory.cache_bytes(cache).used == 2 * keys.nbytes
    cache.layers[0].values = cache.layers[0].keys
    assert memory.cache_bytes(cache).used == keys.nbytes
    cache.layers[0].keys = cache.layers[0].values = cache.layers[0].keys[:, :, -1:]
    assert memory.cache_bytes(cache).used == keys.nbytes


def test_live_bytes_see_old_and_new_keys_side_by_side():
    cache = DynamicCache()
    prompt, token = torch.zeros(1, 2, 10, 8), torch.zeros(1, 2, 1, 8)
    cache.update(prompt, prompt, 0)
    with memory.LiveBytes(cache) as live:
        cache.update(token, token, 0)
    old, new = prompt.nbytes, prompt.nbytes + token.nbytes
    assert live.current == 2 * new
    # While the values are concatenated: the new keys, and both the old and the new values.
    assert live.peak == 2 * new + old


def test_prompts_are_left_padded_text_of_the_asked_lengths(tokenizer):
    batch = prompts.text_prompts(tokenizer, [5, 40, 40])
    assert batch["attention_mask"].sum(dim=1).tolist() == [5, 40, 40]
    assert batch["attention_mask"][0].tolist() == [0] * 35 + [1] * 5
    assert (batch["input_ids"][0, :35] == tokenizer.pad_token_id).all()
    assert not torch.equal(batch["input_ids"][1], batch["input_ids"][2])


def test_prompts_longer_than_the_text_are_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(prompts.topics, "topics", {"a topic": "a few words"})
    with pytest.raises(ValueError, match="the prompt text gives 12 tokens, 13 are needed"):
        prompts.text_prompts(tokenizer, [13])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--contexts 16,x", "'x' is not a whole number of at least 1"),
        ("--batches 0", "'0' is not a whole number of at least 1"),
        (
            "--caches dynamic,static",
            "'static' is unknown, choose from dynamic, quantized, paged, int8, int4, paged+gather",
        ),
        ("--sections decode,beams", "'beams' is unknown, choose from decode, beam, padding, bookkeeping"),
        ("--new-tokens 1", "--new-tokens must be at least 2"),
        ("--dtype float8", "invalid choice: 'float8'"),
        ("--json no/such/folder/speed.json", "the folder of no/such/folder/speed.json does not exist"),
        ("--sections padding --plot speed.png", "add one of them to --sections"),
        ("--contexts 510 --new-tokens 4", "510 tokens and 4 new ones does not fit the model's 512 positions"),
        ("--model no/such/model", "no/such/model"),
    ],
)
def test_bad_arguments(model_folder, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        command.main(["--quick", "--model", str(model_folder), *arguments.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_runs_as_a_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eval.speed", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("eval.speed", run_name="__main__")
    assert stop.value.code == 0
    assert "--beam-contexts" in capsys.readouterr().out
