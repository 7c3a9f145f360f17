"""`hf-paged-cache demo`, on a tiny random Llama with a tokenizer of its own."""

import io
import itertools
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_paged_cache.demo import comparison
from hf_paged_cache.demo.cli import main
from hf_paged_cache.demo.small_models import load

CHAT_TEMPLATE = (
    "{% for message in messages %}user {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def tiny_tokenizer(**options):
    """One token a word of the demo's prompts, so that the long one takes some hundred tokens."""
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [
        comparison.LONG_TEXT,
        comparison.LONG_QUESTION,
        comparison.QUESTION,
        *comparison.SHORT_QUESTIONS,
        "user assistant",
    ]
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>", "<end>"]))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tokenizer = tiny_tokenizer(pad_token="<pad>", eos_token="<end>", chat_template=CHAT_TEMPLATE)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def run_demo(folder, *options, max_new_tokens=6):
    return main(["demo", "--model", folder, "--max-new-tokens", str(max_new_tokens), *options])


def table_rows(output):
    return [line for line in output.splitlines() if line.endswith(("same", "DIFFER")) and "PagedCache" in line]


def test_demo_prints_texts_and_a_table_of_every_cache(folder, capsys):
    assert run_demo(folder) == 0
    output, error = capsys.readouterr()
    assert error == ""
    for title in ("== Plain", "== 4 beams", "== Batch of 4"):
        assert title in output
    assert [row.split()[-1] for row in table_rows(output)] == ["same"] * 4
    assert output.count("DynamicCache   ") == 3
    assert "Every cache gave the same tokens everywhere." in output
    assert max(map(len, output.splitlines())) <= 100


def test_beams_share_the_prompt_and_padding_takes_no_blocks(folder):
    model, tokenizer = load(folder)
    plain, beams, batch = comparison.run(model, tokenizer, prompt=None, max_new_tokens=6, block_size=16)
    assert plain.same
    assert beams.same
    assert batch.same
    shared, forked = beams.paged
    assert shared.bytes_at_end < 0.5 * beams.dynamic.bytes_at_end
    assert forked.bytes_at_end == shared.bytes_at_end
    assert forked.bytes_peak < shared.bytes_peak
    assert batch.paged[0].bytes_at_end < 0.5 * batch.dynamic.bytes_at_end


def test_peak_of_dynamic_cache_counts_the_copied_tensor(folder):
    model, tokenizer = load(folder)
    plain = comparison.run(model, tokenizer, prompt="memory", max_new_tokens=6, block_size=16)[0]
    one_of_four_tensors = plain.dynamic.bytes_at_end // 4  # keys and values of two layers
    assert plain.dynamic.bytes_peak == plain.dynamic.bytes_at_end + one_of_four_tensors


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_bar_is_drawn_on_a_terminal_and_removed_at_the_end(folder, capsys, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert run_demo(folder) == 0
    drawn = terminal.getvalue()
    assert "4 beams: PagedCache, fork(4)" in drawn
    assert drawn.endswith("\r")
    assert "fork(4):" not in capsys.readouterr().out.partition("DynamicCache   ")[0]


def test_own_prompt_is_used_in_every_part(folder, capsys):
    assert run_demo(folder, "--prompt", "What is a page table?", "--block-size", "16") == 0
    output = capsys.readouterr().out
    assert output.count("> What is a page table?") == 3
    assert "blocks of 16 tokens" in output


def test_prompt_of_one_token_without_chat_template_or_padding_token(tmp_path, folder, capsys):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path)
    tiny_tokenizer(eos_token="<end>").save_pretrained(tmp_path)
    assert run_demo(str(tmp_path), "--prompt", "memory", max_new_tokens=1) == 0
    assert [row.split()[-1] for row in table_rows(capsys.readouterr().out)] == ["same"] * 4


def test_model_that_was_saved_without_a_cache_uses_one(folder):
    model, tokenizer = load(folder)
    model.generation_config.use_cache = False
    plain = comparison.run(model, tokenizer, prompt="memory", max_new_tokens=6, block_size=16)[0]
    stored_tokens = len(["user", "memory", "assistant"]) + 5  # the last new token is not fed back
    bytes_of_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head_dim, fp32
    assert plain.same
    assert plain.dynamic.bytes_at_end == stored_tokens * bytes_of_token


def test_attention_of_the_model_is_restored_also_after_an_error(folder, monkeypatch):
    model, tokenizer = load(folder)
    monkeypatch.setattr(comparison, "prefill", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        comparison.run(model, tokenizer, prompt=None, max_new_tokens=2, block_size=64)
    assert model.config._attn_implementation == "sdpa"


def test_different_tokens_are_shown_and_are_a_failure_in_fp32(folder, capsys, monkeypatch):
    alternating = itertools.cycle([0, 1])
    generate = GenerationMixin.generate

    def off_by_one(self, *args, **kwargs):
        return generate(self, *args, **kwargs) + next(alternating)

    monkeypatch.setattr(LlamaForCausalLM, "generate", off_by_one)
    assert run_demo(folder) == 1
    output = capsys.readouterr().out
    assert "DIFFER" in output
    assert "[PagedCache]" in output
    assert "in fp32 it is an error" in output


def test_threads_option_sets_the_threads_of_torch(folder):
    before = torch.get_num_threads()
    try:
        assert run_demo(folder, "--threads", "1") == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-new-tokens", "0"], "must be a whole number of at least 1, not '0'"),
        (["--max-new-tokens", "many"], "must be a whole number of at least 1, not 'many'"),
        (["--block-size", "-16"], "must be a whole number of at least 1, not '-16'"),
        (["--threads", "1.5"], "must be a whole number of at least 1, not '1.5'"),
        (["--prompt", " "], "must not be empty"),
        (["--no-such-option"], "unrecognized arguments"),
    ],
)
def test_bad_option_is_named(options, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", *options])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--block-size", "48"], "block_size=48: expected a power of two from 16 to 256"),
        (["--max-new-tokens", "4096"], "do not fit in the model's 1024 positions"),
    ],
)
def test_value_that_does_not_fit_the_model_is_one_line(folder, options, message, capsys):
    assert main(["demo", "--model", folder, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hf-paged-cache: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_unknown_folder_is_one_line(tmp_path, capsys):
    assert run_demo(str(tmp_path / "nothing here")) == 2
    error = capsys.readouterr().err
    assert "is neither a folder nor a model id that the hub gives" in error
    assert error.count("\n") == 1


def test_tokenizer_that_cannot_pad_is_one_line(tmp_path, folder, capsys):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert run_demo(str(tmp_path)) == 2
    assert "neither a padding nor an end-of-text token" in capsys.readouterr().err


def test_interrupt_ends_with_130(folder, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "prefill", interrupt)
    assert run_demo(folder) == 130
    assert capsys.readouterr().err.endswith("hf-paged-cache: interrupted\n")


@pytest.mark.parametrize(
    ("kv", "kernels"),
    [
        ("raw", ["storing tokens exactly", "attention to exact blocks"]),
        ("fp8", ["storing tokens as 8-bit codes", "attention to quantized blocks"]),
        ("k8v4", ["storing tokens exactly", "attention to quantized blocks", "attention to exact blocks"]),
    ],
)
def test_warmup_compiles_what_a_codec_uses(kv, kernels, capsys):
    pytest.importorskip("numba")
    assert main(["warmup", "--kv", kv]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == kernels
    assert all(line.endswith(" s") for line in lines[:-1])
    assert lines[-1].startswith(("kept in ", "not kept"))


def test_warmup_without_numba_is_one_line(capsys, monkeypatch):
    import hf_paged_kernels

    monkeypatch.setitem(sys.modules, "hf_paged_kernels.numba", None)
    monkeypatch.delattr(hf_paged_kernels, "numba", raising=False)
    assert main(["warmup"]) == 2
    error = capsys.readouterr().err
    assert "there is nothing to warm up" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["warmup", "--help"]])
def test_help_says_what_there_is(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 0
    assert arguments[0].strip("-") in capsys.readouterr().out


def test_command_is_required(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([])
    assert exit_info.value.code == 2
    assert "COMMAND" in capsys.readouterr().err
