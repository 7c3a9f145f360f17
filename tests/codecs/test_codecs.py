"""What codecs take and refuse: bytes a block, bits an element, the names and details a user may give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import InvalidArgumentError, KVQuant, PagedCache, UnsupportedError
from hf_paged_cache.codecs import CODECS, Geometry, LayerCodecs, make_codec
from tests.support.compat import CACHE_ARGUMENT
from tests.support.families import family_called, inputs

CPU = torch.device("cpu")


@pytest.mark.parametrize("kv", CODECS)
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 80), (192, 128), (40, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_of_a_block_are_those_of_its_planes(
    kv: str, block_size: int, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    codec, geometry = make_codec(kv), Geometry(3, *dims, dtype, dtype, CPU)
    blocks = codec.allocate(geometry, block_size, 5)
    assert sum(plane.nbytes for plane in blocks.planes) == 5 * codec.block_bytes(geometry, block_size)
    assert (blocks.num_kv_heads, blocks.num_blocks, blocks.block_size, blocks.dims) == (3, 5, block_size, dims)


@pytest.mark.parametrize(
    ("kv", "bits"),
    [
        ("raw", 16),
        ("int8", 8.375),
        ("fp8", 8.375),
        (KVQuant("int8", key_offset=False), 8.25),
        ("int4", 4.5),
        ("k8v4", 6.5),
        ("k4v2", 3.75),
        ("kivi2", 3.0),
    ],
)
def test_bits_of_an_element_with_all_metadata(kv: str | KVQuant, bits: float) -> None:
    """Blocks of 64 tokens, a head_dim of 64, a model in 16 bits."""
    geometry = Geometry(2, 64, 64, torch.float16, torch.float16, CPU)
    assert 8 * make_codec(kv).block_bytes(geometry, 64) / (2 * 64 * 2 * 64) == bits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv": "int5"}, r"unknown kv='int5': expected one of 'raw', 'int8', 'fp8', 'int4', .*, or a KVQuant"),
        ({"kv": None}, r"unknown kv=None"),
        ({"kv": 4}, r"unknown kv=4"),
        ({"kv": ["int8"]}, r"unknown kv=\['int8'\]"),
        ({"kv": KVQuant("int4", layers={0: "int5"})}, r"unknown kv='int5'"),
        (
            {"kv": KVQuant("int4", layers={1: KVQuant("kivi2", exact_recent=0)})},
            "exact_recent and exact_sinks have to be the same in all layers",
        ),
    ],
    ids=lambda it: None if isinstance(it, str) else str(it["kv"]),
)
def test_a_cache_refuses_what_it_does_not_know(llama: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        PagedCache(llama().config, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base": "raw"}, r"KVQuant\('raw'\): expected one of 'int8'"),
        ({"base": "int3"}, r"KVQuant\('int3'\)"),
        ({"base": "int8", "exact_recent": 64}, r"has no exact_recent: each token is quantized by itself"),
        ({"base": "int4", "key_offset": False}, r"KVQuant\('int4'\) has no key_offset: .* for each channel already"),
        ({"base": "fp8", "key_bits": 4, "exact_sinks": 0}, r"has no key_bits, exact_sinks"),
        ({"key_bits": 3}, "key_bits=3: expected 2, 4 or 8"),
        ({"value_bits": 16}, "value_bits=16: expected 2, 4 or 8"),
        ({"value_group": 4}, "value_group=4: expected a whole number of at least 8"),
        ({"exact_recent": -1}, "exact_recent=-1: expected a whole number of at least 0"),
        ({"exact_sinks": 1.5}, r"exact_sinks=1\.5: expected a whole number"),
        ({"exact_sinks": True}, "exact_sinks=True: expected a whole number"),
        ({"layers": {-1: "raw"}}, r"layers=\{-1: \.\.\.\}: expected a layer index, or 'sliding'"),
        ({"layers": {"full": "raw"}}, r"layers=\{'full': \.\.\.\}"),
        ({"layers": {0: 8}}, r"layers=\{0: 8\}: expected a name, or a KVQuant"),
    ],
    ids=str,
)
def test_details_without_a_meaning_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        KVQuant(**arguments)


def test_layers_have_the_codecs_they_are_given() -> None:
    codecs = LayerCodecs(KVQuant("int4", layers={0: "raw", 5: "int8"}))
    assert [codecs.of(layer, is_sliding=False).name for layer in (0, 1, 5)] == ["raw", "int4", "int8"]
    assert [codecs.of(layer, is_sliding=True).name for layer in (0, 1, 5)] == ["raw", "raw", "int8"]
    assert LayerCodecs("int8").of(3, is_sliding=True).name == "int8"
    assert LayerCodecs(KVQuant("int4", layers={"sliding": "fp8"})).of(3, is_sliding=True).name == "fp8"


@pytest.mark.parametrize(("kv", "width"), [("kivi2", 6), ("k4v2", 6)])
def test_a_width_that_cannot_be_packed_is_refused_and_says_what_to_do(kv: str, width: int) -> None:
    geometry = Geometry(2, 8, width, torch.float32, torch.float32, CPU)
    with pytest.raises(UnsupportedError, match=f'kv="{kv}" puts 4 channels in a byte, but a value .* has {width} '):
        make_codec(kv).allocate(geometry, 16, 1)


def test_a_model_with_such_a_width_is_refused_in_its_first_pass() -> None:
    family = family_called("Llama")
    config = family.config()
    config.head_dim = 6
    model: PreTrainedModel = family.build_from(config, "hf_paged")
    cache = PagedCache(model.config, kv="kivi2")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match='use kv="int8"'), torch.no_grad():
            model(**inputs(family, (5,)), **{CACHE_ARGUMENT: cache})
        assert cache.get_seq_length() == 0
    with torch.no_grad():
        model(**inputs(family, (5,)), **{CACHE_ARGUMENT: PagedCache(model.config, kv="int8")})
