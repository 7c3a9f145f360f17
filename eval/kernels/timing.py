"""Times of single operations: on a GPU without what Python takes, and what Python takes without the GPU."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch

from eval.common.timing import now

Call = Callable[[], torch.Tensor | None]

# Of the last-level cache: what is rotated through is then never found in it.
ROTATED_CACHES = 3
# Launching a graph takes some microseconds, which many calls share.
MIN_GRAPH_CALLS = 16
COPIED_BYTES = {"cpu": 2**28, "cuda": 2**30}
# For systems that do not tell theirs, and for cards with a further cache that properties do not name (MI300).
CPU_CACHE, ROCM_CACHE = 2**26, 2**28


def last_level_cache(device: torch.device) -> int:
    """Bytes of the largest cache before memory."""
    if device.type == "cuda":
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        return max(l2_bytes, ROCM_CACHE) if torch.version.hip else l2_bytes
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) * 2**10 for size in sizes if size.endswith("K")), default=CPU_CACHE)


def rotated_bytes(device: torch.device) -> int:
    """Bytes to go through between two reads of the same ones."""
    return ROTATED_CACHES * last_level_cache(device)


def available_memory(device: torch.device) -> int:
    """Bytes that may still be allocated."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def round_of(device: torch.device, calls: Sequence[Call]) -> Callable[[], float]:
    """A function that makes all the calls in turn and returns the seconds of one.

    On the CPU it is the median. On a GPU it is the mean in a replay of a CUDA graph of all calls: the device then never
    waits for Python. All calls are made once before it returns, so that nothing is compiled while time is taken.
    """
    for call in calls:
        call()
    return _graph_round(calls) if device.type == "cuda" else lambda: statistics.median(map(_cpu_seconds, calls))


def _cpu_seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _graph_round(calls: Sequence[Call]) -> Callable[[], float]:
    torch.cuda.synchronize()
    captured = list(itertools.islice(itertools.cycle(calls), max(len(calls), MIN_GRAPH_CALLS)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in captured:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds() -> float:
        # The first replay keeps the device busy while the second, which is timed, is on its way.
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / len(captured)

    return seconds


def copy_round(device: torch.device) -> tuple[Callable[[], float], int]:
    """A round of copies of a large tensor, and the bytes that one copy reads and writes."""
    source = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return round_of(device, [lambda: target.copy_(source)]), 2 * source.nbytes


def host_seconds(device: torch.device, call: Call, calls: int) -> float:
    """Seconds until `call` returns, the mean of `calls` in a row. A GPU is waited for before and after, not between."""
    now(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - start
    now(device)
    return seconds / calls
