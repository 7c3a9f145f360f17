"""`torch.compile(model.forward)` with a `PagedCache`: the right tokens, and no compilation after the first steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_paged_cache import PagedCache
from hf_paged_cache.hf.attention import paged_attention_forward
from hf_paged_cache.hf.masks import paged_mask
from tests.support.compat import generate

FULL, SLIDING = "full_attention", "sliding_attention"
STEPS = 12


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def greedy(model: PreTrainedModel, prompt: dict[str, Tensor], cache: Cache) -> Tensor:
    options = {"max_new_tokens": STEPS, "do_sample": False}
    return generate(model, prompt, cache, **options)[:, prompt["input_ids"].shape[1] :]


class Compiled:
    """A model whose `forward` is compiled; `num_frames` has what was compiled by the end of each pass."""

    def __init__(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_frames: list[int] = []
        forward = torch.compile(model.forward, backend="eager")

        def counted(*args: object, **kwargs: object) -> object:
            out = forward(*args, **kwargs)
            self.num_frames.append(counters["frames"]["total"])
            return out

        monkeypatch.setattr(model, "forward", counted)


@pytest.mark.parametrize(
    "function", [PagedCache.update, PagedCache.get_mask_sizes, paged_mask, paged_attention_forward]
)
def test_what_reads_block_tables_is_not_traced(function: Callable) -> None:
    def call() -> object:
        return function()

    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs outside compiled graphs"):
        torch.compile(call, backend="eager", fullgraph=True)()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["hf_paged", "sdpa"])
@pytest.mark.parametrize("kv", ["raw", "int4"])
def test_steps_after_the_first_ones_compile_nothing(
    llama: Callable, prompts: Callable, monkeypatch: pytest.MonkeyPatch, attention: str, kv: str
) -> None:
    model, prompt = llama(attention), prompts(9, 30)
    cache = PagedCache(model.config, block_size=16, kv=kv)
    expected = greedy(model, prompt, PagedCache(model.config, block_size=16, kv=kv))
    if kv == "raw":
        assert expected.equal(greedy(llama("eager"), prompt, DynamicCache(config=model.config)))
    compiled = Compiled(model, monkeypatch)
    assert greedy(model, prompt, cache).equal(expected)
    assert len(compiled.num_frames) == STEPS
    assert compiled.num_frames[2:] == compiled.num_frames[2:3] * (STEPS - 2)
    assert sum(counters["graph_break"].values()) < 40
    assert cache.groups[0].table.padding.tolist() == [21, 0]  # the cache has seen the mask


@pytest.mark.slow
def test_windows_and_a_second_prompt(windowed: Callable, prompts: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [SLIDING, FULL]
    model, oracle = windowed(layers), windowed(layers, "eager")
    compiled = Compiled(model, monkeypatch)
    for lengths in ((20, 33), (7, 40), (26, 26)):
        prompt = prompts(*lengths)
        expected = greedy(oracle, prompt, DynamicCache(config=oracle.config))
        assert greedy(model, prompt, PagedCache(model.config, block_size=16)).equal(expected)
    # Later prompts differ in length only, which their first steps have made dynamic.
    assert compiled.num_frames[2 * STEPS :] == compiled.num_frames[-1:] * STEPS
