"""Look up the arithmetic and memory rates of a torch device."""

import torch

from lightning_amp._torch import multiplies_in_tf32
from lightning_amp.costs.device_rates import CPU_CORE, Rates, nearest_rates, products_under


def rates_of(device: torch.device, precision: str = "32-true") -> tuple[Rates, str]:
    """Return the rates of a device (of one core of a CPU), and a sentence if they are another device's, or "".

    Args:
        precision: As in a Trainer; it determines the dtype of matrix products.
    """
    if device.type != "cuda":
        return CPU_CORE, ""
    found = torch.cuda.get_device_properties(device)
    products = products_under(precision)
    if products == "float32" and multiplies_in_tf32():
        products = "tf32"
    return nearest_rates(found.name, memory_bytes=int(found.total_memory), products=products)
