"""Calls that are moved to a card and back do what they do in main memory; here the card is main memory, too."""

from __future__ import annotations

import math

import pytest
import torch
from hf_paged_kernels import copy_blocks, paged_attention, write_kv

from tests.kernels.cases import Case, check, lay_out, new_states, random_rows
from tests.kernels.device import copied, moving
from tests.kernels.hostile import poisoned_blocks
from tests.kernels.quantized_cases import CODECS, check_quantized

CPU = torch.device("cpu")


@pytest.mark.parametrize("view", ["transposed", "expanded", "every second"])
def test_a_view_stays_a_view(view: str) -> None:
    numbers = torch.arange(24.0).view(4, 6)
    states = {"transposed": numbers.t(), "expanded": numbers[:, :1].expand(4, 3), "every second": numbers[1:, ::2]}[
        view
    ]
    moved = copied((states,), CPU)[0]
    assert torch.equal(moved, states)
    assert (moved.stride(), moved.storage_offset()) == (states.stride(), states.storage_offset())
    assert moved.untyped_storage().data_ptr() != states.untyped_storage().data_ptr()


def test_attention() -> None:
    case = Case(lengths=(40, 17), query_length=3, sinks=True, holes=True)
    check(case, attention=moving(paged_attention, CPU))
    check_quantized(case, CODECS["int4"], attention=moving(paged_attention, CPU))


def test_what_is_written_comes_back() -> None:
    case = Case(lengths=(40, 17), query_length=3, new_from_blocks=True)
    rows = random_rows(case, torch.float32, torch.Generator().manual_seed(0))
    expected, step = lay_out(case, rows, math.nan)
    blocks = poisoned_blocks(expected.num_blocks, 1, 16, (16, 16), torch.float32, 0.0)
    moving(write_kv, CPU)(blocks, *new_states(case, rows), step)
    for row in range(2):
        block, offset = divmod(int(step.slots[row, -1]), 16)
        assert torch.equal(blocks.key[:, block, offset], expected.key[:, block, offset])
    moving(copy_blocks, CPU)([blocks], [(block, 0)])
    assert torch.equal(blocks.key[:, 0], blocks.key[:, block])
