"""What the kernels are measured on: blocks in random order, the same keys and values in one piece, and the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from hf_paged_kernels import KVBlocks, StepMetadata, dense_attention

from eval.kernels.formats import clone, store, token_bytes
from eval.kernels.timing import Call, round_of

BLOCK_SIZE = 64
MAX_LAYERS = 256
# Scores with this standard deviation leave weight on a few tokens only, in contexts of any length: the result is then
# as large as a value, and a token that is missed or taken wrongly changes it by as much.
SCORE_DEVIATION = 4.0
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4 * 2**-10, torch.bfloat16: 4 * 2**-7}


class WrongResult(Exception):
    """An implementation does not compute attention."""


@dataclass(frozen=True)
class Heads:
    """Query heads, KV heads and the width of each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def __str__(self) -> str:
        return f"{self.num_heads}:{self.num_kv_heads}:{self.head_dim}"


@dataclass(frozen=True)
class Shape:
    """Rows of equal length, whose last `query_length` tokens are the queries.

    Attributes:
        shared_prompt: leading tokens that all rows share, in the same blocks; a multiple of the block size.
        kv: the format of the blocks, a name from `hf_paged_cache.CODECS`.
    """

    heads: Heads
    dtype: torch.dtype
    batch: int
    context: int
    query_length: int = 1
    shared_prompt: int = 0
    kv: str = "raw"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that the rows see, scales included, shared ones once for each row."""
        return round(self.batch * self.context * self._token_bytes)

    @property
    def stored_bytes(self) -> int:
        """The same with shared ones once."""
        return round((self.shared_prompt + self.batch * (self.context - self.shared_prompt)) * self._token_bytes)

    @property
    def _token_bytes(self) -> float:
        return token_bytes(self.kv, self.heads.num_kv_heads, self.heads.head_dim, self.dtype, BLOCK_SIZE)

    def num_layers(self, rotated_bytes: int) -> int:
        """Layers, each with keys and values of its own, that take `rotated_bytes` together."""
        return min(MAX_LAYERS, max(1, math.ceil(rotated_bytes / self.stored_bytes)))

    def memory_needed(self, rotated_bytes: int) -> int:
        """Bytes that all implementations need at once: layouts of their own, and copies for the repeated heads."""
        layers, raw = self.num_layers(rotated_bytes), replace(self, kv="raw")
        own = layers * self.stored_bytes if self.kv != "raw" else 0
        return own + 5 * layers * raw.stored_bytes + (2 + self.heads.group) * raw.kv_bytes

    def __str__(self) -> str:
        queries = f", {self.query_length} queries" if self.query_length > 1 else ""
        kv = f", {self.kv}" if self.kv != "raw" else ""
        return f"{self.heads}, {self.dtype_name}{kv}, batch {self.batch}, context {self.context}{queries}"


class Problem:
    """Random keys and values of several layers, and one query for all of them.

    The layers hold the same numbers in memory of their own: who calls an implementation with one after the other
    measures reads from memory, not from a cache. The null block is NaN.

    Attributes:
        query: `[batch, num_heads, query_length, head_dim]`
        step: the forward pass, for all layers.
        layers: the blocks of each layer.
    """

    def __init__(self, shape: Shape, device: torch.device, rotated_bytes: int = 0) -> None:
        self.shape, self.device = shape, device
        self.scale = shape.heads.head_dim**-0.5
        self.table = _random_table(shape)
        generator = torch.Generator(device).manual_seed(0)
        heads = shape.heads
        size = (shape.batch, shape.query_length, heads.num_heads, heads.head_dim)
        query = torch.randn(size, generator=generator, dtype=shape.dtype, device=device)
        self.query = (SCORE_DEVIATION * query).transpose(1, 2)
        exact = KVBlocks(*(self._random_plane(generator) for _ in range(2)))
        self._stored = store(shape.kv, exact, self.table)
        self.step = _step(shape, self.table, self._stored.exact_table)
        copies = range(shape.num_layers(rotated_bytes) - 1)
        self.layers = [self._stored.blocks, *(clone(self._stored.blocks) for _ in copies)]

    @cached_property
    def contiguous(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer as the blocks read, in one piece: `[batch, num_kv_heads, context, head_dim]`
        in the model's dtype."""
        key, value = (self._in_one_piece(plane) for plane in (self._stored.key, self._stored.value))
        return [(key, value), *((key.clone(), value.clone()) for _ in self.layers[1:])]

    @property
    def new_kv(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer's new tokens, `[batch, num_kv_heads, query_length, head_dim]`."""
        new = slice(-self.shape.query_length, None)
        return [(key[:, :, new], value[:, :, new]) for key, value in self.contiguous]

    @cached_property
    def expected(self) -> torch.Tensor:
        """float64 `[batch, num_heads, query_length, head_dim]`, the same for every layer."""
        first_query = self.shape.context - self.shape.query_length
        position = torch.arange(self.shape.context, device=self.device)
        visible = position[None] <= position[first_query:, None]
        rows = zip(self.query, *self.contiguous[0], strict=True)
        # Row by row: in float64 all of them together may be more than memory holds.
        return torch.cat(
            [
                dense_attention(*(states[None].double() for states in row), scale=self.scale, visible=visible)[0]
                for row in rows
            ]
        )

    def check(self, out: torch.Tensor) -> float:
        """
        Returns:
            The largest error, as a part of the largest value.

        Raises:
            WrongResult: `out` is not the expected result as its dtype can hold it.
        """
        if out.shape != self.expected.shape:
            raise WrongResult(f"the result has the shape {tuple(out.shape)}, not {tuple(self.expected.shape)}")
        error = float((out.double() - self.expected).abs().max() / self.expected.abs().max())
        allowed = TOLERANCE[self.shape.dtype]
        if not error <= allowed:
            raise WrongResult(f"the result is off by {error:.2g} of the largest value, allowed is {allowed:.2g}")
        return error

    def _random_plane(self, generator: torch.Generator) -> torch.Tensor:
        shape = self.shape
        size = (shape.heads.num_kv_heads, int(self.table.max()) + 1, BLOCK_SIZE, shape.heads.head_dim)
        plane = torch.randn(size, generator=generator, dtype=shape.dtype, device=self.device)
        plane[:, 0] = math.nan
        return plane

    def _in_one_piece(self, plane: torch.Tensor) -> torch.Tensor:
        blocks = plane[:, torch.from_numpy(self.table.astype(np.int64)).to(self.device)]
        tokens = blocks.transpose(0, 1).flatten(2, 3)  # [batch, num_kv_heads, table width * BLOCK_SIZE, head_dim]
        return tokens[:, :, : self.shape.context].contiguous()


def checked_round(problem: Problem, prepare: Callable[[Problem], list[Call]]) -> Callable[[], float]:
    """A timed round of the calls that `prepare` makes for the layers of a problem, see `kernel_timing.round_of`.

    Raises:
        WrongResult: they do not compute attention.
    """
    calls = prepare(problem)
    problem.check(calls[0]())
    return round_of(problem.device, calls)


def _random_table(shape: Shape) -> np.ndarray:
    """int32 `[batch, width]`: blocks in random order, those of the shared prompt the same in every row."""
    shared, width = shape.shared_prompt // BLOCK_SIZE, -(-shape.context // BLOCK_SIZE)
    own = shape.batch * (width - shared)
    ids = 1 + np.random.default_rng(0).permutation(shared + own).astype(np.int32)
    prompt = np.broadcast_to(ids[:shared], (shape.batch, shared))
    return np.concatenate([prompt, ids[shared:].reshape(shape.batch, -1)], axis=1)


def _step(shape: Shape, table: np.ndarray, exact_table: np.ndarray | None) -> StepMetadata:
    new = np.arange(shape.context - shape.query_length, shape.context)
    return StepMetadata(
        block_table=table,
        seq_lens=np.full(shape.batch, shape.context, dtype=np.int32),
        padding=np.zeros(shape.batch, dtype=np.int32),
        slots=table[:, new // BLOCK_SIZE] * BLOCK_SIZE + (new % BLOCK_SIZE).astype(np.int32),
        num_columns=shape.context,
        block_size=BLOCK_SIZE,
        new_tokens_stored=True,
        exact_table=exact_table,
    )
