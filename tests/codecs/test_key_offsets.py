"""Keys with a large bias in a few channels, as Qwen2's, in caches of 8-bit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.quality.key_bias import KeyBias, add_key_bias, divergence, key_bias, tiny_model
from hf_paged_cache import BlockStore, KVQuant, PagedCache
from tests.support.compat import CACHE_ARGUMENT, generate

BLOCK = 16
kinds = pytest.mark.parametrize("kv", ["int8", "fp8"])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(8, 128, (1, count), generator=torch.Generator().manual_seed(seed))


def new_cache(model: PreTrainedModel, kv: str | KVQuant) -> PagedCache:
    return PagedCache(model.config, block_size=BLOCK, kv=kv)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, cache: PagedCache) -> Tensor:
    return model(ids, **{CACHE_ARGUMENT: cache}).logits


def blocks_of(cache: PagedCache) -> list[Tensor]:
    """All planes of the first row's blocks, in every layer, as bytes."""
    found = []
    for layer in cache.layers:
        ids = torch.from_numpy(layer.group.table.block_ids[0]).long()
        found += [plane[:, ids].view(torch.uint8) for plane in layer.group.pool.layers[layer.layer_idx].planes]
    return found


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    for plane, expected in zip(one, other, strict=True):
        assert torch.equal(plane, expected)


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize(("kv", "most"), [("int8", 0.02), ("fp8", 0.1)])
def test_a_key_bias_hardly_changes_what_codes_predict(
    model: PreTrainedModel, kv: str, most: float, backend: str | None
) -> None:
    assert divergence(model, kv, backend) < most
    assert divergence(model, KVQuant(kv, key_offset=False), backend) > 0.3


@kinds
def test_codes_and_offsets_do_not_depend_on_the_pieces_of_the_prompt(model: PreTrainedModel, kv: str) -> None:
    """In the first layer, whose keys do not depend on what is read."""
    ids = tokens(64)
    found = []
    for pieces in ([64], [30, 2, 1, 31], [1] * 64):
        cache = new_cache(model, kv)
        for piece in ids.split(pieces, dim=1):
            logits(model, piece, cache)
        found.append(blocks_of(cache)[:5])
    assert bool(found[0][4].any())
    for other in found[1:]:
        assert_same(other, found[0])


@kinds
@pytest.mark.parametrize("kept", [48, 41, 64])
def test_a_row_that_was_cropped_goes_on_as_if_it_had_never_been_longer(
    model: PreTrainedModel, kv: str, kept: int
) -> None:
    """To the middle of a block, whose offset stays, and to the begin of one, which gets another."""
    ids, others = tokens(70), tokens(30, seed=1)
    cropped, fresh = new_cache(model, kv), new_cache(model, kv)
    logits(model, ids[:, :kept], cropped)
    logits(model, ids[:, kept:], cropped)
    cropped.crop(kept - 70)
    logits(model, ids[:, :kept], fresh)
    for cache in (cropped, fresh):
        logits(model, others, cache)
    torch.testing.assert_close(logits(model, others, cropped), logits(model, others, fresh), rtol=0, atol=1e-4)


@kinds
def test_forks_that_part_inside_a_block_take_its_offset_along(model: PreTrainedModel, kv: str) -> None:
    ids, others = tokens(70), tokens(30, seed=1)
    cache, alone = new_cache(model, kv), new_cache(model, kv)
    logits(model, ids, cache)
    fork = cache.fork(1)
    logits(model, tokens(5, seed=2), cache)
    logits(model, ids, alone)
    logits(model, tokens(5, seed=2), alone)
    assert cache.stats().copies > 0
    assert torch.equal(logits(model, others, cache), logits(model, others, alone))
    again = new_cache(model, kv)
    logits(model, ids, again)
    assert torch.equal(logits(model, others, fork), logits(model, others, again))


@kinds
def test_a_store_keeps_offsets_in_its_file(model: PreTrainedModel, kv: str, tmp_path: Path) -> None:
    """Of blocks that are partly filled too: one offset serves all tokens of a block, whoever comes later."""
    store = BlockStore(model, memory="4MiB", kv=kv, block_size=BLOCK)
    prompt = {"input_ids": tokens(70), "attention_mask": torch.ones(1, 70, dtype=torch.long)}
    cache = store.cache_for(**prompt)
    output = generate(model, prompt, cache, max_new_tokens=4, do_sample=False)
    store.commit(cache, output)
    store.save(tmp_path / "store")
    loaded = BlockStore.load(tmp_path / "store", model, memory="4MiB")
    longer = torch.cat([output[:, :73], tokens(9, seed=3)], dim=1)
    asked = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    caches = [each.cache_for(**asked) for each in (store, loaded)]
    assert [each.get_seq_length() for each in caches] == [73, 73]
    assert torch.equal(*(logits(model, longer[:, 73:], each) for each in caches))


def test_a_bias_is_put_into_every_layer_of_a_model() -> None:
    biased = tiny_model()
    before = biased.model.layers[1].self_attn.k_proj.bias.detach().clone()
    add_key_bias(biased, key_bias("50:0,2:0.5"))
    added = (biased.model.layers[1].self_attn.k_proj.bias - before).view(2, 2, 4)
    lengths = added.norm(dim=1)
    torch.testing.assert_close(lengths, torch.tensor([[50.0, 0, 50, 0]] * 2))
    with pytest.raises(ValueError, match="not among the 4 of a head_dim of 8"):
        add_key_bias(biased, KeyBias(1.0, (4,)))
