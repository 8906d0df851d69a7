"""What a measured time depends on besides the model: the processor and the versions of the libraries."""

from __future__ import annotations

import platform
from pathlib import Path

import diffusers
import torch


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished all work in its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    else:
        torch.get_device_module(device).synchronize()


def out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out; on the CPU, torch has no exception class for that."""
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
    """Versions of the libraries; torch's without a suffix like +cu126, as the device is recorded anyway."""
    from tomadiff import __version__  # here, since it is not yet defined while the package is imported

    return {
        "tomadiff": __version__,
        "torch": torch.__version__.split("+")[0],
        "diffusers": diffusers.__version__,
    }
