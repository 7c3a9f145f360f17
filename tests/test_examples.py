"""The notebooks and scripts of examples/ run from top to bottom: quickly on a tiny model, and on the real one."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from hf_paged_cache.demo import small_models
from tests.support.word_models import word_llama, word_tokenizer

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.ipynb"))
# What a run prints if the notebook shows what it says: equal tokens, a limit that is reached, tokens that are known.
SHOWN = {
    "chat_with_memory.ipynb": ("same tokens: True", "of them known", "BlockStore(", "MiB still known"),
    "tour.ipynb": ("same tokens: True", "out of KV blocks", "prompt: PagedCache"),
}
# The words of the tiny model's tokenizer: those of the script are in the notebooks that import it.
SCRIPT = FOLDER / "chat_with_memory.py"
# With which a model keeps as many bytes a token as SmolLM2, so that memory limits mean the same.
AS_MANY_BYTES = {"hidden_size": 45, "num_attention_heads": 45, "num_key_value_heads": 45, "head_dim": 64}

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


def cached_tokens(printed: str) -> list[int]:
    """Of every prompt that an example has asked a store for, in order."""
    return [int(number) for number in re.findall(r"(\d+) of them known", printed)]


def use_tiny_model(monkeypatch: pytest.MonkeyPatch, texts: list[str], **sizes: int) -> None:
    """Lets `small_models.load` give a tiny model with a tokenizer of the words of these texts."""
    tokenizer = word_tokenizer(texts)
    model = word_llama(tokenizer, **sizes)
    # Every answer is as long as asked for, and the next turn of a chat holds its words again.
    model.generation_config.suppress_tokens = [tokenizer.unk_token_id, tokenizer.eos_token_id]

    def load(name: str | None, attn_implementation: str | None = None) -> tuple[object, object]:
        model.set_attn_implementation(attn_implementation)
        return model, tokenizer

    monkeypatch.setattr(small_models, "load", load)


@pytest.fixture(autouse=True)
def beside_the_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Jupyter does: a notebook imports what lies beside it, and here it shows no windows."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("MPLBACKEND", "agg")


@pytest.fixture
def script() -> ModuleType:
    return importlib.import_module(SCRIPT.stem)


def test_there_are_notebooks() -> None:
    assert set(SHOWN) == {path.name for path in EXAMPLES}


# Of the chat, the quick run has the script that the notebook imports.
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(path, id=path.name, marks=pytest.mark.slow if path.stem == SCRIPT.stem else ()) for path in EXAMPLES],
)
def test_runs_on_a_tiny_model(
    notebook: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if notebook.stem == SCRIPT.stem:
        pytest.importorskip("matplotlib")
    use_tiny_model(monkeypatch, [*code_cells(notebook), SCRIPT.read_text(encoding="utf-8")], **AS_MANY_BYTES)
    run(notebook)
    assert_shown(notebook, capsys.readouterr().out)


@pytest.mark.slow
@each_notebook
def test_runs_on_the_real_model(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(notebook)
    assert_shown(notebook, capsys.readouterr().out)


def test_the_script_asks_with_and_without_the_store(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    use_tiny_model(monkeypatch, [SCRIPT.read_text(encoding="utf-8")])
    assert script.main(["--new-tokens", "4", "--memory", "64MiB", "--plot", str(tmp_path / "tree.png")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("same tokens: True") == len(script.TURNS) + len(script.QUESTIONS)
    first_turn, *later_turns = cached_tokens(printed)[: len(script.TURNS)]
    first_question, *later_questions = cached_tokens(printed)[len(script.TURNS) :]
    assert first_turn == 0
    assert all(later_turns)
    assert all(known > 400 for known in later_questions)
    assert first_question < 64
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")


def test_the_script_takes_a_document(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_tiny_model(monkeypatch, [SCRIPT.read_text(encoding="utf-8")])
    document = tmp_path / "document.txt"
    document.write_text("a guide to clocks " * 30, encoding="utf-8")
    script.main(["--document", str(document), "--new-tokens", "2", "--memory", "64MiB"])
    assert cached_tokens(capsys.readouterr().out)[-1] == 30 * 4
    with pytest.raises(SystemExit):
        script.main(["--document", str(tmp_path / "none.txt")])
    assert "none.txt" in capsys.readouterr().err


@each_notebook
def test_holds_no_outputs(notebook: Path) -> None:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["metadata"]["kernelspec"]["name"]) == (4, "python3")
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
