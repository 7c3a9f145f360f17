"""The test matrix of attention kernels: calls, their inputs in hostile memory, and the result by definition.

Blocks lie in random order. Whatever a row does not hold (the null block, free blocks, slots past a row's end, blocks
that have left its window) is NaN, then once more a huge number: neither may show in a result.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from hf_paged_kernels import KVBlocks, StepMetadata, paged_attention

from tests.kernels import oracle
from tests.kernels.hostile import POISONS, poisoned_blocks

Attention = Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]

HEADS = [(4, 4), (3, 1), (5, 1), (7, 1), (9, 3), (28, 4), (64, 1), (6, 2)]
DIMS = [(16, 16), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (16, 48)]
BLOCK_SIZES = [16, 32, 64, 128, 256, 24]
LENGTHS = [(1,), (17, 17, 17), (33, 64), (5, 40, 33), (0, 20), (48, 47, 3, 0)]
QUERY_LENGTHS = [1, 2, 8, 9, 33]
WINDOWS = [None, 1, 7, 16, 17, 40, 100]
FEATURES = [
    {},
    {"softcap": 1.5},
    {"sinks": True},
    {"holes": True},
    {"softcap": 1.5, "sinks": True},
    {"sinks": True, "holes": True},
    {"softcap": 1.5, "sinks": True, "holes": True},
]


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
DECOY = 7.0  # stands in the blocks for new tokens that are also given as `new_kv`, which must win


@dataclass(frozen=True)
class Case:
    """One call. `lengths` are the tokens of each row after the step; a row shorter than the step is left-padded."""

    lengths: tuple[int, ...] = (37, 37)
    query_length: int = 1
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (16, 16)
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    holes: bool = False
    new_from_blocks: bool = False
    ids_in_order: bool = False
    seed: int = 0

    def __str__(self) -> str:
        changed = (name for name, field in Case.__dataclass_fields__.items() if getattr(self, name) != field.default)
        return " ".join(f"{name}={getattr(self, name)}".replace(", ", ",") for name in changed) or "plain"

    @property
    def past_lens(self) -> list[int]:
        return [max(length - self.query_length, 0) for length in self.lengths]

    def is_stored(self, row: int, token: int) -> bool:
        """Whether a table with this window has the token in a block; it keeps or skips whole blocks."""
        if self.window is None:
            return True
        past, length = self.past_lens[row], self.lengths[row]
        if token < past:
            needed_from = length - self.query_length - self.window + 1
        else:
            needed_from = 0 if self.new_from_blocks else length - self.window + 1
        return token >= needed_from // self.block_size * self.block_size


def random_rows(case: Case, dtype: torch.dtype, generator: torch.Generator) -> list[oracle.Row]:
    kv_heads = case.heads[1]
    return [
        oracle.Row(*(torch.randn(kv_heads, n, dim, generator=generator).to(dtype) for dim in case.dims))
        for n in case.lengths
    ]


def lay_out(case: Case, rows: list[oracle.Row], poison: float) -> tuple[KVBlocks, StepMetadata]:
    """The rows in blocks, and the step that has just written them, made by hand."""
    size, batch = case.block_size, len(rows)
    width = max(1, -(-max(case.lengths) // size))
    num_blocks = batch * width + 3
    random = np.random.default_rng(case.seed)
    ids = iter(range(1, num_blocks) if case.ids_in_order else random.permutation(np.arange(1, num_blocks)).tolist())
    blocks = poisoned_blocks(num_blocks, case.heads[1], size, case.dims, rows[0].key.dtype, poison)
    table = np.zeros((batch, width), dtype=np.int32)
    slots = np.full((batch, case.query_length), -1, dtype=np.int32)
    for b, row in enumerate(rows):
        tokens = np.array([token for token in range(row.length) if case.is_stored(b, token)], dtype=np.int64)
        for block in dict.fromkeys((tokens // size).tolist()):
            table[b, block] = next(ids)
        in_blocks, offsets = table[b, tokens // size].astype(np.int64), tokens % size
        is_decoy = (tokens >= case.past_lens[b]) & (not case.new_from_blocks)
        for plane, states in zip(blocks.planes, row, strict=True):
            plane[:, in_blocks, offsets] = states[:, tokens].masked_fill(torch.from_numpy(is_decoy)[:, None], DECOY)
        columns = tokens - (row.length - case.query_length)
        slots[b, columns[columns >= 0]] = (in_blocks * size + offsets)[columns >= 0]
    seq_lens = np.array(case.lengths, dtype=np.int32)
    num_columns = max(*case.lengths, case.query_length)
    is_new_stored = all(case.is_stored(b, t) for b, n in enumerate(case.lengths) for t in range(case.past_lens[b], n))
    step = StepMetadata(
        block_table=table,
        seq_lens=seq_lens,
        padding=num_columns - seq_lens,
        slots=slots,
        num_columns=num_columns,
        block_size=size,
        new_tokens_stored=is_new_stored,
    )
    return blocks, step


def new_states(case: Case, rows: list[oracle.Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the last columns, right-aligned; what stands in padding is finite, as a model makes it."""
    shape, dtype = (len(rows), case.query_length, case.heads[1]), rows[0].key.dtype
    new = [torch.full((*shape, dim), 1e4, dtype=dtype).transpose(1, 2) for dim in case.dims]
    for b, row in enumerate(rows):
        for states, tokens in zip(new, row, strict=True):
            count = min(row.length, case.query_length)
            states[b, :, case.query_length - count :] = tokens[:, row.length - count :]
    return new[0], new[1]


