"""Imports installed packages from scripts that may have the name of one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


def import_installed(name: str) -> ModuleType:
    """The module, not looked for in this folder, which Python puts before all others when it runs a script of it.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    here = Path(__file__).resolve().parent
    folders = sys.path[:]
    sys.path[:] = [folder for folder in folders if Path(folder).resolve() != here]
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = folders
