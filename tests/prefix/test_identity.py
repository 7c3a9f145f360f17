"""What changes the identity of a model, and what does not."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hf_paged_cache.codecs import KVQuant
from hf_paged_cache.errors import InvalidArgumentError, UnsupportedError
from hf_paged_cache.prefix.identity import Identity, Namespace, codec_text
from hf_paged_cache.prefix.model_identity import ModelIdentity

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def tiny_llama(num_layers: int = 2, seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=num_layers, **settings)).eval()


def identity_of(model: nn.Module, kv: str | KVQuant = "raw", block_size: int = 16) -> Identity:
    return ModelIdentity(model, kv, block_size).current()


class FakeAdapter(nn.Module):
    """What PEFT's layers show of themselves."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.active = ["french"]
        self.disabled = False
        self.merged_adapters: list[str] = []
        self.scaling = {"french": 1.0, "german": 1.0}

    active_adapters = property(lambda self: self.active)
    disable_adapters = property(lambda self: self.disabled)
    merged = property(lambda self: bool(self.merged_adapters))


def adapted_llama() -> tuple[LlamaForCausalLM, FakeAdapter]:
    model = tiny_llama()
    attention = model.model.layers[0].self_attn
    attention.q_proj = FakeAdapter(attention.q_proj)
    return model, attention.q_proj


def test_equal_models_have_equal_identities() -> None:
    model = tiny_llama()
    watched = ModelIdentity(model, "raw", 16)

    assert watched.current() == watched.current() == identity_of(tiny_llama())
    assert hash(watched.current()) == hash(identity_of(tiny_llama()))
    assert watched.current() != identity_of(tiny_llama(seed=1))


def test_a_loaded_model_is_the_one_that_was_saved(tmp_path: Any) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)

    assert identity_of(model).differences(identity_of(loaded)) == []


def add_to_a_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1


def swap_two_embeddings(model: nn.Module) -> None:
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings[[4, 7]] = embeddings[[7, 4]]


def make_a_step(model: nn.Module, **options: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()


def make_a_fused_step(model: nn.Module) -> None:
    """Fused optimizers do not count versions."""
    make_a_step(model, fused=True)


def load_other_weights(model: nn.Module) -> None:
    model.load_state_dict(tiny_llama(seed=1).state_dict())


def assign_other_weights(model: nn.Module) -> None:
    model.load_state_dict(tiny_llama(seed=1).state_dict(), assign=True)


def replace_a_weight(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1)


def turn_the_frequencies(model: nn.Module) -> None:
    """A buffer that is not saved."""
    model.model.rotary_emb.inv_freq.mul_(2)


@pytest.mark.parametrize(
    "change",
    [
        add_to_a_weight,
        swap_two_embeddings,
        make_a_step,
        make_a_fused_step,
        load_other_weights,
        assign_other_weights,
        replace_a_weight,
        turn_the_frequencies,
    ],
)
def test_other_weights_are_noticed(change: Callable[[nn.Module], None]) -> None:
    model = tiny_llama()
    watched = ModelIdentity(model, "raw", 16)
    before = watched.current()
    change(model)

    assert [text.split(":")[0] for text in before.differences(watched.current())] == ["weights"]
    assert watched.current() == identity_of(model)  # what was read once is as good as what is read anew


def test_weights_that_come_back_are_the_same() -> None:
    model = tiny_llama()
    watched = ModelIdentity(model, "raw", 16)
    before, weights = watched.current(), {name: weight.clone() for name, weight in model.state_dict().items()}
    add_to_a_weight(model)
    assert watched.current() != before
    model.load_state_dict(weights)

    assert watched.current() == before


def test_another_dtype_is_another_identity() -> None:
    model = tiny_llama()
    watched = ModelIdentity(model, "raw", 16)
    before = watched.current()
    model.to(torch.bfloat16)

    assert "dtype: torch.float32 here, torch.bfloat16 in the file" in before.differences(watched.current())


def test_what_is_written_through_data_is_noticed_after_invalidate() -> None:
    model = tiny_llama()
    watched = ModelIdentity(model, "raw", 16)
    before = watched.current()
    model.lm_head.weight.data.view(-1).numpy()[0] = 7
    assert watched.current() == before
    watched.invalidate()

    assert watched.current().weights != before.weights
    assert watched.current().generation == 1


def test_invalidate_ends_an_identity_though_nothing_is_seen_to_change() -> None:
    watched = ModelIdentity(tiny_llama(), "raw", 16)
    before = watched.current()
    watched.invalidate()

    assert before.differences(watched.current(), "now") == ["generation: 0 here, 1 now"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5)], ids=str)
