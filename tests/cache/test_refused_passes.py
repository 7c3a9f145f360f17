"""A forward pass that is refused takes nothing away, however often it is tried, and whatever came before it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from hf_paged_kernels import StepMetadata
from torch import Tensor
from transformers import PreTrainedModel

from hf_paged_cache import CacheStateError, InvalidArgumentError, OutOfBlocksError, PagedCache, prefill
from hf_paged_cache.groups import LayerGroup
from tests.support.combinations import combined, later
from tests.support.compat import CACHE_ARGUMENT, generate
from tests.support.families import family_called, inputs

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., dict[str, Tensor]]

SLIDING, FULL = "sliding_attention", "full_attention"


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, cache: PagedCache | None, **options: Any) -> Tensor:
    return model(ids, **{CACHE_ARGUMENT: cache}, **options).logits


def columns(cache: PagedCache) -> list[int]:
    """Columns of each layer group."""
    return [group.table.num_columns for group in cache._groups]


@pytest.mark.parametrize("is_reordered", [False, True])
@pytest.mark.parametrize("layer_types", [[FULL, FULL], [SLIDING, FULL]], ids="-".join)
def test_another_batch_size(windowed: Models, prompts: Prompts, layer_types: list[str], is_reordered: bool) -> None:
    model, ids = windowed(layer_types), prompts(20, 20)["input_ids"]
    cache = PagedCache(model.config, block_size=16)
    logits(model, ids[:, :18], cache)
    logits(model, ids[:, 18:19], cache)
    if is_reordered:
        cache.reorder_cache(torch.tensor([1, 0]))
        ids = ids[[1, 0]]
    for _ in range(3):
        with pytest.raises(InvalidArgumentError, match="3 rows, but the cache holds 2 rows"):
            logits(model, torch.ones(3, 1, dtype=torch.long), cache)
        assert columns(cache) == [19] * len(cache._groups)
    actual = logits(model, ids[:, 19:], cache)
    torch.testing.assert_close(actual, logits(model, ids, None, use_cache=False)[:, 19:], rtol=1e-4, atol=1e-4)


def test_a_forgotten_fork(llama: Models, prompts: Prompts) -> None:
    model, prompt = llama(), prompts(17)
    cache = prefill(model, PagedCache(model.config), **prompt)
    for _ in range(3):
        with pytest.raises(InvalidArgumentError, match=r"cache\.fork\(2\)"):
            generate(model, prompt, cache, num_beams=2, max_new_tokens=4)
        assert (cache.get_seq_length(), cache.batch_size) == (16, 1)


def test_no_room_under_a_mask_of_four_dimensions(llama: Models, prompts: Prompts) -> None:
    """Such a mask announces nothing, so that the lack of room shows in the first layer."""
    model, ids = llama(), prompts(17)["input_ids"]
    cache = PagedCache(model.config, num_blocks=1, block_size=16)
    logits(model, ids[:, :10], cache)
    mask = torch.ones(1, 1, 7, 17, dtype=torch.bool).tril(10)
    for _ in range(3):
        with pytest.raises(OutOfBlocksError):
            logits(model, ids[:, 10:], cache, attention_mask=mask)
        assert columns(cache) == [10]


@combined(is_reordered=[False, True], step=[9_000, *later(4_000)])
def test_no_room_for_the_second_of_two_groups(
    windowed: Models, prompts: Prompts, is_reordered: bool, step: int
) -> None:
    """Each group has room alone, and both together have not: what the first one has begun is taken back."""
    model, ids = windowed([FULL, SLIDING, FULL, SLIDING], window=64), prompts(56, 56)["input_ids"]
    refused = 0
    for memory in range(20_000, 120_000, step):
        try:
            cache = PagedCache(model.config, block_size=16, memory=memory)
            logits(model, ids[:, :16], cache)
        except OutOfBlocksError:
            continue
        for length in range(16, 56):
            if is_reordered:
                cache.reorder_cache(torch.tensor([1, 0]))
            try:
                logits(model, ids[:, length : length + 1], cache)
            except OutOfBlocksError:
                refused += 1
                assert columns(cache) == [length, length]
                break
    assert refused > 5


def test_a_pool_that_grows_while_another_fork_is_read(
    llama: Models, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = llama("sdpa"), prompts(41, seed=1)["input_ids"]
    cache = PagedCache(model.config, block_size=16)
    logits(model, ids[:, :40], cache)
    one, other = cache.fork(), cache.fork()
    find, waiting = StepMetadata.column_index, [other]

    def interrupted(self: StepMetadata, *arguments: Any) -> Any:
        index = find(self, *arguments)
        if waiting:
            thread = Thread(target=logits, args=(model, prompts(200)["input_ids"], waiting.pop()))
            thread.start()
            thread.join()
        return index

    monkeypatch.setattr(StepMetadata, "column_index", interrupted)
    actual = logits(model, ids[:, 40:], one)
    assert not waiting
    expected = logits(model, ids, None, use_cache=False)[:, 40:]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_recurrent_states_that_are_ahead_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another fork took the last block after the room for this pass was checked."""
    family = family_called("Jamba")
    model, prompt = family.build("hf_paged"), inputs(family, [16])
    cache = PagedCache(model.config, block_size=16, num_blocks=2)
    prefill(model, cache, **inputs(family, [17]))
    one, other = cache.fork(), cache.fork()
    check_room = LayerGroup.check_room

    def overtaken(self: LayerGroup, *arguments: Any, **options: Any) -> None:
        check_room(self, *arguments, **options)
        if self is one._groups[0]:
            logits(model, prompt["input_ids"][:, :1], other)

    monkeypatch.setattr(LayerGroup, "check_room", overtaken)
    with pytest.raises(OutOfBlocksError):
        logits(model, prompt["input_ids"][:, :1], one)
    for _ in range(2):
        with pytest.raises(CacheStateError, match=r"recurrent states .* ahead"):
            logits(model, prompt["input_ids"][:, :1], one)
    monkeypatch.undo()
    for it in (cache, one, other):
        it.reset()
    answer = generate(model, prompt, one, max_new_tokens=5, do_sample=False)
    assert answer.equal(generate(model, prompt, None, max_new_tokens=5, do_sample=False))


