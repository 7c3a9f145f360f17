"""`paged_attention` by the Triton kernels, with the contract of the reference."""

import math

import numpy as np
import torch
import triton

from hf_paged_kernels.layout import Blocks, KVBlocks
from hf_paged_kernels.step import StepMetadata
from hf_paged_kernels.triton_kernels.attend import attend_kernel
from hf_paged_kernels.triton_kernels.device import architecture, device_guard, processors, with_dense_dims
from hf_paged_kernels.triton_kernels.launch import MAX_DIM, Launch, select
from hf_paged_kernels.triton_kernels.merge import merge_kernel
from hf_paged_kernels.triton_kernels.shared import SharedRuns, attend_shared_kernel, find_shared_runs
from hf_paged_kernels.triton_kernels.softmax import parts, score_factor

LN_2 = math.log(2)
MAX_DECODE_QUERIES = 8
MAX_SPLITS = 64
# A split shorter than this spends more on its start and its merge than on its keys.
MIN_SPLIT_LENGTH = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unsupported_reason(query: torch.Tensor, blocks: Blocks) -> str | None:
    """Why the kernels cannot do a call; `None` if they can."""
    if not isinstance(blocks, KVBlocks):
        return "quantized blocks"
    dims = (blocks.key.shape[-1], blocks.value.shape[-1])
    if query.dtype not in DTYPES or blocks.key.dtype != query.dtype or blocks.value.dtype != query.dtype:
        return f"dtype {query.dtype} with blocks in {blocks.key.dtype}"
    if max(dims) > MAX_DIM:
        return f"a head_dim of {max(dims)}, above {MAX_DIM}"
    if query.shape[1] // blocks.num_kv_heads > 128:
        return f"{query.shape[1] // blocks.num_kv_heads} query heads a KV head, above 128"
    return None


