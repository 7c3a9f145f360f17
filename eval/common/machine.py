"""What a measurement was made on, as far as it may be passed on: names and versions, no folders."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel


def processor_name() -> str:
    """The processor's model name; on systems that do not tell it, its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe(model: PreTrainedModel, name: str) -> dict[str, str | int]:
    """Machine, versions, and the model under `name`: a hub id, or a folder, of which only the last part is kept."""
    return {
        "model": Path(name).resolve().name if Path(name).exists() else name,
        "dtype": str(model.dtype).removeprefix("torch."),
        **describe_hardware(model.device),
    }


def describe_hardware(device: torch.device) -> dict[str, str | int]:
    """Machine and versions."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": processor_name(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_paged_cache": version("hf-paged-cache"),
    }
