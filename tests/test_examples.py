"""The notebooks of examples/ run from top to bottom: quickly on a tiny model, and on the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_paged_cache import small_models
from tests.word_models import word_llama, word_tokenizer

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
# What a run prints if the notebook shows what it says: equal tokens, and a limit that is reached.
SHOWN = {"tour.ipynb": ("same tokens: True", "out of KV blocks", "prompt: PagedCache")}

each_notebook = pytest.mark.parametrize("notebook", [pytest.param(path, id=path.name) for path in EXAMPLES])


def code_cells(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run(notebook: Path) -> None:
    namespace: dict[str, object] = {}
    for number, source in enumerate(code_cells(notebook), start=1):
        exec(compile(source, f"{notebook.name}, code cell {number}", "exec"), namespace)


def assert_shown(notebook: Path, printed: str) -> None:
    assert "same tokens: False" not in printed
    for text in SHOWN[notebook.name]:
        assert text in printed


def test_there_are_notebooks() -> None:
    assert set(SHOWN) == {path.name for path in EXAMPLES}


@each_notebook
def test_runs_on_a_tiny_model(
    notebook: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = word_tokenizer(code_cells(notebook))
    # As many bytes a token as SmolLM2 keeps, so that memory limits mean the same.
    model = word_llama(tokenizer, hidden_size=45, num_attention_heads=45, num_key_value_heads=45, head_dim=64)
    # Every answer is as long as asked for, and the next turn of a chat holds its words again.
    model.generation_config.suppress_tokens = [tokenizer.unk_token_id, tokenizer.eos_token_id]

    def load(name: str | None, attn_implementation: str | None = None) -> tuple[object, object]:
        model.set_attn_implementation(attn_implementation)
        return model, tokenizer

    monkeypatch.setattr(small_models, "load", load)
    run(notebook)
    assert_shown(notebook, capsys.readouterr().out)


@pytest.mark.slow
@each_notebook
def test_runs_on_the_real_model(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(notebook)
    assert_shown(notebook, capsys.readouterr().out)


@each_notebook
def test_holds_no_outputs(notebook: Path) -> None:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["metadata"]["kernelspec"]["name"]) == (4, "python3")
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
