"""Keys and values that are still in their blocks behave as the tensor that they stand for."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor
from transformers import PreTrainedModel

from hf_paged_cache import CacheStateError, PagedCache, UnsupportedError
from hf_paged_cache.hf import lazy
from hf_paged_cache.hf.lazy import GATHER_HINT, LazyKV
from tests.support.compat import CACHE_ARGUMENT

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., dict[str, Tensor]]

SLIDING, FULL = "sliding_attention", "full_attention"
TOKENS = torch.randn(2, 2, 40, 8, generator=torch.Generator().manual_seed(0))


class Pair(NamedTuple):
    """A lazy tensor, and the dense one that it stands for."""

    lazy: Tensor
    dense: Tensor


def filled(model: PreTrainedModel, *pieces: int) -> tuple[PagedCache, list[Tensor]]:
    """A cache that was given pieces of `TOKENS`, and the keys that the last `update` of each layer returned."""
    cache = PagedCache(model.config, block_size=16)
    start, returned = 0, []
    for size in pieces:
        key = TOKENS[:, :, start : start + size]
        returned = [cache.update(key, -key, layer)[0] for layer in range(len(cache))]
        start += size
    return cache, returned


STATES = ["first pass", "later pass", "stored", "windowed pass", "windowed and stored"]


@pytest.fixture(params=STATES)
def pair(request: pytest.FixtureRequest, windowed: Models) -> Pair:
    model = windowed([SLIDING, FULL])
    if request.param == "first pass":
        cache, (_, full) = filled(model, 21)
        return Pair(full, TOKENS[:, :, :21])
    cache, (sliding, full) = filled(model, 20, 9, 1)
    window = TOKENS[:, :, 14:30]
    return {
        "later pass": Pair(full, TOKENS[:, :, :30]),
        "stored": Pair(cache.layers[1].keys, TOKENS[:, :, :30]),
        "windowed pass": Pair(sliding, window),
        "windowed and stored": Pair(cache.layers[0].keys, window[:, :, 1:]),
    }[request.param]


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "index": lambda x: x[0],
    "slice": lambda x: x[..., 2:-3, ::2],
    "index by tensor": lambda x: x[torch.tensor([1, 0, 1])],
    "index by mask": lambda x: x[torch.tensor([False, True])],
    "index by None": lambda x: x[:, None, ..., -1],
    "iterate": lambda x: torch.stack(list(x)),
    "unpack": lambda x: (lambda first, second: first - second)(*x),
    "cat after": lambda x: torch.cat([torch.ones_like(x), x], dim=2),
    "cat before": lambda x: torch.cat([x, torch.ones(2, 2, 1, 8)], dim=-2),
    "cat both": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "matmul left": lambda x: x @ torch.ones(8, 3),
    "matmul right": lambda x: torch.ones(5, 8) @ x.transpose(2, 3),
    "matmul both": lambda x: torch.matmul(x, x.mT),
    "einsum": lambda x: torch.einsum("bhsd,bhtd->bhst", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "to float64": lambda x: x.to(torch.float64),
    "to bfloat16": lambda x: x.bfloat16(),
    "to another tensor's": lambda x: x.type_as(torch.zeros(1, dtype=torch.float16)),
    "to cpu": lambda x: x.to("cpu", non_blocking=True).cpu(),
    "clone": torch.clone,
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "transpose": lambda x: x.transpose(1, 2).contiguous(),
    "permute": lambda x: x.permute(2, 0, 1, 3),
    "view": lambda x: x.view(4, -1, 8),
    "reshape": lambda x: x.reshape(-1, 16),
    "flatten": lambda x: x.flatten(1),
    "expand": lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1),
    "repeat": lambda x: x.repeat(2, 1, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "split": lambda x: x.split(5, dim=2)[1],
    "chunk": lambda x: torch.cat(x.chunk(2, dim=3)[::-1], dim=3),
    "pad": lambda x: F.pad(x, (0, 0, 1, 2)),
    "roll": lambda x: x.roll(1, dims=2),
    "index_select": lambda x: x.index_select(0, torch.tensor([1, 1])),
    "gather": lambda x: x.gather(2, torch.zeros(2, 2, 1, 8, dtype=torch.long)),
    "masked_fill": lambda x: x.masked_fill(torch.tensor([True, False]).view(2, 1, 1, 1), 0.0),
    "where": lambda x: torch.where(x > 0, x, -x),
    "arithmetic": lambda x: 2 * x - x / 3 + (-x) ** 2,
    "comparison": lambda x: x == x.clone(),
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: x.norm(dim=-1),
    "topk": lambda x: x.topk(3, dim=2).indices,
    "sum": torch.sum,
    "item": lambda x: x.sum().item(),
    "vmap": lambda x: torch.vmap(torch.sum)(x),
    "foreach": lambda x: torch._foreach_add([x, x], 1.0)[1],
    "equal": lambda x: torch.equal(x, x.clone()),
    "allclose": lambda x: torch.allclose(x, x + 1e-9),
    "copy into": lambda x: torch.zeros(x.shape).copy_(x),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_gives_what_it_gives_on_the_dense_tensor(pair: Pair, name: str) -> None:
    actual, expected = OPERATIONS[name](pair.lazy), OPERATIONS[name](pair.dense.contiguous())
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


OUTSIDE = {
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "tolist": lambda x: x.tolist(),
    "safetensors": lambda x: load(save({"key": x}))["key"].numpy(),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_leaves_torch_has_the_data(windowed: Models, name: str) -> None:
    cache, _ = filled(windowed([SLIDING, FULL]), 20)
    np.testing.assert_array_equal(OUTSIDE[name](cache.layers[1].keys), TOKENS[:, :, :20].numpy())


@pytest.mark.parametrize("name", ["from_dlpack", "share_memory_", "apply_"])
def test_a_call_that_needs_memory_does_not_end_the_process(windowed: Models, name: str) -> None:
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "from_dlpack": torch.from_dlpack,
        "share_memory_": lambda x: x.share_memory_(),
        "apply_": lambda x: x.apply_(abs),
    }
    cache, _ = filled(windowed([SLIDING, FULL]), 20)

    def call() -> None:
        with contextlib.suppress(Exception):
            calls[name](cache.layers[1].keys).sum()

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 0  # negative: ended by that signal


def test_torch_save_saves_the_dense_tensor(pair: Pair) -> None:
    file = io.BytesIO()
    torch.save({"key": pair.lazy}, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=True)["key"], pair.dense, rtol=0, atol=0)


# Looking without reading


def test_its_looks_are_known_without_reading_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> Tensor:
        raise AssertionError("was read")

    monkeypatch.setattr(LazyKV, "materialize", read)
    x, dense = pair.lazy, pair.dense.contiguous()
    assert isinstance(x, torch.Tensor)
    assert (x.shape, x.size(2), len(x), x.ndim, x.numel()) == (dense.shape, dense.size(2), 2, 4, dense.numel())
    assert (x.dtype, x.device, x.element_size(), x.nbytes) == (dense.dtype, dense.device, 4, dense.nbytes)
    assert (x.stride(), x.is_contiguous(), x.requires_grad) == (dense.stride(), True, False)
    assert "LazyKV" in repr(x)
    assert str(tuple(dense.shape)) in f"{x}"


def test_it_is_read_once(pair: Pair) -> None:
    assert pair.lazy.materialize() is pair.lazy.materialize()


# In-place edits would be lost


EDITS = {
    "item assignment": lambda x: x.__setitem__((0, 0), 0.0),
    "zero_": lambda x: x.zero_(),
    "mul_": lambda x: x.mul_(2),
    "+=": lambda x: x.__iadd__(1),
    "index_copy_": lambda x: x.index_copy_(2, torch.tensor([0]), torch.zeros(2, 2, 1, 8)),
    "copy_": lambda x: x.copy_(torch.zeros(x.shape)),
    "out": lambda x: torch.add(torch.zeros(x.shape), 1, out=x),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_in_place_is_refused(pair: Pair, name: str) -> None:
    before = TOKENS.clone()
    with pytest.raises(UnsupportedError, match="clone"):
        EDITS[name](pair.lazy)
    torch.testing.assert_close(pair.lazy.clone(), pair.dense, rtol=0, atol=0)
    assert TOKENS.equal(before)


# A tensor of another time


OUTDATING: dict[str, Callable[[PagedCache], object]] = {
    "reset": lambda cache: cache.reset(),
    "crop": lambda cache: cache.crop(-1),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
}


@pytest.mark.parametrize("name", OUTDATING)
def test_keys_of_an_earlier_time_are_refused(llama: Models, name: str) -> None:
    cache, (returned, *_) = filled(llama(), 20, 1)
    stored = cache.layers[0].keys
    OUTDATING[name](cache)
    for keys in (returned, stored):
        with pytest.raises(CacheStateError, match=r"earlier forward pass.*\.clone\(\)"):
            keys.sum()
        with pytest.raises(CacheStateError):
            copy.deepcopy(keys)


def test_keys_that_were_read_stay_as_they_were(llama: Models) -> None:
    cache, (returned, *_) = filled(llama(), 20, 1)
    returned.sum()
    cache.reset()
    torch.testing.assert_close(returned.clone(), TOKENS[:, :, :21], rtol=0, atol=0)


def test_keys_that_have_left_the_window_are_refused(windowed: Models) -> None:
    cache, (returned, *_) = filled(windowed([SLIDING]), 20, 12)
    for start in range(32, 40):
        cache.update(TOKENS[:, :, start : start + 1], TOKENS[:, :, start : start + 1], 0)
    with pytest.raises(CacheStateError, match="earlier forward pass"):
        returned.sum()


def test_keys_of_an_earlier_step_hold_while_their_blocks_do(llama: Models) -> None:
    cache, (returned, *_) = filled(llama(), 20, 1)
    for layer in range(3):
        cache.update(TOKENS[:, :, 21:40], TOKENS[:, :, 21:40], layer)
    torch.testing.assert_close(returned.clone(), TOKENS[:, :, :21], rtol=0, atol=0)


def test_keys_outlive_their_cache(llama: Models) -> None:
    cache, (returned, *_) = filled(llama(), 20, 1)
    stored = cache.layers[0].keys
    del cache
    torch.testing.assert_close(returned.clone(), TOKENS[:, :, :21], rtol=0, atol=0)
    torch.testing.assert_close(stored.clone(), TOKENS[:, :, :21], rtol=0, atol=0)


def test_keys_of_a_fork_do_not_see_what_others_write(llama: Models) -> None:
    cache, _ = filled(llama(), 20)
    fork = cache.fork()
    kept = fork.layers[0].keys
    for layer in range(3):
        cache.update(TOKENS[:, :, 30:], TOKENS[:, :, 30:], layer)  # makes the pool grow
    torch.testing.assert_close(kept.clone(), TOKENS[:, :, :20], rtol=0, atol=0)
    torch.testing.assert_close(fork.layers[0].keys.clone(), TOKENS[:, :, :20], rtol=0, atol=0)


def test_keys_that_were_read_before_a_pool_grew_are_read_again_after(llama: Models) -> None:
    cache, _ = filled(llama(), 20)
    fork = cache.fork()
    torch.testing.assert_close(fork.layers[0].keys.clone(), TOKENS[:, :, :20], rtol=0, atol=0)
    for layer in range(3):
        cache.update(TOKENS, TOKENS, layer)
    torch.testing.assert_close(fork.layers[0].keys.clone(), TOKENS[:, :, :20], rtol=0, atol=0)


# The hint


def test_one_hint_says_that_gathering_is_slower(
    llama: Models, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lazy, "_hints_given", set())
    with caplog.at_level(logging.WARNING, logger="hf_paged_cache"), torch.no_grad():
        for _ in range(2):
            model = llama("sdpa")
            cache = PagedCache(model.config)
            for piece in prompts(20)["input_ids"].split(5, dim=1):
                model(piece, **{CACHE_ARGUMENT: cache})
    assert [record.getMessage() for record in caplog.records] == [GATHER_HINT]
    assert 'attn_implementation="hf_paged"' in GATHER_HINT


def test_attention_in_blocks_gives_no_hint(
    llama: Models, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lazy, "_hints_given", set())
    model = llama("hf_paged")
    with caplog.at_level(logging.WARNING, logger="hf_paged_cache"), torch.no_grad():
        cache = PagedCache(model.config)
        for piece in prompts(20)["input_ids"].split(5, dim=1):
            model(piece, **{CACHE_ARGUMENT: cache})
    assert not caplog.records
