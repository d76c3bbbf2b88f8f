"""What a rank's device can hold and what it reaches, read from the device; what a person asks for always wins."""

import psutil
import torch

from lightning_amp.planning.rates import CPU_CORE, Rates, nearest_rates


def device_budget(device: torch.device, *, local_ranks: int) -> int:
    """Bytes that one rank may use.

    Args:
        device: The rank's device.
        local_ranks: Ranks on this node; on CPU they share its memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total) // max(1, local_ranks)


def device_rates(device: torch.device) -> tuple[Rates, str]:
    """Rates of a device, and a sentence that says whose they are where it is not a known one; else "".

    Args:
        device: The rank's device.
    """
    if device.type != "cuda":
        return CPU_CORE, ""
    found = torch.cuda.get_device_properties(device)
    return nearest_rates(
        found.name,
        memory_bytes=int(found.total_memory),
        tf32=torch.get_float32_matmul_precision() != "highest",
    )
