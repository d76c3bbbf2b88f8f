"""What a rank's device can hold, read from the device; a person's `device_memory` always wins."""

import psutil
import torch


def device_budget(device: torch.device, *, local_ranks: int) -> int:
    """Bytes that one rank may use.

    Args:
        device: The rank's device.
        local_ranks: Ranks on this node; on CPU they share its memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total) // max(1, local_ranks)
