"""Caches under `generate` on the card; on the CPU where there is none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import CODECS, BlockStore, PagedCache, prefill
from tests.kernels.device import DEVICE
from tests.support.compat import generate

MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams in groups of answers": {"num_beams": 4, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunks of a prompt": {"prefill_chunk_size": 16},
}


@pytest.fixture
def full(llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return copy.deepcopy(llama()).to(DEVICE)


def inputs_of(prompts: Callable[..., dict[str, torch.Tensor]], *lengths: int) -> dict[str, torch.Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in prompts(*lengths).items()}


def answer(model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Any, **options: Any) -> torch.Tensor:
    return generate(model, inputs, cache, max_new_tokens=12, do_sample=False, **options)


@pytest.mark.parametrize("mode", MODES)
def test_the_tokens_of_a_dynamic_cache(full, prompts, mode):
    inputs = inputs_of(prompts, *((70,) if mode == "prompt lookup" else (70, 33)))
    expected = answer(full, inputs, DynamicCache(config=full.config), **MODES[mode])
    assert torch.equal(answer(full, inputs, PagedCache(full.config), **MODES[mode]), expected)


@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_layers_with_a_window(windowed, prompts, mode):
    model = copy.deepcopy(windowed(["sliding_attention", "full_attention"])).to(DEVICE)
    inputs = inputs_of(prompts, 70, 33)
    expected = answer(model, inputs, DynamicCache(config=model.config), **MODES[mode])
    assert torch.equal(answer(model, inputs, PagedCache(model.config), **MODES[mode]), expected)


@pytest.mark.parametrize("kv", [kv for kv in CODECS if kv != "raw"])
def test_codecs_read_as_plain_pytorch_reads_them(full, prompts, kv):
    inputs = inputs_of(prompts, 200, 150)
    by_kernels, by_pytorch = (
        answer(full, inputs, PagedCache(full.config, kv=kv, backend=backend, block_size=16))
        for backend in (None, "reference")
    )
    assert torch.equal(by_kernels, by_pytorch)


def test_forks_of_a_prompt(full, prompts):
    inputs = inputs_of(prompts, 70)
    expected = answer(full, inputs, DynamicCache(config=full.config), num_beams=4)
    cache = PagedCache(full.config)
    prefill(full, cache, **inputs)
    assert torch.equal(answer(full, inputs, cache.fork(4), num_beams=4), expected)


def test_a_prompt_that_a_store_knows(full, prompts):
    store = BlockStore(full, memory="64MiB", block_size=16)
    first = inputs_of(prompts, 70)
    cache = store.cache_for(**first)
    history = answer(full, first, cache)
    store.commit(cache, history)
    ids = torch.cat([history, inputs_of(prompts, 9)["input_ids"]], dim=1)
    question = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = answer(full, question, DynamicCache(config=full.config))
    cache = store.cache_for(**question)
    assert cache.get_seq_length() >= 80
    assert torch.equal(answer(full, question, cache), expected)
