"""What models pass to their attention: known and honoured, known to change nothing, or refused."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils import TransformersKwargs

from hf_paged_cache import ATTENTION_NAME, UnsupportedError
from hf_paged_cache.hf.attention import paged_attention_forward
from hf_paged_cache.hf.attention_arguments import HONOURED, WITHOUT_EFFECT

MODELS = Path(transformers.__file__).parent / "models"

# Passed by models to flash attention alone: other implementations get `None`, or are not called in that branch.
FOR_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # in an order for pytest-xdist


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    """The calls of an attention interface in a modeling file."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        interfaces = {
            ast.unparse(target)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if "ALL_ATTENTION_FUNCTIONS" in ast.unparse(node.value)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in interfaces:
                yield node


@lru_cache(maxsize=1)
def passed() -> dict[str, set[str]]:
    """The names of arguments that models pass to an attention interface, and the models that do."""
    names: dict[str, set[str]] = defaultdict(set)
    for path in MODELS.glob("*/modeling_*.py"):
        source = path.read_text()
        if "ALL_ATTENTION_FUNCTIONS" in source:
            for call in calls(ast.parse(source)):
                for keyword in call.keywords:
                    if keyword.arg is not None:
                        names[keyword.arg].add(path.parent.name)
    return names


@pytest.mark.slow
def test_every_argument_that_a_model_passes_is_known() -> None:
    assert len(passed()["scaling"]) > 300  # the walk finds the calls
    unknown = {name: models for name, models in passed().items() if name not in HONOURED | WITHOUT_EFFECT.keys()}
    assert unknown.keys() <= {*FOR_FLASH}, unknown


@pytest.mark.slow
def test_every_name_for_sinks_and_selections_is_still_passed() -> None:
    assert passed().keys() >= {"s_aux", "indices", "block_indices", "position_bias", "softcap"}


@lru_cache(maxsize=1)
def eager_functions() -> dict[str, set[str]]:
    """What the eager attention functions of models read of their module, and the models whose functions do."""
    attributes: dict[str, set[str]] = defaultdict(set)
    for path in MODELS.glob("*/modeling_*.py"):
        source = path.read_text()
        if "eager_attention_forward" not in source:
            continue
        for function in ast.parse(source).body:
            if isinstance(function, ast.FunctionDef) and "eager_attention_forward" in function.name:
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "module":
                        attributes[node.attr].add(path.parent.name)
    return attributes


@pytest.mark.slow
def test_eager_attention_reads_nothing_of_a_module_that_hf_paged_is_not_told() -> None:
    # `sinks` come as `s_aux`, `head_dim` gives the scale where none is passed.
    assert eager_functions().keys() == {"training", "num_key_value_groups", "head_dim", "sinks"}
    assert eager_functions()["sinks"] <= passed()["s_aux"]


def test_every_parameter_is_listed_as_honoured() -> None:
    parameters = inspect.signature(paged_attention_forward).parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    assert named - {"module"} | {"output_attentions"} == HONOURED


def test_what_the_library_lets_a_forward_pass_take_is_known() -> None:
    unknown = TransformersKwargs.__annotations__.keys() - HONOURED - WITHOUT_EFFECT.keys()
    assert unknown <= {*FOR_FLASH}


# A call


class Sparse(nn.Module):
    num_key_value_groups = 2


def states(kv_length: int = 9, queries: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, queries, 8, generator=generator)
    key, value = (torch.randn(2, 2, kv_length, 8, generator=generator) for _ in range(2))
    return query, key, value


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: object) -> Tensor:
    return AttentionInterface()[ATTENTION_NAME](Sparse(), query, key, value, mask, scaling=0.5, **options)[0]