def attend(
    case: Case, dtype: torch.dtype, attention: Attention = paged_attention, *, each_way: bool = True
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each poison: output and log-sum-exp of `attention`, then those of the oracle.

    Without `return_lse` other routes are taken, so each poison comes twice, with the log-sum-exp of the same call once.
    Not `each_way`, one poison comes with and the other without: half the calls, where the interpreter makes them long.
    """
    generator = torch.Generator().manual_seed(case.seed)
    rows = random_rows(case, dtype, generator)
    query = torch.randn(len(rows), case.query_length, case.heads[0], case.dims[0], generator=generator)
    query = query.to(dtype).transpose(1, 2)  # a view, as a model makes it
    options = {
        "scale": 2 * case.dims[0] ** -0.5,
        "window": case.window,
        "softcap": case.softcap,
        "sinks": torch.randn(case.heads[0], generator=generator).to(dtype) if case.sinks else None,
        "key_mask": torch.rand(len(rows), max(case.lengths), generator=generator) < 0.6 if case.holes else None,
    }
    expected_out, expected_lse = oracle.attention(query, rows, **options)
    for poison in POISONS:
        blocks, step = lay_out(case, rows, poison)
        new_kv = None if case.new_from_blocks else new_states(case, rows)
        if each_way or poison is POISONS[0]:
            out, lse = attention(query, blocks, step, **options, new_kv=new_kv, return_lse=True)
            yield out, lse, expected_out, expected_lse
        if each_way or poison is not POISONS[0]:
            yield attention(query, blocks, step, **options, new_kv=new_kv), lse, expected_out, expected_lse


def check(
    case: Case, dtype: torch.dtype = torch.float32, attention: Attention = paged_attention, *, each_way: bool = True
) -> None:
    """Fails unless `attention` gives what the definition says, for each poison."""
    tolerance = TOLERANCE[dtype]
    for out, lse, expected_out, expected_lse in attend(case, dtype, attention, each_way=each_way):
        assert out.dtype == lse.dtype == dtype
        torch.testing.assert_close(out.double(), expected_out, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse.double(), expected_lse, atol=tolerance, rtol=tolerance)


def matrix(lengths: tuple[int, ...], query_length: int, window: int | None) -> Iterator[Case]:
    """Every feature and both sources of the new tokens; heads, widths and block sizes take turns."""
    shapes = itertools.cycle(itertools.product(HEADS, DIMS, BLOCK_SIZES))
    shapes = itertools.islice(shapes, 5 * sum(lengths) + 3 * query_length + (window or 0), None, 31)
    for features, new_from_blocks in itertools.product(FEATURES, (False, True)):
        heads, dims, block_size = next(shapes)
        yield Case(lengths, query_length, heads, dims, block_size, window, new_from_blocks=new_from_blocks, **features)
