"""KV heads sharded over two processes: each has a cache for its own, and both give the unsharded model's tokens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from hf_paged_cache import PagedCache
from tests.support.compat import generate
from tests.support.families import randomize
from tests.support.tensor_parallel_worker import prompt

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize("attention", ["hf_paged", "sdpa"])
def test_every_rank_gives_the_tokens_of_the_unsharded_model(tmp_path: Path, attention: str) -> None:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    randomize(model)
    model.eval().save_pretrained(tmp_path)
    inputs, options = prompt(config.vocab_size), {"max_new_tokens": 8, "do_sample": False}
    expected = {
        "dynamic": generate(model, inputs, DynamicCache(config=config), **options),
        "raw": generate(model, inputs, DynamicCache(config=config), **options),
        "beams": generate(model, inputs, DynamicCache(config=config), **options, num_beams=3),
        **{kv: generate(model, inputs, PagedCache(config, block_size=16, kv=kv), **options) for kv in ("int8", "int4")},
    }
    environment = os.environ | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tests.support.tensor_parallel_worker", str(tmp_path), attention]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for process, (output, error) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, error[-3000:]
        found = json.loads(output.splitlines()[-1])
        assert found["local_kv_heads"] == 2
        for name, tokens in expected.items():
            assert found[name] == tokens.tolist(), name
        assert "a DTensor on device cpu, cannot be read" in found["store"]
        assert "without `tp_plan`" in found["store"]