def test_weights_of_any_dtype_and_shape_are_read(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model = tiny_llama()
    model.register_buffer("extra", torch.zeros(shape).to(dtype))
    watched = ModelIdentity(model, "raw", 16)
    before = watched.current()
    model.extra.view(-1)[-1:].fill_(1)

    assert watched.current() != before


def test_the_order_of_a_weight_in_memory_does_not_matter() -> None:
    model, other = tiny_llama(), tiny_llama()
    other.lm_head.weight.data = other.lm_head.weight.data.t().contiguous().t()

    assert identity_of(model) == identity_of(other)


def test_offloaded_weights_are_refused() -> None:
    model = tiny_llama()
    model.lm_head.to("meta")

    with pytest.raises(UnsupportedError, match=r"lm_head\.weight, a Parameter on device meta, cannot be read"):
        identity_of(model)


@pytest.mark.parametrize(
    ("name", "value", "difference"),
    [
        (
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 5e5},
            "config.rope_parameters.rope_theta: 10000.0 here, 500000.0 in the file",
        ),
        ("sliding_window", 8, "config.sliding_window: 16 here, 8 in the file"),
        ("_attn_implementation", "eager", "implementations.attention: sdpa here, eager in the file"),
    ],
)
def test_another_config_is_another_identity(name: str, value: Any, difference: str) -> None:
    model = MistralForCausalLM(MistralConfig(**SIZES, num_hidden_layers=1, sliding_window=16)).eval()
    watched = ModelIdentity(model, "raw", 16)
    before = watched.current()
    setattr(model.config, name, value)

    assert before.differences(watched.current()) == [difference]


def test_a_change_inside_the_rope_settings_is_noticed() -> None:
    model = tiny_llama()
    watched = ModelIdentity(model, "raw", 16)
    before = watched.current()
    model.config.rope_parameters["rope_theta"] = 5e5

    assert watched.current() != before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_cache", False),
        ("_name_or_path", "elsewhere/model"),
        ("architectures", ["LlamaForCausalLM"]),
        ("dtype", torch.float32),
        ("eos_token_id", [3, 4]),
        ("id2label", {0: "good", 1: "bad"}),
        ("num_beams", 4),
    ],
)
def test_what_no_key_or_value_depends_on_is_left_out(name: str, value: Any) -> None:
    model = tiny_llama()
    watched = ModelIdentity(model, "raw", 16)
    before = watched.current()
    setattr(model.config, name, value)
    model.generation_config.temperature = 0.5

    assert watched.current() == before


def test_training_mode_is_another_identity() -> None:
    model = tiny_llama()
    watched = ModelIdentity(model, "raw", 16)
    before = watched.current()
    model.model.layers[1].train()

    assert before.differences(watched.current()) == ["training: False here, True in the file"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("active", ["german"]),
        ("active", ["french", "german"]),
        ("disabled", True),
        ("merged_adapters", ["french"]),
        ("scaling", {"french": 0.5, "german": 1.0}),
    ],
)
def test_other_adapters_are_another_identity(name: str, value: Any) -> None:
    model, adapter = adapted_llama()
    watched = ModelIdentity(model, "raw", 16)
    before = watched.current()
    setattr(adapter, name, value)

    assert before != watched.current()
    assert all(text.startswith("adapters.model.layers.0") for text in before.differences(watched.current()))


