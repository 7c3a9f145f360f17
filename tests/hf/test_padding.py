"""Batches of unequal rows: a row gives what it gives alone, and takes the memory that it takes alone.

Whatever else is in the batch, in the mask or in the pool has no influence on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_paged_kernels import KVBlocks
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import InvalidArgumentError, PagedCache
from hf_paged_cache.codecs import RawCodec
from tests.support.combinations import combined, later
from tests.support.compat import CACHE_ARGUMENT, generate

Models = Callable[..., PreTrainedModel]
Prompts = Callable[..., dict[str, Tensor]]

SLIDING, FULL = "sliding_attention", "full_attention"
BLOCK = 16


ATTENTION_NAMES = ["eager", "hf_paged", *later("sdpa")]
ATTENTIONS = combined(attention=ATTENTION_NAMES)
STACKS = {"-".join(types): types for types in ([FULL, FULL], [SLIDING, FULL])}


def new_cache(model: PreTrainedModel) -> PagedCache:
    return PagedCache(model.config, block_size=BLOCK)


def answer(model: PreTrainedModel, inputs: dict[str, Tensor], cache: Any, length: int = 20, **options: Any) -> Tensor:
    """The new tokens, `[batch, length]`."""
    sequences = generate(model, inputs, cache, max_new_tokens=length, do_sample=False, **options)
    return sequences[:, -length:]


def row_alone(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """The tokens of one row, without anything that is masked."""
    real = inputs["attention_mask"][row].bool()
    return {"input_ids": inputs["input_ids"][row, real][None]}


def answers_alone(model: PreTrainedModel, inputs: dict[str, Tensor], length: int = 20) -> Tensor:
    """The new tokens of each row run alone with transformers' own cache."""
    return torch.cat([answer(model, row_alone(inputs, row), None, length) for row in range(len(inputs["input_ids"]))])


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, cache: DynamicCache, **inputs: Tensor) -> Tensor:
    return model(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **inputs).logits


# Left padding


@combined(layer_types=STACKS, attention=ATTENTION_NAMES, chunk=[None, BLOCK + 1, *later(BLOCK - 1, 1)])
def test_a_row_answers_as_it_does_alone(
    windowed: Models, prompts: Prompts, layer_types: list[str], attention: str, chunk: int | None
) -> None:
    model = windowed(layer_types, attention)
    inputs = prompts(1, BLOCK - 1, BLOCK, 3 * BLOCK + 1)
    cache = new_cache(model)
    assert answer(model, inputs, cache, 2 * BLOCK, prefill_chunk_size=chunk).equal(
        answers_alone(model, inputs, 2 * BLOCK)
    )


@combined(quick=1, layer_types=STACKS, lengths=[(1, 15, 16, 49), *later((40, 40), (3, 100))], chunk=[None, 7])
def test_a_padded_batch_takes_the_blocks_of_its_rows(
    windowed: Models, prompts: Prompts, layer_types: list[str], lengths: tuple[int, ...], chunk: int | None
) -> None:
    model = windowed(layer_types)
    inputs = prompts(*lengths)
    cache = new_cache(model)
    answer(model, inputs, cache, prefill_chunk_size=chunk)
    alone = 0
    for row in range(len(lengths)):
        cache_of_row = new_cache(model)
        answer(model, row_alone(inputs, row), cache_of_row)
        alone += cache_of_row.stats().blocks_used
    assert cache.stats().blocks_used == alone


@combined(layer_types=STACKS, attention=ATTENTION_NAMES)
def test_a_chunk_may_be_all_padding_for_a_row(
    windowed: Models, prompts: Prompts, layer_types: list[str], attention: str
) -> None:
    model = windowed(layer_types, attention)
    inputs = prompts(3, 40)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = new_cache(model)
    pieces = [
        logits(
            model, ids[:, start : start + 8], mask[:, : start + 8], cache, position_ids=positions[:, start : start + 8]
        )
        for start in range(0, 40, 8)
    ]
    expected = model(row_alone(inputs, 0)["input_ids"], use_cache=False).logits
    torch.testing.assert_close(torch.cat(pieces, dim=1)[:1, -3:], expected, rtol=1e-3, atol=1e-3)


@ATTENTIONS
@pytest.mark.parametrize("padding", [1, BLOCK, 40])
def test_padding_changes_neither_the_answer_nor_the_blocks(
    llama: Models, prompts: Prompts, attention: str, padding: int
) -> None:
    model = llama(attention)
    ids = prompts(20)["input_ids"]
    padded = {
        "input_ids": torch.cat([ids.new_zeros(1, padding), ids], dim=1),
        "attention_mask": torch.cat([ids.new_zeros(1, padding), torch.ones_like(ids)], dim=1),
    }
    plain, cache = new_cache(model), new_cache(model)
    assert answer(model, padded, cache).equal(answer(model, {"input_ids": ids}, plain))
    assert cache.stats().blocks_used == plain.stats().blocks_used
    assert cache.get_seq_length() == plain.get_seq_length() + padding


