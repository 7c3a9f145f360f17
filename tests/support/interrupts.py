"""Failures in the middle of something: Ctrl-C before any line of the package, or an operation that raises."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import hf_paged_cache

PACKAGE = str(Path(hf_paged_cache.__file__).parent)


class OutOfMemory(RuntimeError):
    """What an operation raises here."""


def interrupted_at(line: int, call: Callable[[], Any]) -> bool:
    """Calls something, with Ctrl-C before the `line`-th line of the package that it runs; whether it came so far.

    Finalizers are passed over: Python swallows what they raise.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        names = (frame.f_code.co_name, frame.f_back and frame.f_back.f_code.co_name)
        if not frame.f_code.co_filename.startswith(PACKAGE) or "__del__" in names:
            return None
        if event == "line":
            count += 1
            if count == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    is_interrupted = False
    try:
        call()
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        sys.settrace(before)
    if is_interrupted:
        gc.collect(1)  # a fork that was half-way made may be in a cycle with the error's frames
    return is_interrupted


class FailingOperation(TorchDispatchMode):
    """The tensor operation number `at` raises, as when a device is out of memory."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.at:
            raise OutOfMemory(str(func))
        return func(*args, **(kwargs or {}))


def failing_operation(at: int, call: Callable[[], Any]) -> bool:
    """Calls something whose tensor operation number `at` raises; whether it came so far."""
    try:
        with FailingOperation(at):
            call()
    except OutOfMemory:
        return True
    return False
