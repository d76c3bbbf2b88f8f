"""What a rank's device can hold and what it reaches, read from the device; what a person asks for always wins."""

from dataclasses import replace

import psutil
import torch

from lightning_amp.planning.plan.model_shape import ModelShape
from lightning_amp.planning.time.device_rates import CPU_CORE, Rates, nearest_rates


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


def with_threads(shape: ModelShape, device: torch.device) -> ModelShape:
    """The shape of a model that is to run on a device, with the threads that torch has there.

    Args:
        shape: The model.
        device: The rank's device.
    """
    if shape.decoder is None or device.type != "cpu":
        return shape
    return replace(shape, decoder=replace(shape.decoder, threads=torch.get_num_threads()))