@ATTENTIONS
def test_companions_have_no_influence(llama: Models, prompts: Prompts, attention: str) -> None:
    model = llama(attention)
    prompt = prompts(20)["input_ids"][0]
    for companions in [(), (3,), (60,), (20, 1, 33)]:
        inputs = prompts(20, *companions, seed=1)
        inputs["input_ids"][0, -20:] = prompt
        assert answer(model, inputs, new_cache(model))[:1].equal(answer(model, {"input_ids": prompt[None]}, None))


@combined(layer_types=STACKS, attention=ATTENTION_NAMES)
def test_positions_that_ignore_the_padding_give_what_the_library_gives(
    windowed: Models, prompts: Prompts, layer_types: list[str], attention: str
) -> None:
    model = windowed(layer_types, attention)
    inputs = prompts(5, 30)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    ours, theirs = new_cache(model), DynamicCache(config=model.config)
    actual, expected = logits(model, ids, mask, ours), logits(model, ids, mask, theirs)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=1e-3, atol=1e-3)


# Other masks


def with_holes(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Ids and mask of two turns that are both padded on the left: 0 0 1 1 0 0 1 1 1."""
    first, second = prompts(3, 20), prompts(25, 4, seed=1)
    return (
        torch.cat([first["input_ids"], second["input_ids"]], dim=1),
        torch.cat([first["attention_mask"], second["attention_mask"]], dim=1),
    )


def right_padded(prompts: Prompts) -> tuple[Tensor, Tensor]:
    inputs = prompts(7, 30)
    return inputs["input_ids"].flip(1), inputs["attention_mask"].flip(1)


def scattered(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Every third column of the first row is masked, and the tail of the second."""
    ids = prompts(40, 40)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, ::3] = 0
    mask[1, -5:] = 0
    return ids, mask


MASKS = {make.__name__: make for make in (right_padded, with_holes, scattered)}


