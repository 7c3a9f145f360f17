"""One of two processes that share a model, under torchrun's environment. Prints what it found as JSON.

`python -m tests.support.tensor_parallel_worker FOLDER ATTENTION`
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from hf_paged_cache import BlockStore, PagedCache
from hf_paged_cache.errors import PagedCacheError
from tests.support.compat import generate

PROMPT_LENGTHS = (9, 30)


def prompt(vocabulary: int) -> dict[str, Tensor]:
    """Two rows, the first one left-padded."""
    ids = torch.randint(8, vocabulary, (2, max(PROMPT_LENGTHS)), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, : -PROMPT_LENGTHS[0]] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def main(folder: str, attention: str) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", attn_implementation=attention)
    inputs = prompt(model.config.vocab_size)
    options = {"max_new_tokens": 8, "do_sample": False}
    caches = {
        "dynamic": DynamicCache(config=model.config),
        **{kv: PagedCache(model.config, block_size=16, kv=kv) for kv in ("raw", "int8", "int4")},
        "beams": PagedCache(model.config, block_size=16),
    }
    found: dict[str, object] = {
        name: generate(model, inputs, cache, **options, num_beams=3 if name == "beams" else 1).tolist()
        for name, cache in caches.items()
    }
    pool = next(iter(caches["raw"].groups[0].pool.layers.values()))
    found["local_kv_heads"] = pool.geometry.num_kv_heads
    try:
        BlockStore(model, memory="1MiB").cache_for(**inputs)
    except PagedCacheError as error:
        found["store"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
