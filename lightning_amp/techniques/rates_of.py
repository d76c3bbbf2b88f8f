"""Look up the rates of a device that torch names."""

import torch

from lightning_amp._torch import multiplies_in_tf32
from lightning_amp.costs.device_rates import CPU_CORE, Rates, nearest_rates, products_under


def rates_of(device: torch.device, precision: str = "32-true") -> tuple[Rates, str]:
    """Rates of a device, of a CPU those of one core, and a sentence that says whose they are where it is not known.

    Args:
        precision: As a Trainer has it, which says what products are computed in.
    """
    if device.type != "cuda":
        return CPU_CORE, ""
    found = torch.cuda.get_device_properties(device)
    products = products_under(precision)
    if products == "float32" and multiplies_in_tf32():
        products = "tf32"
    return nearest_rates(found.name, memory_bytes=int(found.total_memory), products=products)
