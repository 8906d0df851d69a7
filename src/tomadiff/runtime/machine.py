"""What a measured time depends on, beside the model: the processor, and the versions of what runs on it."""

from __future__ import annotations

import platform
from pathlib import Path

import diffusers
import torch


def wait_for(device: torch.device) -> None:
    """Until a device has done everything that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    else:
        torch.get_device_module(device).synchronize()


def out_of_memory(error: Exception) -> bool:
    """Whether that is what an error is about: on the CPU, torch has no class for it."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def processor(device: str | torch.device) -> str:
    """The name of the GPU or CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions() -> dict[str, str]:
    """+cpu or +cu126 is the same torch, and the device is known anyway."""
    from tomadiff import __version__  # not there yet while the package is imported

    return {
        "tomadiff": __version__,
        "torch": torch.__version__.split("+")[0],
        "diffusers": diffusers.__version__,
    }