def paged_attention(
    query: torch.Tensor,
    blocks: KVBlocks,
    step: StepMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    key_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    launch: Launch | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As `hf_paged_kernels.reference.paged_attention`, in float32 sums.

    Args:
        num_splits: programs that share the keys of a row; `None` for as many as fill the card.
        launch: tiles, warps and stages; `None` for what the table has for this card.
    """
    call = _Call(query, blocks, step, scale, window, softcap, launch)
    is_decode = step.query_length <= MAX_DECODE_QUERIES
    shared = None
    if is_decode and window is None and key_mask is None and num_splits is None and call.sequences > 1:
        shared = step.memo(
            ("shared", call.sequences, blocks.num_kv_heads),
            lambda: find_shared_runs(step, call.sequences, blocks.num_kv_heads),
        )
    if shared is not None:
        return call.attend_with_shared_runs(shared, sinks, new_kv, return_lse)
    if num_splits is None:
        num_splits = call.planned_splits(call.programs, step.max_seq_len) if is_decode else 1
    return call.attend(sinks, new_kv, key_mask, return_lse, num_splits)


class _Call:
    """One call of `paged_attention`: what its launches have in common."""

    def __init__(
        self,
        query: torch.Tensor,
        blocks: KVBlocks,
        step: StepMetadata,
        scale: float,
        window: int | None,
        softcap: float | None,
        launch: Launch | None,
    ) -> None:
        self.query = with_dense_dims(query)
        self.blocks, self.step, self.window = blocks, step, window
        self.device = query.device
        self.batch, self.num_heads, self.query_length, key_dim = query.shape
        self.value_dim = blocks.value.shape[-1]
        self.group = self.num_heads // blocks.num_kv_heads
        phase = "decode" if self.query_length <= MAX_DECODE_QUERIES else "extend"
        width = max(key_dim, self.value_dim)
        self.launch = launch or select(architecture(self.device), phase, width, query.element_size() * 8)
        self.rows = _rows(self.launch, phase, self.group, self.query_length)
        self.query_tiles = triton.cdiv(self.query_length, self.rows // self.group)
        self.programs = self.batch * blocks.num_kv_heads * self.query_tiles
        # Sequences whose queries fit in one program together.
        self.sequences = self.launch.rows // (self.group * self.query_length)
        self.scale_log2 = score_factor(scale, softcap)
        self.constants = {
            "SHAPE": (key_dim, *parts(key_dim), self.value_dim, *parts(self.value_dim)),
            "GROUP": self.group,
            "BLOCK_SIZE": blocks.block_size,
            "TILE": self.launch.tile,
            "SOFTCAP": softcap or 0.0,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
            "num_warps": self.launch.num_warps,
            "num_stages": self.launch.num_stages,
        }

    def attend(
        self,
        sinks: torch.Tensor | None,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None,
        key_mask: torch.Tensor | None,
        return_lse: bool,
        num_splits: int,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        num_splits, split_length = self.split_lengths(num_splits, 0)
        out, lse = self._results(return_lse)
        if num_splits == 1:
            self._launch_attend(out, lse, 1, 1, split_length, sinks, new_kv, key_mask, None)
            return self._returned(out, lse)
        partial, partial_lse = self._partials(num_splits)
        self._launch_attend(partial, partial_lse, num_splits, num_splits, split_length, None, new_kv, key_mask, None)
        self._launch_merge(partial, partial_lse, sinks, out, lse)
        return self._returned(out, lse)

    def attend_with_shared_runs(
        self,
        shared: SharedRuns,
        sinks: torch.Tensor | None,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        tile_rows, tile_lengths, first_tokens = self.step.memo(
            ("shared", id(shared), self.device), lambda: shared.on(self.device)
        )
        tile, longest = self.launch.tile, int(shared.tile_lengths.max())
        shared_programs = len(shared.tile_rows) * self.blocks.num_kv_heads
        tiles = -(-longest // tile)
        tiles_each = -(-tiles // self.planned_splits(shared_programs, longest))
        shared_splits = -(-tiles // tiles_each)
        private = int((self.step.seq_lens - shared.first_tokens).max())
        num_splits, split_length = self.split_lengths(
            self.planned_splits(self.programs, private), shared.first_tokens.astype(np.int64)
        )
        all_splits = shared_splits + num_splits
        out, lse = self._results(return_lse)
        partial, partial_lse = self._partials(all_splits)
        partial_lse[..., :shared_splits] = -torch.inf  # rows that share nothing
        with device_guard(self.device):
            attend_shared_kernel[(len(shared.tile_rows) * shared_splits, self.blocks.num_kv_heads)](
                self.query,
                self.blocks.key,
                self.blocks.value,
                self.step.on(self.device).block_table,
                tile_rows,
                tile_lengths,
                partial,
                partial_lse,
                self.scale_log2,
                self.blocks.num_blocks * self.blocks.block_size,
                self.step.block_table.shape[1],
                self.query_length,
                tiles_each * tile,
                shared_splits,
                all_splits,
                self.query.stride()[:3],
                SEQUENCES=self.sequences,
                ROWS=max(16, triton.next_power_of_2(self.sequences * self.query_length * self.group)),
                **self.constants,
            )
        self._launch_attend(
            partial, partial_lse, num_splits, all_splits, split_length, None, new_kv, None, first_tokens
        )
        self._launch_merge(partial, partial_lse, sinks, out, lse)
        return self._returned(out, lse)

    def planned_splits(self, programs: int, num_tokens: int) -> int:
        """Splits that fill the card once, from the host's lengths: no wait for the device."""
        available = processors(self.device)
        if programs >= 0.8 * available:
            return 1
        visible = num_tokens if self.window is None else min(num_tokens, self.window + self.query_length)
        return max(1, min(MAX_SPLITS, 2 * available // programs, visible // MIN_SPLIT_LENGTH))

    def split_lengths(self, num_splits: int, first_tokens: np.ndarray | int) -> tuple[int, int]:
        """The number of splits that have something to do, and the tokens of each, a multiple of the tile.

        The first tile of a row begins at or before the first token that it sees.
        """
        tile, last = self.launch.tile, self.step.seq_lens.astype(np.int64)
        first = np.zeros_like(last) + first_tokens
        if self.window is not None:
            first = np.maximum(first, last - self.query_length - self.window + 1)
        tiles = int((-(-last // tile) - first // tile).max())
        tiles_each = max(1, -(-tiles // num_splits))
        return max(1, -(-tiles // tiles_each)), tiles_each * tile

    def _results(self, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (self.batch, self.query_length, self.num_heads)
        lse = torch.empty(shape, dtype=torch.float32, device=self.device) if return_lse else None
        return self.query.new_empty(*shape, self.value_dim), lse

    def _partials(self, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.batch, self.query_length, self.num_heads, num_splits)
        partial = torch.empty(*shape, self.value_dim, dtype=torch.float32, device=self.device)
        return partial, torch.empty(shape, dtype=torch.float32, device=self.device)

    @staticmethod
    def _returned(out: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        out = out.transpose(1, 2)
        return out if lse is None else (out, lse.transpose(1, 2) * LN_2)

    def _launch_attend(
        self,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        num_splits: int,
        all_splits: int,
        split_length: int,
        sinks: torch.Tensor | None,
        new_kv: tuple[torch.Tensor, torch.Tensor] | None,
        key_mask: torch.Tensor | None,
        first_tokens: torch.Tensor | None,
    ) -> None:
        on_device = self.step.on(self.device)
        new_key, new_value = (None, None) if new_kv is None else map(with_dense_dims, new_kv)
        mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
        with device_guard(self.device):
            attend_kernel[(self.query_tiles * num_splits, self.blocks.num_kv_heads, self.batch)](
                self.query,
                self.blocks.key,
                self.blocks.value,
                new_key,
                new_value,
                on_device.block_table,
                on_device.seq_lens,
                first_tokens,
                mask,
                sinks,
                out,
                lse,
                self.scale_log2,
                self.blocks.num_blocks * self.blocks.block_size,
                on_device.block_table.shape[1],
                0 if mask is None else mask.shape[1],
                self.query_length,
                split_length,
                num_splits,
                all_splits,
                self.query.stride()[:3],
                None if new_key is None else new_key.stride()[:3],
                None if new_value is None else new_value.stride()[:3],
                ROWS=self.rows,
                WINDOW=self.window or 0,
                IS_PARTIAL=all_splits > 1,
                **self.constants,
            )

    def _launch_merge(
        self,
        partial: torch.Tensor,
        partial_lse: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        num_splits = partial.shape[3]
        with device_guard(self.device):
            merge_kernel[(self.batch * self.query_length * self.num_heads,)](
                partial,
                partial_lse,
                sinks,
                out,
                lse,
                NUM_HEADS=self.num_heads,
                NUM_SPLITS=num_splits,
                SPLITS=triton.next_power_of_2(num_splits),
                VALUE_DIM=self.value_dim,
                WIDTH=triton.next_power_of_2(self.value_dim),
                num_warps=4,
            )


def _rows(launch: Launch, phase: str, group: int, query_length: int) -> int:
    """Rows of a program: a power of two from 16 on that holds all heads of a group for at least one query."""
    wanted = group * query_length if phase == "decode" else launch.rows
    return max(16, triton.next_power_of_2(group), min(launch.rows, triton.next_power_of_2(wanted)))