def test_an_interrupted_pass_is_not_cropped(windowed: Models, prompts: Prompts) -> None:
    model, ids = windowed([SLIDING, FULL]), prompts(11)["input_ids"]
    cache = PagedCache(model.config, block_size=16)
    logits(model, ids[:, :10], cache)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, ids[:, 10:], cache)
    handle.remove()
    with pytest.raises(CacheStateError, match=r"rollback\(\)"):
        cache.crop(-1)
    cache.rollback()
    cache.crop(-1)
    assert columns(cache) == [9, 9]


def test_rollback_of_a_finished_pass_without_images_does_nothing() -> None:
    family = family_called("Mllama")
    model = family.build("hf_paged")
    cache = PagedCache(model.config)
    ids = torch.arange(20, 32)[None]
    logits(model, ids, cache)
    cache.rollback()
    assert cache.get_seq_length() == 12


def test_a_mask_of_another_batch_in_the_first_pass(llama: Models, prompts: Prompts) -> None:
    model, prompt = llama("sdpa"), prompts(9, 5)
    cache = PagedCache(model.config)
    with pytest.raises(InvalidArgumentError, match="attention_mask has 4 rows, but the batch has 2"):
        logits(model, prompt["input_ids"], cache, attention_mask=prompt["attention_mask"].repeat(2, 1))


def test_rows_of_a_cache_that_was_cropped_to_nothing(llama: Models, prompts: Prompts) -> None:
    cache = PagedCache(llama().config)
    logits(llama(), prompts(5, 5)["input_ids"], cache)
    cache.crop(-5)
    with pytest.raises(InvalidArgumentError, match="expected indices from 0 to 1"):
        cache.reorder_cache(torch.tensor([0, 7]))
    with pytest.raises(InvalidArgumentError, match="a mask of 3 rows for a cache with 2"):
        cache.batch_select_indices(torch.tensor([True, False, True]))


def test_an_error_survives_pickling() -> None:
    error = OutOfBlocksError(needed=2, free=1, total=3, block_bytes=8, limit="num_blocks=3 allows no more")
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.needed, copied.total) == (str(error), 2, 3)


class Interrupted(BaseException):
    """Such as Ctrl-C."""


def interrupted_behind(module: torch.nn.Module, run: Callable[[], Any]) -> None:
    """Runs something that stops once a module has run."""

    def stop(*_: Any) -> None:
        raise Interrupted

    hook = module.register_forward_hook(stop)
    try:
        with pytest.raises(Interrupted):
            run()
    finally:
        hook.remove()


def parts_of_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """What changes states, keys and values. Behind the last of them a pass cannot be told from a whole one."""
    names = ("mamba", "self_attn", "linear_attn", "conv")
    layers = model.get_decoder().layers
    parts = [part for layer in layers for name, part in layer.named_children() if name in names]
    return parts[:-1]


@pytest.mark.parametrize("rolls_back", [True, False], ids=["after a rollback", "at once"])
@pytest.mark.parametrize("name", ["Jamba", "Qwen3-Next", "Falcon-H1", "LFM2"])
def test_a_pass_that_stops_at_any_layer_of_a_hybrid_model(name: str, rolls_back: bool) -> None:
    """Recurrent states are not ahead of keys and values, nor behind them, without a word."""
    family = family_called(name)
    model, ids = family.build("hf_paged"), inputs(family, [30])["input_ids"]
    expected = logits(model, ids, None, use_cache=False)
    for part in parts_of_layers(model):
        for num_before in (0, 21):
            cache = PagedCache(model.config, block_size=16)
            if num_before:
                logits(model, ids[:, :num_before], cache)
            interrupted_behind(
                part, lambda cache=cache, start=num_before: logits(model, ids[:, start : start + 1], cache)
            )
            if rolls_back:
                cache.rollback()
            try:
                actual = logits(model, ids[:, num_before:], cache)
            except CacheStateError:
                assert num_before or not rolls_back  # the first pass can be taken back
                cache.reset()
                actual = logits(model, ids, cache)[:, num_before:]
            torch.testing.assert_close(actual, expected[:, num_before:], rtol=1e-3, atol=1e-3)
