"""The snippets of the README and of docs/ run, on a tiny model in the place of the real one."""

import importlib.util
import re
from pathlib import Path

import pytest
from transformers import T5Config, T5ForConditionalGeneration

from tests.support.word_models import vocabulary_ids, word_llama, word_tokenizer

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DECODER, ENCODER_DECODER = "HuggingFaceTB/SmolLM2-135M-Instruct", "google-t5/t5-small"


def snippets(document: Path) -> list[str]:
    """The Python code of a document."""
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with tiny random models and a tokenizer of the words in the documents, by the names they stand for."""
    tokenizer = word_tokenizer(document.read_text() for document in DOCUMENTS)
    t5 = T5Config(
        **vocabulary_ids(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=1
    )
    folders = {}
    for name, model in ((DECODER, word_llama(tokenizer)), (ENCODER_DECODER, T5ForConditionalGeneration(t5))):
        folder = tmp_path_factory.mktemp("tiny")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders[name] = str(folder)
    return folders


@pytest.mark.parametrize("document", [pytest.param(path, id=path.name) for path in DOCUMENTS if snippets(path)])
def test_snippets_run_in_the_order_of_the_document(document: Path, tiny_models: dict[str, str]) -> None:
    namespace: dict[str, object] = {}
    for snippet in snippets(document):
        for name, folder in tiny_models.items():
            snippet = snippet.replace(name, folder)
        exec(snippet, namespace)


def test_the_readme_has_snippets_to_run() -> None:
    assert len(snippets(ROOT / "README.md")) >= 6


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_commands_in_documents_are_there() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        for module in re.findall(r"python -m ((?:eval|tests|hf_paged_cache)[\w.]*)", text):
            assert importlib.util.find_spec(module) is not None, f"{document.name} runs {module}"
        for file in re.findall(r"\b(?:eval|tests|examples)/[\w/]+\.(?:py|md|json)\b", text):
            assert (ROOT / file).is_file(), f"{document.name} names {file}"