def test_codec_and_block_size_are_part_of_the_identity() -> None:
    model = tiny_llama()
    identity = identity_of(model, KVQuant("int4", layers={0: "int8"}))

    assert identity.differences(identity_of(model, KVQuant("int4", exact_sinks=128, layers={0: "int8"}), 32)) == [
        "codec.exact_sinks: 64 here, 128 in the file",
        "block_size: 16 here, 32 in the file",
    ]


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ("int4", KVQuant("int4"), True),
        ("int4", KVQuant("int4", exact_sinks=64, layers={"sliding": "raw"}), True),
        ("int8", KVQuant("int8"), True),
        ("int8", "fp8", False),
        ("raw", "int8", False),
        ("int4", KVQuant("int4", layers={"sliding": "int8"}), False),
        ("int4", KVQuant("int4", layers={1: KVQuant("int4", value_bits=8)}), False),
    ],
)
def test_a_codec_is_described_by_its_details(one: str, other: str | KVQuant, are_equal: bool) -> None:
    assert (codec_text(one) == codec_text(other)) is are_equal


def test_an_identity_survives_json() -> None:
    identity = identity_of(adapted_llama()[0], KVQuant("k4v2", layers={1: "raw"}))
    text = identity.to_json()

    assert Identity.from_json(text) == identity
    assert Identity.from_json(text).to_json() == text


@pytest.mark.parametrize("broken", ["", "[]", "{}", '{"block_size":16}'])
def test_other_text_is_refused(broken: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected what Identity\.to_json wrote, format version 1"):
        Identity.from_json(broken)


@pytest.mark.parametrize(
    "change", [{"format_version": 2}, {"block_size": "16"}, {"training": 0}, {"config": "no json"}]
)
def test_identities_with_other_values_are_refused(change: dict[str, Any]) -> None:
    text = dataclasses.replace(identity_of(tiny_llama()), **change).to_json()

    with pytest.raises(InvalidArgumentError, match="is no identity"):
        Identity.from_json(text)


def test_many_differences_are_counted_and_long_values_shortened() -> None:
    identity = identity_of(tiny_llama())
    changed = dataclasses.replace(identity, config='{"hidden_act":"' + "gelu" * 100 + '"}')
    texts = identity.differences(changed)

    assert len(texts) == 5
    assert texts[-1].startswith("config: ")
    assert texts[-1].endswith(" more differences")
    assert all(len(text) < 200 for text in texts)


def test_namespaces_are_told_apart() -> None:
    identity = identity_of(tiny_llama())
    salts = [None, "a", "ab", ""]

    assert len({Namespace(identity, salt) for salt in salts}) == len(salts)
    assert Namespace(identity) == Namespace(identity, salt=None)


@pytest.mark.parametrize("value", [b"tenant", 7, torch.zeros(2), ("a",)])
def test_salts_are_text(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"salt=.*: expected a str or None"):
        Namespace(identity_of(tiny_llama()), value)


def test_only_models_with_a_config_have_an_identity() -> None:
    with pytest.raises(InvalidArgumentError, match="model is a Linear: expected a transformers model"):
        ModelIdentity(nn.Linear(2, 2), "raw", 16)


def test_a_lookup_is_cheap() -> None:
    model = tiny_llama(num_layers=33)
    assert len(list(model.parameters())) == 300
    watched = ModelIdentity(model, "int4", 16)
    watched.current()
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        watched.current()
        seconds.append(time.perf_counter() - start)

    assert min(seconds) < 0.002


def test_changes_of_many_values_do_not_cancel() -> None:
    """A sign in front of values whose places add up the same on both sides."""
    model = tiny_llama()
    model.extra = nn.Parameter(torch.tensor([1.0, -2.0, -3.0, 4.0]))
    identity = ModelIdentity(model, "raw", 16)
    before = identity.current()
    with torch.no_grad():
        model.extra.neg_()
    assert identity.current() != before
