"""What goes between host and device: a step's metadata, copies from pinned and pageable memory, and waits."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from hf_paged_kernels.step import upload

from eval.card.kernels import device_of
from eval.card.model import load
from eval.card.settings import Settings
from eval.card.worker import Measured, Piece
from eval.common.timing import interleave, now
from eval.common.variants import BASELINE, VARIANTS, Variant, cache_argument, plain_generation, quantized_variant
from eval.kernels.problems import BLOCK_SIZE
from eval.kernels.timing import host_seconds, round_of

CALLS = 100
WATCHED_PROMPT, WATCHED_STEPS = 100, 8


def make_pieces(settings: Settings) -> Mapping[str, Piece]:
    """A piece for each size of a step, for each size of copies, and for the waits of a decode step."""
    device = device_of(settings)
    pieces: dict[str, Piece] = {}
    for batch, context in settings.steps:
        name = f"metadata of a step, batch {batch}, context {context}"
        pieces[name] = partial(_metadata, batch, context, device, settings.repeats)
    for num_bytes in settings.copied_bytes:
        pieces[f"copies of {num_bytes} bytes"] = partial(_copies, num_bytes, device, settings.repeats)
    return pieces | {"waits": partial(_waits, settings, device)}


def _metadata(batch: int, context: int, device: torch.device, repeats: int) -> Measured:
    """One packed upload, as a step does it, beside an upload from pageable memory for each array."""
    width = -(-context // BLOCK_SIZE)
    table = np.arange(1, batch * width + 1, dtype=np.int32).reshape(batch, width)
    arrays = (table, np.full(batch, context, dtype=np.int32), table[:, -1:] * BLOCK_SIZE)

    def one_by_one() -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(device) for array in arrays]

    calls: dict[str, Callable[[], list[torch.Tensor]]] = {
        "one pinned upload": lambda: upload(arrays, device),
        "an upload for each array": one_by_one,
    }
    runs = {name: partial(_host_and_device, device, call) for name, call in calls.items()}
    times, failures = interleave(runs, repeats)
    rows = [
        {
            "section": "metadata",
            "way": name,
            "batch": batch,
            "context": context,
            "bytes": sum(array.nbytes for array in arrays),
            "host_us": 1e6 * statistics.median(host for host, _ in pairs),
            "done_us": 1e6 * statistics.median(done for _, done in pairs),
        }
        for name, pairs in times.items()
    ]
    return Measured(rows, [f"{name}: {reason}" for name, reason in failures.items()])


def _host_and_device(device: torch.device, call: Callable[[], object]) -> tuple[float, float]:
    """Seconds until a call returns, and until the device has done it too."""
    host = host_seconds(device, call, CALLS)
    done = []
    for _ in range(CALLS):
        start = now(device)
        call()
        done.append(now(device) - start)
    return host, statistics.median(done)


def _copies(num_bytes: int, device: torch.device, repeats: int) -> Measured:
    """Copies of one tensor in each direction."""
    on_host, on_device = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8).to(device)
    pairs = {"device to device": (on_device, torch.empty_like(on_device))}
    failures = []
    if device.type == "cuda":
        pinned = on_host.pin_memory()
        pairs |= {
            "host to device, pinned": (pinned, on_device),
            "host to device, pageable": (on_host, on_device),
            "device to host, pinned": (on_device, pinned),
            "device to host, pageable": (on_device, on_host),
        }
    else:
        failures.append("copies between host and device: there is no card")
    runs = {name: partial(_copy_seconds, device, *pair) for name, pair in pairs.items()}
    times, reasons = interleave(runs, repeats)
    rows = [
        {
            "section": "copies",
            "way": name,
            "bytes": num_bytes,
            "us": 1e6 * statistics.median(seconds),
            "bytes_per_second": num_bytes / statistics.median(seconds),
        }
        for name, seconds in times.items()
    ]
    return Measured(rows, failures + [f"{name}: {reason}" for name, reason in reasons.items()])


def _copy_seconds(device: torch.device, source: torch.Tensor, target: torch.Tensor) -> float:
    """Seconds of one copy, the mean of many that are queued."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    if source.device == target.device:
        return round_of(device, [copy])()
    start = now(device)
    for _ in range(CALLS):
        copy()
    return (now(device) - start) / CALLS


def _waits(settings: Settings, device: torch.device) -> Measured:
    """How often the host waits for the device in a decode step: PyTorch warns of each time."""
    if device.type != "cuda":
        return Measured(failures=["waits for the device: there is no card"])
    model, _ = load(settings, device)
    variants = [
        VARIANTS[BASELINE],
        VARIANTS["paged"],
        *(quantized_variant(kv) for kv in settings.formats if kv != "raw"),
    ]
    return Measured([_waits_with(model, variant) for variant in variants])


@torch.no_grad()
def _waits_with(model: torch.nn.Module, variant: Variant) -> dict[str, object]:
    prompt = torch.arange(WATCHED_PROMPT, device=model.device)[None] + 1
    with plain_generation(model, variant.attn_implementation):
        cache = variant.make(model, {}, 1)
        argument = cache_argument(model)
        model(prompt, **{argument: cache})
        # The first step compiles kernels.
        model(prompt[:, :1], **{argument: cache})
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(WATCHED_STEPS):
                    model(prompt[:, :1], **{argument: cache})
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing" in str(warning.message) for warning in caught)
    return {"section": "waits", "way": variant.cache, "steps": WATCHED_STEPS, "waits": waits}
