"""Where the Triton kernels run in tests: on the card if there is one, in the interpreter on the CPU if not.

Tests lay out their inputs in main memory and compare results there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import wraps
from typing import Any

import torch
from hf_paged_kernels import Blocks

ON_CARD = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
# Backends whose calls stay in main memory.
HOST_BACKENDS = ("cpu", "reference")


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which is given tensors in main memory, as it runs on the card; itself where there is none."""
    return moving(function, DEVICE) if ON_CARD else function


def moving(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`function` on copies of its tensors. Results come back, and so does what it changes in blocks."""

    @wraps(function)
    def call(*inputs: Any, **options: Any) -> Any:
        if options.get("backend") in HOST_BACKENDS:
            return function(*inputs, **options)
        copies = copied(inputs, device)
        result = function(*copies, **copied(options, device))
        for blocks, copy in zip(_blocks_in(inputs), _blocks_in(copies), strict=True):
            for plane, changed in zip(_all_planes(blocks), _all_planes(copy), strict=True):
                plane.copy_(changed)
        return copied(result, torch.device("cpu"))

    return call


def copied(value: Any, device: torch.device) -> Any:
    """Tensors of a value, and of blocks, sequences and dictionaries in it, on a device. Views stay views."""
    if isinstance(value, torch.Tensor):
        storage = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
        moved = storage.to(device, copy=True)
        return moved.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, Blocks):
        tensors = {field.name: copied(getattr(value, field.name), device) for field in fields(value)}
        return replace(value, **tensors)
    if isinstance(value, list | tuple):
        return type(value)(copied(item, device) for item in value)
    return {name: copied(item, device) for name, item in value.items()} if isinstance(value, dict) else value


def _blocks_in(inputs: tuple[Any, ...]) -> Iterator[Blocks]:
    for value in inputs:
        if isinstance(value, Blocks):
            yield value
        elif isinstance(value, list | tuple):
            yield from _blocks_in(tuple(value))


def _all_planes(blocks: Blocks) -> Iterator[torch.Tensor]:
    """Planes of blocks, and of blocks in them."""
    for field in fields(blocks):
        value = getattr(blocks, field.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Blocks):
            yield from _all_planes(value)
