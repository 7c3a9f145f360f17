"""PyTorch's modes at the first use of a codec decide nothing about later uses, and a cache may cross from one to
another."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
from hf_paged_kernels.modes import matmul
from hf_paged_kernels.step import upload
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from hf_paged_cache import PagedCache
from hf_paged_cache.codecs import rotated
from hf_paged_cache.errors import InvalidArgumentError
from hf_paged_cache.hf import unpaged
from hf_paged_cache.prefix import model_identity

# The kernels for CPUs need Numba, without which plain PyTorch stands in for them.
WITH_NUMBA = importlib.util.find_spec("numba") is not None
BACKENDS = ["cpu", "reference"] if WITH_NUMBA else ["reference"]
KINDS = [("cpu", kv) for kv in ("raw", "int8", "fp8", "int4", "kivi2") if WITH_NUMBA]
KINDS += [("reference", kv) for kv in ("raw", "kivi2")]
CPU = torch.device("cpu")


@contextmanager
def changed(get: Callable, put: Callable, value: object) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager:
    return changed(torch.get_default_dtype, torch.set_default_dtype, dtype)


def default_device(name: str) -> AbstractContextManager:
    return changed(lambda: None, torch.set_default_device, name)


def deterministic() -> AbstractContextManager:
    return changed(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


def two_threads() -> AbstractContextManager:
    return changed(torch.get_num_threads, torch.set_num_threads, 2)


# In which a model of float32 gives the same keys and values as in none.
SAME_KEYS = {
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "meta by default": lambda: default_device("meta"),
    "on meta": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
    "deterministic": deterministic,
    "two threads": two_threads,
}
OTHER_KEYS = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16)}


def kinds(name: str) -> list[tuple[str, str]]:
    """What is tried in a mode. Only the kernels for CPUs know threads, and those are slow on a busy machine."""
    return KINDS[:1] if name == "two threads" else KINDS


@pytest.fixture(autouse=True)
def empty_tables() -> None:
    rotated.hadamard.cache_clear()
    model_identity._factors.cache_clear()


def passes(model: PreTrainedModel, prompt: dict[str, Tensor], cache: PagedCache, *modes: Callable) -> Tensor:
    """Logits of a prompt of all but 4 columns and of a token at a time; the first passes in the modes given."""
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    borders = [0, *range(ids.shape[1] - 4, ids.shape[1] + 1)]
    logits = []
    for step, (first, last) in enumerate(pairwise(borders)):
        with modes[step]() if step < len(modes) else nullcontext():
            out = model(
                ids[:, first:last],
                attention_mask=mask[:, :last],
                position_ids=positions[:, first:last],
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(out.logits)
    return torch.cat([part.detach().clone() for part in logits], 1)


@pytest.fixture(scope="module")
def expected(llama: Callable, prompts: Callable) -> Callable[[str, str], Tensor]:
    known: dict[tuple[str, str], Tensor] = {}

    def of(backend: str, kv: str) -> Tensor:
        if (backend, kv) not in known:
            model = llama(num_layers=2)
            with torch.no_grad():
                cache = PagedCache(model.config, kv=kv, backend=backend, block_size=16)
                known[backend, kv] = passes(model, prompts(60, 75), cache)
        return known[backend, kv]

    return of


@pytest.mark.parametrize("name", [*SAME_KEYS, *OTHER_KEYS])
def test_the_first_use_decides_nothing_about_later_ones(
    llama: Callable, prompts: Callable, expected: Callable, name: str
) -> None:
    model, prompt = llama(num_layers=2), prompts(60, 75)
    mode = {**SAME_KEYS, **OTHER_KEYS}[name]
    for backend, kv in kinds(name):
        build = {"config": model.config, "kv": kv, "backend": backend, "block_size": 16}
        want = expected(backend, kv)
        rotated.hadamard.cache_clear()
        with torch.no_grad(), mode():
            passes(model, prompt, PagedCache(**build))
        with torch.no_grad():
            assert torch.equal(passes(model, prompt, PagedCache(**build)), want), (backend, kv)


@pytest.mark.parametrize("name", SAME_KEYS)
def test_a_cache_goes_on_where_the_mode_has_ended_and_the_other_way_around(
    llama: Callable, prompts: Callable, expected: Callable, name: str
) -> None:
    model, prompt, mode = llama(num_layers=2), prompts(60, 75), SAME_KEYS[name]
    for backend, kv in kinds(name):
        for modes in ((mode, nullcontext, mode), (nullcontext, mode, nullcontext)):
            cache = PagedCache(model.config, kv=kv, backend=backend, block_size=16)
            with torch.no_grad():
                logits = passes(model, prompt, cache, *modes)
            # Other sums: of the parts that threads make, and of dense attention, through which gradients flow.
            error = 1e-4 if name in ("two threads", "gradients") else 0
            torch.testing.assert_close(logits, expected(backend, kv), rtol=0, atol=error)
            assert not cache.layers[0].keys.clone().is_inference()


def test_training_goes_on_from_a_cache_that_was_filled_in_inference_mode(llama: Callable, prompts: Callable) -> None:
    model, prompt = llama(num_layers=2), prompts(60, 75)
    cache = PagedCache(model.config, block_size=16, backend="reference")
    logits = passes(model, prompt, cache, torch.inference_mode, torch.inference_mode)
    assert not logits.is_inference()
    pools = [pool for group in cache.groups for pool in group.pool.layers.values()]
    assert not any(plane.is_inference() for pool in pools for plane in pool.planes)


@pytest.mark.parametrize("kv", ["raw", "int8", "kivi2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_is_followed_as_by_transformers_own_cache(
    llama: Callable, prompts: Callable, backend: str, kv: str
) -> None:
    model, prompt = llama(num_layers=2), prompts(60, 75)
    oracle = llama("sdpa", num_layers=2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = passes(oracle, prompt, DynamicCache(config=oracle.config)).float()
        got = passes(model, prompt, PagedCache(model.config, kv=kv, backend=backend, block_size=16)).float()
    seen = prompt["attention_mask"].bool()
    limit = {"raw": 0.05, "int8": 0.08, "kivi2": 0.6}[kv]
    assert (got - want)[seen].abs().mean() < limit * want[seen].abs().mean()


def test_products_that_are_float32_by_contract_stay_so_under_autocast() -> None:
    left, right = torch.randn(4, 8), torch.randn(8, 4)
    product = left @ right
    with torch.autocast("cpu", torch.bfloat16):
        assert (left @ right).dtype == torch.bfloat16
        assert torch.equal(matmul(left, right), product)


def test_a_step_is_uploaded_from_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        table, lengths = upload([np.arange(6, dtype=np.int32).reshape(2, 3), np.array([3, 4], dtype=np.int32)], CPU)
    assert table.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert lengths.tolist() == [3, 4]


def test_a_windowed_layer_says_its_window_whatever_the_default_device(windowed: Callable) -> None:
    with torch.device("meta"):
        layer = PagedCache(windowed(["sliding_attention"]).config).layers[0]
    assert layer._sliding_window_tensor.item() == 16


def test_states_of_hybrid_layers_are_repeated_whatever_the_default_device() -> None:
    layer = LinearAttentionLayer()
    layer.update_recurrent_state(torch.tensor([[1.0], [2.0]]))
    with torch.device("meta"):
        (change,) = unpaged.repeated([layer], 2)
    vars(layer).update(change.attributes)
    assert layer.recurrent_states[0].flatten().tolist() == [1, 1, 2, 2]


def test_tables_are_ordinary_tensors_even_of_a_mode_without_numbers() -> None:
    with FakeTensorMode():
        matrix, factors = rotated.hadamard(4, CPU), model_identity._factors(model_identity._PIECE, CPU)
    assert torch.equal(matrix @ matrix, torch.eye(4))
    assert (factors % 2 == 1).all()


def test_keys_without_numbers_are_refused(llama: Callable) -> None:
    config = llama(num_layers=2).config
    message = "expected ordinary tensors, whose numbers can be stored"
    with FakeTensorMode():
        fake = torch.zeros(1, 2, 3, 8)
    with pytest.raises(InvalidArgumentError, match=f"FakeTensor on cpu.*{message}"):
        PagedCache(config).update(fake, fake, 0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="hf_paged")
    with pytest.raises(InvalidArgumentError, match=f"on meta.*{message}"):
        model(torch.zeros(1, 3, dtype=torch.int64, device="meta"), past_key_values=PagedCache(config), use_cache=True)
    subclass = torch.zeros(1, 2, 3, 8).as_subclass(type("Marked", (Tensor,), {}))
    cache = PagedCache(config)
    cache.update(subclass, subclass, 0)
    assert cache.get_seq_length() == 3
