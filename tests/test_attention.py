"""The registered attention does what `sdpa` and `eager` do, also where it does not read blocks."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import PagedCache
from tests.compat import CACHE_ARGUMENT


def forward(model, ids: torch.Tensor, cache, **options: object):
    return model(input_ids=ids, **{CACHE_ARGUMENT: cache}, **options)


def test_without_a_cache_it_is_sdpa(llama, prompts) -> None:
    ids = prompts(20)["input_ids"]
    with torch.no_grad():
        ours, theirs = (forward(llama(name), ids, None, use_cache=False).logits for name in ("hf_paged", "sdpa"))
    torch.testing.assert_close(ours, theirs)


def test_a_custom_four_dimensional_mask(llama, prompts) -> None:
    ids = prompts(20)["input_ids"]
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    mask[..., 3:9, 0] = False
    with torch.no_grad():
        ours = forward(llama(), ids, PagedCache(llama().config), attention_mask=mask).logits
        theirs = forward(llama("sdpa"), ids, DynamicCache(config=llama().config), attention_mask=mask).logits
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("num_cached", [0, 7])
def test_gradients_of_the_new_tokens(llama, prompts, num_cached: int) -> None:
    """Cached tokens are constants, so their part of the pass is done without a graph for both caches."""
    ids = prompts(20)["input_ids"]
    gradients = []
    for attention, make in (("hf_paged", PagedCache), ("sdpa", lambda config: DynamicCache(config=config))):
        model = llama(attention)
        model.zero_grad()
        cache = make(model.config)
        if num_cached:
            with torch.no_grad():
                forward(model, ids[:, :num_cached], cache)
        forward(model, ids[:, num_cached:], cache).logits.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_logits_stay_within_a_bound(llama, prompts, dtype: torch.dtype) -> None:
    ids = prompts(40)["input_ids"]
    logits = []
    for attention, make in (("hf_paged", PagedCache), ("sdpa", lambda config: DynamicCache(config=config))):
        model = llama(attention)
        model = type(model)(model.config).to(dtype).eval()
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        cache = make(model.config)
        with torch.no_grad():
            steps = [forward(model, ids[:, :30], cache).logits]
            steps += [forward(model, ids[:, i : i + 1], cache).logits for i in range(30, 40)]
        logits.append(torch.cat(steps, dim=1).float())
    ours, theirs = logits
    assert (ours - theirs).abs().max() <= 0.05 * theirs.abs().max()


def test_training_with_dropout_does_not_read_blocks(llama, prompts) -> None:
    model = llama()
    model.config.attention_dropout = 0.5
    try:
        model.train()
        assert forward(model, prompts(20)["input_ids"], PagedCache(model.config)).logits.isfinite().all()
    finally:
        model.eval()
        model.config.attention_dropout = 0.0