def by_definition(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Eager attention in float64; `bias` `[batch, heads or 1, queries, keys]`, sinks `[batch, heads, queries, 1]`."""
    key, value = (part.double().repeat_interleave(2, dim=1) for part in (key, value))
    scores = query.double() @ key.mT * 0.5 + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).float()


def test_an_unknown_argument_is_refused_with_its_name_and_the_class() -> None:
    with pytest.raises(UnsupportedError, match=r"Sparse passes 'tilt' .*set_attn_implementation\(\"eager\"\)"):
        attend(*states(), None, tilt=torch.ones(3))


@pytest.mark.parametrize("name", ["tilt", *FOR_FLASH, *WITHOUT_EFFECT])
def test_an_argument_that_is_none_changes_nothing(name: str) -> None:
    assert attend(*states(), None, **{name: None}).equal(attend(*states(), None))


@pytest.mark.parametrize("name", FOR_FLASH)
def test_packed_lengths_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        attend(*states(), None, **{name: torch.tensor([0, 9])})


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_an_argument_without_effect_has_none_and_a_reason(name: str) -> None:
    assert WITHOUT_EFFECT[name]
    assert attend(*states(), None, **{name: 3}).equal(attend(*states(), None))


def test_a_missing_mask_hides_nothing_whatever_the_module_says() -> None:
    query, key, value = states(kv_length=3)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    actual, _ = paged_attention_forward(module, query, key, value, None, scaling=0.5)
    torch.testing.assert_close(actual, by_definition(query, key, value, torch.zeros(1, 1, 1, 3)))


def test_causality_without_a_mask_is_honoured_where_the_caller_asks_for_it() -> None:
    query, key, value = states(kv_length=3)
    hidden = torch.full((3, 3), -torch.inf).triu(1)
    actual = attend(query, key, value, None, is_causal=True)
    torch.testing.assert_close(actual, by_definition(query, key, value, hidden))
    weighed = paged_attention_forward(
        Sparse(), query, key, value, None, scaling=0.5, is_causal=True, output_attentions=True
    )
    torch.testing.assert_close(weighed[0], actual)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_selected_keys_alone_are_seen(kind: str, with_sinks: bool) -> None:
    query, key, value = states()
    indices = torch.tensor([[[0, 4], [1, -1], [8, 2]], [[3, 3], [0, 1], [7, 6]]])
    selected = torch.zeros(2, 1, 3, 9, dtype=torch.bool)
    for row in range(2):
        for position in range(3):
            for index in indices[row, position].tolist():
                if index >= 0:
                    selected[row, 0, position, index] = True
    visible = torch.ones(1, 1, 3, 9, dtype=torch.bool)
    if kind != "none":
        visible = torch.ones(3, 9, dtype=torch.bool).tril(6)[None, None]
    mask = {
        "none": None,
        "bool": visible,
        "float": torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min),
    }[kind]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    bias = torch.zeros(selected.shape).masked_fill(~(selected & visible), -torch.inf).double()
    expected = by_definition(
        query, key, value, bias, None if sinks is None else sinks.view(1, -1, 1, 1).expand(2, 4, 3, 1)
    )
    actual = attend(query, key, value, mask, indices=indices, s_aux=sinks)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("masked", [False, True])
def test_sinks_may_differ_by_query(masked: bool) -> None:
    query, key, value = states()
    sinks = torch.randn(2, 4, 3, 1, generator=torch.Generator().manual_seed(1))
    visible = torch.ones(3, 9, dtype=torch.bool).tril(6)[None, None] if masked else None
    bias = torch.zeros(1, 1, 3, 9).double()
    if masked:
        bias = bias.masked_fill(~visible, -torch.inf)
    actual, weights = paged_attention_forward(
        Sparse(), query, key, value, visible, scaling=0.5, sinks=sinks, output_attentions=True
    )
    torch.testing.assert_close(actual, by_definition(query, key, value, bias, sinks))
    assert weights.shape == (2, 4, 3, 9)
    assert (weights.sum(-1) < 1).all()


def test_sinks_by_head_have_two_names() -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    torch.testing.assert_close(attend(*states(), None, sinks=sinks), attend(*states(), None, s_aux=sinks))
    with pytest.raises(UnsupportedError, match="`s_aux` and `sinks`"):
        attend(*states(), None, sinks=sinks, s_aux=sinks)


def test_blocks_of_an_indexer_that_does_not_say_what_they_are_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Sparse passes `block_indices`.*build_block_mask"):
        attend(*states(), None, block_indices=torch.zeros(2, 1, 3, 1, dtype=torch.long))
