"""What `eval.kernels` measures: attention alone, rows that share a prompt, and what Python takes for a call."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from hf_paged_kernels.api import choose

from eval.common.timing import interleave, median_ratio
from eval.kernels.peers import Contender
from eval.kernels.problems import Problem, Shape, checked_round
from eval.kernels.timing import Call, available_memory, copy_round, host_seconds, rotated_bytes

COPY = "copy"
SHARED = "shared"
UNSHARED_SPLITS = (1, 2, 4, 8, 16)
# Few enough to be queued without waiting for the GPU, with several launches a call.
LAUNCHED_CALLS = 200

Row = dict[str, Any]
Times = dict[str, list[float]]


@dataclass
class KernelBench:
    """Measures cases and collects what comes out.

    rotated_bytes: of the layers that calls go through in turn. launched_calls: of which the host's time is taken.
    rows: one for each case and implementation. failures: what could not be measured and why, each said once.
    copy_seconds: of copies of a large tensor, which take turns with everything else.
    """

    device: torch.device
    contenders: Sequence[Contender]
    repeats: int
    rotated_bytes: int | None = None
    launched_calls: int | None = None
    rows: list[Row] = field(default_factory=list)
    failures: dict[str, None] = field(default_factory=dict)
    copy_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.rotated_bytes is None:
            self.rotated_bytes = rotated_bytes(self.device)
        if self.launched_calls is None:
            self.launched_calls = LAUNCHED_CALLS
        self.copy, self.copied_bytes = copy_round(self.device)

    @property
    def copy_bytes_per_second(self) -> float | None:
        """Read and written together; `None` if nothing was measured."""
        return self.copied_bytes / statistics.median(self.copy_seconds) if self.copy_seconds else None

    def attention(self, shape: Shape) -> None:
        """All contenders on one shape."""
        problem = self._problem(shape)
        if problem is None:
            return
        able = {contender.name: contender for contender in self.contenders if self._is_able(contender, problem)}
        times = self._take_turns(
            {name: partial(checked_round, problem, contender.prepare) for name, contender in able.items()}, str(shape)
        )
        best_sdpa = _fastest({name: seconds for name, seconds in times.items() if able[name].kind == "sdpa"})
        for name, contender in able.items():
            row = {"section": "attention", **_identity(shape), "implementation": name, "kind": contender.kind}
            # What is not ours reads the same numbers in the model's dtype.
            kv_bytes = shape.kv_bytes if contender.kind == "paged" else replace(shape, kv="raw").kv_bytes
            row |= {"context": shape.context, "layers": len(problem.layers), "kv_bytes": kv_bytes}
            if name in times:
                seconds, copy_seconds = times[name], self.copy_seconds[-self.repeats :]
                row |= _microseconds(seconds)
                row["bytes_per_second"] = kv_bytes / statistics.median(seconds)
                row["copy_ratio"] = median_ratio(copy_seconds, seconds) * kv_bytes / self.copied_bytes
                row["sdpa_ratio"] = None if best_sdpa is None else median_ratio(seconds, best_sdpa)
            self.rows.append(row)

    def shared_prompt(self, shape: Shape) -> None:
        """Rows that share their prompt: read once, and read by each row."""
        where = f"shared prompt of {shape.shared_prompt} tokens, {shape}"
        try:
            choose(self.device, "triton")
        except ValueError as error:
            self.failures[f"shared prompt: {error}"] = None
            return
        problem, separate = self._problem(shape), self._problem(replace(shape, shared_prompt=0))
        if problem is None or separate is None:
            return
        if not _shares_reads(problem):
            self.failures[f"{where}: too little is shared for one read to be faster; choose a longer --prompt"] = None
            return
        unshared = {f"unshared, num_splits={num_splits}": num_splits for num_splits in UNSHARED_SPLITS}
        runs = {
            name: partial(checked_round, problem, partial(_triton_calls, num_splits))
            for name, num_splits in {SHARED: None, **unshared}.items()
        }
        runs["unshared, blocks of their own"] = partial(checked_round, separate, partial(_triton_calls, None))
        times = self._take_turns(runs, where)
        best_unshared = _fastest({name: times[name] for name in unshared if name in times})
        for name in runs:
            row = {"section": "shared", **_identity(shape), "implementation": name, "prompt": shape.shared_prompt}
            if name in times:
                row |= _microseconds(times[name])
                row["unshared_ratio"] = None if best_unshared is None else median_ratio(times[name], best_unshared)
            self.rows.append(row)

    def launch(self, shape: Shape) -> None:
        """What a call takes on the host, where the device has next to nothing to do."""
        problem = Problem(shape, self.device)
        ours = [each for each in self.contenders if each.kind == "paged" and self._is_able(each, problem)]
        sdpa = [each for each in self.contenders if each.kind == "sdpa"][:1]
        calls = {("attend", each.name): each.prepare(problem)[0] for each in ours + sdpa}
        calls |= {("write", each.name): each.write(problem) for each in ours if each.write is not None}
        for call in calls.values():
            call()
        runs = {key: partial(host_seconds, self.device, call, self.launched_calls) for key, call in calls.items()}
        times, failures = interleave(runs, self.repeats)
        self.failures |= {f"{name}, to {what}: {reason}": None for (what, name), reason in failures.items()}
        for (what, name), seconds in times.items():
            row = {"section": "launch", **_identity(shape), "implementation": name, "call": what}
            self.rows.append(row | _microseconds(seconds))

    def _problem(self, shape: Shape) -> Problem | None:
        needed, available = shape.memory_needed(self.rotated_bytes), available_memory(self.device)
        if needed > available:
            self.failures[f"{shape}: needs {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"] = None
            return None
        return Problem(shape, self.device, self.rotated_bytes)

    def _is_able(self, contender: Contender, problem: Problem) -> bool:
        refusal = contender.refusal(problem)
        if refusal is not None:
            self.failures[f"{contender.name}: {refusal}"] = None
        return refusal is None

    def _take_turns(self, runs: Mapping[str, Callable[[], Callable[[], float]]], where: str) -> Times:
        """Makes each run ready, which checks it, and then times those that are right, and copies, in turns."""
        ready, failures = interleave(runs, 1)
        rounds = {name: one_round for name, (one_round,) in ready.items()}
        times, later_failures = interleave({**rounds, COPY: self.copy}, self.repeats)
        self.copy_seconds += times.pop(COPY)
        failures |= later_failures
        self.failures |= {f"{name} ({where}): {reason}": None for name, reason in failures.items()}
        return times


def _identity(shape: Shape) -> Row:
    return {"heads": str(shape.heads), "dtype": shape.dtype_name, "kv": shape.kv, "batch": shape.batch}


def _microseconds(seconds: Sequence[float]) -> Row:
    return {"microseconds": 1e6 * statistics.median(seconds), "microseconds_min": 1e6 * min(seconds)}


def _fastest(times: Times) -> list[float] | None:
    return min(times.values(), key=statistics.median, default=None)


def _triton_calls(num_splits: int | None, problem: Problem) -> list[Call]:
    """Calls of the Triton kernels; a number of splits forbids shared reads."""
    from hf_paged_kernels import triton

    attend = partial(triton.paged_attention, step=problem.step, scale=problem.scale, num_splits=num_splits)
    return [partial(attend, problem.query, blocks) for blocks in problem.layers]


def _shares_reads(problem: Problem) -> bool:
    """Whether the Triton kernels read the shared prompt of a problem once."""
    from hf_paged_kernels.triton.device import architecture
    from hf_paged_kernels.triton.launch import select
    from hf_paged_kernels.triton.shared import find_shared_runs

    heads, bits = problem.shape.heads, 8 * problem.shape.dtype.itemsize
    sequences = select(architecture(problem.device), "decode", heads.head_dim, bits).rows // heads.group
    return sequences > 1 and find_shared_runs(problem.step, sequences, heads.num_kv_heads) is not None
