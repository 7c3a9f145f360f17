"""What every test gets: memory in which whatever was not written is poison, and two tiny models.

A factory is a fixture that returns a function, so that a test says at the call what matters to it:
`windowed(["sliding_attention", "full_attention"], "sdpa")`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel

from hf_paged_cache.codecs import Codec
from tests.kernels.hostile import poison
from tests.support.families import randomize
from tests.support.memory import Memory

# One thread for each of several test processes: more than there are cores would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the commands that tests run

VOCABULARY = 128
PAD = 0
FIRST_WORD = 8
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,  # so that every answer has the length that was asked for
    "tie_word_embeddings": False,
}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests marked `evidence` are slow too, so that `-m "not slow"` leaves them out."""
    if item.get_closest_marker("evidence"):
        item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leaves what has been imported out of later collections of garbage, which take a quarter of a second with it."""
    gc.collect()
    gc.freeze()
    gc.enable()  # see tests/__init__.py


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Leaves what a test left out of later collections too: many tests collect, and a session has many models."""
    yield
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def kernels_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of several test processes one compiles a kernel for CPUs, and the others wait to load it from disk."""
    if "PYTEST_XDIST_WORKER" not in os.environ or find_spec("numba") is None:
        yield
        return
    from hf_paged_kernels.numba import compiled

    lock, c_function = FileLock(tmp_path_factory.getbasetemp().parent / "numba.lock"), compiled.c_function

    def locked(function: Callable[[int], None]) -> Any:
        with lock:
            return c_function(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "c_function", locked)
        yield


@pytest.fixture(autouse=True)
def poisoned_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poisons every pool when it is allocated: a slot that is read but was never written shows in any result."""
    new_plane = Codec.new_plane

    def poisoned_plane(*arguments: Any) -> Tensor:
        plane = new_plane(*arguments)
        poison(plane)
        return plane

    monkeypatch.setattr(Codec, "new_plane", staticmethod(poisoned_plane))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, poisoned_pools: None) -> Memory:
    """What the pools hold from now on."""
    counted, new_plane = Memory(), Codec.new_plane

    def counted_plane(*arguments: Any) -> Tensor:
        counted.check(*arguments)
        plane = new_plane(*arguments)
        counted.add(plane)
        return plane

    monkeypatch.setattr(Codec, "new_plane", staticmethod(counted_plane))
    return counted


@pytest.fixture(scope="session")
def llama() -> Callable[..., PreTrainedModel]:
    """`llama(attention="hf_paged", num_layers=3)`: full attention, 4 heads on 2. Tests that change a model copy it."""

    @lru_cache
    def make(attention: str = "hf_paged", num_layers: int = 3) -> PreTrainedModel:
        return _build(LlamaConfig(**SIZES, num_hidden_layers=num_layers), attention)

    return make


@pytest.fixture(scope="session")
def windowed() -> Callable[..., PreTrainedModel]:
    """`windowed(layer_types, attention="hf_paged", window=16)`: a Gemma 3 with these layers."""

    @lru_cache
    def make_cached(layer_types: tuple[str, ...], attention: str, window: int) -> PreTrainedModel:
        config = Gemma3TextConfig(
            **SIZES,
            num_hidden_layers=len(layer_types),
            layer_types=list(layer_types),
            sliding_window=window,
            query_pre_attn_scalar=8,
        )
        return _build(config, attention)

    def make(layer_types: Sequence[str], attention: str = "hf_paged", window: int = 16) -> PreTrainedModel:
        return make_cached(tuple(layer_types), attention, window)

    return make


@pytest.fixture(scope="session")
def prompts() -> Callable[..., dict[str, Tensor]]:
    """`prompts(3, 17, 40, seed=0)`: random prompts of these lengths, left-padded, with their attention mask."""

    def make(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.full((len(lengths), max(lengths)), PAD)
        for row, length in enumerate(lengths):
            ids[row, ids.shape[1] - length :] = torch.randint(FIRST_WORD, VOCABULARY, (length,), generator=generator)
        columns = torch.arange(max(lengths))
        mask = (columns >= max(lengths) - torch.tensor(lengths)[:, None]).long()
        return {"input_ids": ids, "attention_mask": mask}

    return make


@pytest.fixture
def tokens(prompts: Callable[..., dict[str, Tensor]]) -> Callable[..., Tensor]:
    """`tokens(40, seed=0)`: one random prompt, `[1, 40]`."""
    return lambda length, seed=0: prompts(length, seed=seed)["input_ids"]


def _build(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    randomize(model)
    # A generated pad token would be taken for padding where `generate` is given no mask.
    model.generation_config.suppress_tokens = list(range(FIRST_WORD))
    return model.eval()
