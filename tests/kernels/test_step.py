"""`StepMetadata`: what a step knows of rows and columns, what it uploads, and what it keeps."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hf_paged_kernels import StepMetadata, gather_tokens

from tests.kernels.hostile import poisoned_blocks

CPU = torch.device("cpu")


def make_step(**changes: object) -> StepMetadata:
    """Two rows over blocks of 4, the second left-padded by 3 columns; the last 2 of 7 columns are new.

    columns   0 1 2 3 4 5 6
    row 0     0 1 2 3 4 5 6     blocks 5 and 2
    row 1     - - - 0 1 2 3     block 7
    """
    fields = {
        "block_table": np.array([[5, 2], [7, 0]], dtype=np.int32),
        "seq_lens": np.array([7, 4], dtype=np.int32),
        "padding": np.array([0, 3], dtype=np.int32),
        "slots": np.array([[9, 10], [30, 31]], dtype=np.int32),
        "num_columns": 7,
        "block_size": 4,
        "new_tokens_stored": True,
    }
    return StepMetadata(**{**fields, **changes})


def test_lengths_of_rows_and_columns():
    step = make_step()
    assert (step.batch, step.query_length, step.first_column, step.max_seq_len) == (2, 2, 5, 7)
    assert step.past_lens.tolist() == [5, 2]
    assert step.has_past
    assert not step.has_empty_queries


@pytest.mark.parametrize(
    ("seq_lens", "past_lens", "has_past", "has_empty_queries"),
    [
        ([2, 2], [0, 0], False, False),
        ([7, 7], [5, 5], True, False),
        ([2, 1], [0, 0], False, True),
        ([3, 0], [1, 0], True, True),
        ([1, 1], [0, 0], False, True),
        ([0, 0], [0, 0], False, True),
    ],
)
def test_rows_that_begin_within_the_step(seq_lens, past_lens, has_past, has_empty_queries):
    seq_lens = np.array(seq_lens, dtype=np.int32)
    step = make_step(seq_lens=seq_lens, padding=7 - seq_lens)
    assert step.past_lens.tolist() == past_lens
    assert (step.has_past, step.has_empty_queries) == (has_past, has_empty_queries)


def test_slots_of_tokens():
    """Tokens before the row, behind its end, or in a null block have none."""
    step = make_step()
    tokens = np.array([[-5, -1, 0, 3, 4, 6, 7, 8, 99]])
    assert step.slots_of(tokens).tolist() == [[-1, -1, 20, 23, 8, 10, -1, -1, -1], [-1, -1, 28, 31, -1, -1, -1, -1, -1]]
    assert step.slots_of(np.array([[6], [0]])).tolist() == [[10], [28]]
    freed = make_step(block_table=np.array([[0, 2], [7, 0]], dtype=np.int32))
    assert freed.slots_of(np.array([[3, 4]])).tolist() == [[-1, 8], [31, -1]]


def test_new_tokens_that_were_not_stored_have_no_slot():
    """A chunk longer than the window: its head is stored nowhere, though it would belong in a block that is there."""
    step = make_step(
        block_table=np.array([[5, 0, 2]], dtype=np.int32),
        seq_lens=np.array([11], dtype=np.int32),
        padding=np.zeros(1, dtype=np.int32),
        slots=np.array([[-1] * 6 + [8, 9, 10]], dtype=np.int32),
        num_columns=11,
        new_tokens_stored=False,
    )
    assert step.slots_of(np.arange(11)[None]).tolist() == [[20, 21, -1, -1, -1, -1, -1, -1, 8, 9, 10]]


def test_columns_are_tokens_shifted_by_the_padding():
    step = make_step()
    blocks = poisoned_blocks(8, 2, 4, (3, 3), torch.float32, math.nan)
    blocks.key[:, 5, :, 0] = torch.arange(4.0)
    blocks.key[:, 2, :3, 0] = torch.arange(4.0, 7.0)
    blocks.key[:, 7, :, 0] = torch.arange(10.0, 14.0)

    columns = gather_tokens(blocks.key, step.column_index(0, 7, blocks))[:, :, :, 0]
    assert columns[:, 0].tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 10, 11, 12, 13]]
    assert torch.equal(columns[:, 0], columns[:, 1])

    tokens = gather_tokens(blocks.key, step.token_index(2, 5, blocks))[:, :, :, 0]
    assert tokens[:, 0].tolist() == [[2, 3, 4], [12, 13, 0]]


def test_an_index_says_which_tokens_are_there():
    step, blocks = make_step(), poisoned_blocks(8, 2, 4, (3, 3), torch.float32, math.nan)
    complete = step.token_index(0, 4, blocks)
    assert complete.shape == (2, 2, 4)
    assert complete.stored is None
    assert complete.missing is None
    partial = step.token_index(3, 5, blocks)
    # Row 1 has no token 4: positions 5 and 7 of [row 0: 4 entries][row 1: head 0: 3 4][head 1: 3 4].
    assert partial.stored.tolist() == [0, 1, 2, 3, 4, 6]
    assert partial.missing.tolist() == [5, 7]


def test_indices_are_made_once_and_for_the_blocks_they_were_asked_for():
    """A pool that has grown, or has other heads, needs an index of its own; one of other widths does not."""
    step = make_step()
    blocks, same, grown, fewer_heads = (
        poisoned_blocks(num_blocks, heads, 4, dims, torch.float32, math.nan)
        for num_blocks, heads, dims in [(8, 2, (3, 3)), (8, 2, (5, 7)), (9, 2, (3, 3)), (8, 1, (3, 3))]
    )
    assert step.token_index(0, 4, blocks) is step.token_index(0, 4, same)
    assert step.write_index(blocks) is step.write_index(same)
    asked = [
        step.token_index(0, 4, blocks),
        step.token_index(0, 4, grown),
        step.token_index(0, 4, fewer_heads),
        step.token_index(0, 3, blocks),
        step.token_index(1, 4, blocks),
        step.column_index(0, 4, blocks),
        step.write_index(blocks),
        step.write_index(grown),
        step.write_index(fewer_heads),
    ]
    assert len({id(index) for index in asked}) == len(asked)


def test_memo_computes_once_for_each_key():
    step, calls = make_step(), []
    for key, value in (("a", 1), ("a", 2), (("a", CPU), None), (("a", CPU), 3)):
        step.memo(key, lambda value=value: calls.append(value))
    assert calls == [1, None]
    assert step.memo("b", lambda: 5) == 5
    assert step.memo("b", lambda: 6) == 5


def test_memo_keeps_nothing_of_a_failure():
    step = make_step()
    with pytest.raises(ZeroDivisionError):
        step.memo("a", lambda: 1 // 0)
    assert step.memo("a", lambda: 7) == 7


def test_the_device_gets_one_upload():
    step = make_step()
    device = step.on(CPU)
    assert device.block_table.tolist() == [[5, 2], [7, 0]]
    assert device.seq_lens.tolist() == [7, 4]
    assert device.slot_mapping.tolist() == [[9, 10], [30, 31]]
    parts = (device.block_table, device.seq_lens, device.slot_mapping)
    assert {part.dtype for part in parts} == {torch.int32}
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert all(part.is_contiguous() for part in parts)
    assert step.on(CPU) is device
    assert replace(device).block_table is device.block_table


def test_the_upload_is_no_view_of_the_host():
    step = make_step()
    device = step.on(CPU)
    step.block_table[0, 0] = 1
    assert device.block_table[0, 0] == 5


@pytest.mark.parametrize(
    ("row", "tokens", "expected"),
    [
        ([4, 5, 6], (0, 12), slice(16, 28)),
        ([4, 5, 6], (2, 9), slice(18, 25)),
        ([1, 5, 6], (5, 9), slice(21, 25)),
        ([6], (1, 2), slice(25, 26)),
        ([4, 6, 7], (0, 12), None),
        ([6, 5, 4], (0, 12), None),
        ([0, 1, 2], (0, 12), None),
        ([0, 1, 2], (1, 2), None),
        ([4, 5, 6], (0, 13), None),
    ],
)
def test_slots_that_follow_each_other_are_a_run(row, tokens, expected):
    """Never one that begins in the null block, or goes on behind the row."""
    step = make_step(
        block_table=np.array([row], dtype=np.int32),
        seq_lens=np.array([4 * len(row)], dtype=np.int32),
        padding=np.zeros(1, dtype=np.int32),
        slots=np.zeros((1, 1), dtype=np.int32),
    )
    assert step.run_of_slots(*tokens) == expected


def test_several_rows_are_no_run():
    assert make_step(block_table=np.array([[1, 2], [3, 4]], dtype=np.int32)).run_of_slots(0, 4) is None
