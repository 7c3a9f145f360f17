"""The device that kernels run on."""

from functools import lru_cache

import torch


@lru_cache
def architecture(device: torch.device) -> str:
    """Name of a card as the launch table has it; `"any"` for a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return "any"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a card."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def device_guard(device: torch.device) -> torch.cuda.device:
    """Makes a tensor's device the current one, in whose context Triton launches."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def with_dense_dims(states: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it, whose last dimension has stride 1."""
    return states if states.stride(-1) == 1 else states.contiguous()