@combined(layer_types=STACKS, attention=ATTENTION_NAMES, make=MASKS, chunk={"one shot": 100, "chunks of 9": 9})
def test_any_mask_gives_what_the_library_gives(
    windowed: Models,
    prompts: Prompts,
    layer_types: list[str],
    attention: str,
    make: Callable[[Prompts], tuple[Tensor, Tensor]],
    chunk: int,
) -> None:
    model = windowed(layer_types, attention)
    ids, mask = make(prompts)
    length = ids.shape[1]
    ids = torch.cat([ids, prompts(12, 12, seed=2)["input_ids"]], dim=1)
    mask = torch.cat([mask, mask.new_ones(2, 12)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    pieces = [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]
    pieces += [slice(step, step + 1) for step in range(length, length + 12)]

    def run(cache: DynamicCache) -> Tensor:
        return torch.cat(
            [logits(model, ids[:, it], mask[:, : it.stop], cache, position_ids=positions[:, it]) for it in pieces],
            dim=1,
        )

    actual, expected = run(new_cache(model)), run(DynamicCache(config=model.config))
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=1e-3, atol=1e-3)
    assert not actual.isnan().any()


@ATTENTIONS
def test_a_second_turn_may_be_padded_too(llama: Models, prompts: Prompts, attention: str) -> None:
    model = llama(attention)
    first, second = prompts(3, 20), prompts(9, 4, seed=1)
    cache = new_cache(model)
    reply = answer(model, first, cache, length=10)
    inputs = {
        "input_ids": torch.cat([first["input_ids"], reply, second["input_ids"]], dim=1),
        "attention_mask": torch.cat([first["attention_mask"], torch.ones_like(reply), second["attention_mask"]], dim=1),
    }
    assert answer(model, inputs, cache).equal(answers_alone(model, inputs))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
def test_a_mask_of_any_dtype(llama: Models, prompts: Prompts, dtype: torch.dtype) -> None:
    model = llama()
    inputs = prompts(5, 30)
    expected = answers_alone(model, inputs)
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    assert answer(model, inputs, new_cache(model)).equal(expected)


@ATTENTIONS
def test_a_mask_may_be_longer_than_the_sequence(llama: Models, prompts: Prompts, attention: str) -> None:
    model = llama(attention)
    inputs = prompts(5, 30)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cache, exact = new_cache(model), new_cache(model)
    longer = torch.cat([mask, mask.new_zeros(2, 34)], dim=1)
    actual, expected = logits(model, ids, longer, cache), logits(model, ids, mask, exact)
    torch.testing.assert_close(actual, expected)
    longer[:, 30] = 1
    step = prompts(1, 1, seed=1)["input_ids"]
    actual, expected = logits(model, step, longer, cache), logits(model, step, longer[:, :31], exact)
    torch.testing.assert_close(actual, expected)


@ATTENTIONS
def test_a_row_that_is_all_padding_disturbs_nobody(llama: Models, prompts: Prompts, attention: str) -> None:
    model = llama(attention)
    inputs = prompts(20, 20)
    inputs["attention_mask"][1] = 0
    cache = new_cache(model)
    output = generate(
        model, inputs, cache, max_new_tokens=20, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    assert torch.stack(output.logits).isfinite().all()
    assert output.sequences[:1, -20:].equal(answer(model, row_alone(inputs, 0), None))
    assert cache.stats().blocks_used == 3 + 2  # 39 tokens, and the 19 that were generated for the empty row


# Masks that contradict the cache


@pytest.mark.parametrize("attention", ["eager", "hf_paged"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mask: mask[:, 1:], "covers 29 columns, but the cache holds 29 and 1 are new: expected 30"),
        (lambda mask: mask[:, -1:], "covers 1 columns, but the cache holds 29 and 1 are new: expected 30"),
        (lambda mask: mask[:1], "has 1 row, but the cache holds 2 rows"),
        (lambda mask: None, "25 of its 29 columns are padding. Pass the mask of all 30 columns"),
        (torch.ones_like, "shows 25 columns that were padding when the cache was filled"),
    ],
    ids=["too short", "of the new token only", "of another batch", "left out", "shows padding"],
)
def test_a_mask_that_contradicts_the_cache_is_refused(
    llama: Models, prompts: Prompts, attention: str, change: Callable[[Tensor], Tensor | None], message: str
) -> None:
    model = llama(attention)
    inputs = prompts(5, 30)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = new_cache(model)
    logits(model, ids[:, :29], mask[:, :29], cache, position_ids=positions[:, :29])
    before = cache.stats()
    with pytest.raises(InvalidArgumentError, match=message):
        logits(model, ids[:, 29:], change(mask), cache)
    assert cache.stats() == before
    step = logits(model, ids[:, 29:], mask, cache, position_ids=positions[:, 29:])
    assert step[:, -1].argmax(-1).equal(answers_alone(model, inputs, length=1)[:, 0])


def test_generate_passes_the_refusal_on_and_goes_on_with_the_right_mask(llama: Models, prompts: Prompts) -> None:
    model = llama()
    inputs = prompts(5, 30)
    cache = new_cache(model)
    reply = answer(model, inputs, cache, length=10)
    longer = {"input_ids": torch.cat([inputs["input_ids"], reply], dim=1)}
    with pytest.raises(InvalidArgumentError, match="covers 30 columns, but the cache holds 39"):
        answer(model, {**longer, "attention_mask": inputs["attention_mask"]}, cache)
    longer["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones_like(reply)], dim=1)
    assert answer(model, longer, cache).equal(answers_alone(model, longer))


# Whatever else is in the pool


@combined(poison=[math.nan, 1e30, *later(1e4)], layer_types=STACKS, attention=ATTENTION_NAMES)
def test_memory_that_was_not_written_does_not_change_a_bit(
    windowed: Models,
    prompts: Prompts,
    monkeypatch: pytest.MonkeyPatch,
    layer_types: list[str],
    attention: str,
    poison: float,
) -> None:
    model = windowed(layer_types, attention)
    ids, mask = with_holes(prompts)
    allocate = RawCodec.allocate

    def run(fill: float) -> Tensor:
        def allocate_filled(*arguments: Any) -> KVBlocks:
            blocks = allocate(*arguments)
            for plane in blocks.planes:
                plane.fill_(fill)
            return blocks

        monkeypatch.setattr(RawCodec, "allocate", allocate_filled)
        output = generate(
            model,
            {"input_ids": ids, "attention_mask": mask},
            new_cache(model),
            max_new_tokens=20,
            do_sample=False,
            prefill_chunk_size=11,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return torch.stack(output.logits)

    assert run(poison).equal(run(0.0))


@combined(quick=1, layer_types=STACKS, block_size=[16, 64, 256, *later(32, 128)])
def test_the_block_size_has_no_influence(
    windowed: Models, prompts: Prompts, layer_types: list[str], block_size: int
) -> None:
    model = windowed(layer_types)
    inputs = prompts(3, 40)
    assert answer(model, inputs, PagedCache(model.config, block_size=block_size)).equal(answers_alone(model, inputs))


@combined(quick=1, layer_types=STACKS, attention=ATTENTION_NAMES)
def test_the_order_of_blocks_has_no_influence(
    windowed: Models, prompts: Prompts, layer_types: list[str], attention: str
) -> None:
    model = windowed(layer_types, attention)
    cache = PagedCache(model.config, block_size=16, num_blocks=30)
    used = cache.fork()
    answer(model, prompts(60, 33, 47), used)
    used.reorder_cache(torch.tensor([2, 0]))
    inputs = prompts(3, 40, 21)
    assert answer(model, inputs, cache, length=40).equal(answers_alone(model, inputs, length=40))


@pytest.mark.parametrize("attention", ["eager", "hf_paged"])
def test_a_grown_pool_holds_what_it_held(llama: Models, prompts: Prompts, attention: str) -> None:
    model = llama(attention)
    inputs = prompts(3, 40)
    cache = new_cache(model)
    assert answer(model, inputs, cache, length=100).equal(answers_alone(model, inputs, length=100))
    assert cache.stats().blocks_total >= 9 + 7
