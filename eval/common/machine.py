"""What a measurement was made on, as far as it may be passed on: names and versions, no folders."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
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
        "triton": version("triton") if find_spec("triton") else "not installed",
        "transformers": transformers.__version__,
        "hf_paged_cache": _own_version(),
    }


def _own_version() -> str:
    """Of the installed package; on machines that only have its sources there is none."""
    try:
        return version("hf-paged-cache")
    except PackageNotFoundError:
        return "from its sources"


def describe_card(device: torch.device) -> dict[str, str | int]:
    """The same with what else matters to kernels on a card."""
    machine = describe_hardware(device)
    if device.type != "cuda":
        return machine | {"driver": "none", "toolkit": "none", "device_memory": 0, "multiprocessors": 0}
    properties = torch.cuda.get_device_properties(device)
    return machine | {
        "driver": _driver_version(),
        "toolkit": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        "device_memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }


def _driver_version() -> str:
    """As the vendor's own tool tells it; "unknown" where there is no such tool."""
    commands = {
        "nvidia-smi": ["--query-gpu=driver_version", "--format=csv,noheader"],
        "amd-smi": ["version"],
    }
    for tool, options in commands.items():
        if shutil.which(tool) is not None:
            answer = subprocess.run([tool, *options], capture_output=True, text=True, check=False)
            if answer.returncode == 0 and answer.stdout.strip():
                return answer.stdout.strip().splitlines()[0]
    return "unknown"
