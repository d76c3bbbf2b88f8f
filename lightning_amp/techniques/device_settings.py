"""Choose the settings of a computation by its device, and the rates of a device that torch names.

A CPU is fastest with tensors that stay in its cache, and with no more work than is needed. An accelerator waits for
every launch of an operator, and for every number that the host wants to see: few operators on large tensors are
fastest there, and nothing may look at the data. What is computed is the same.

A tensor's device decides. Tensors without values (meta) stand for those on a CPU. `settings_of` decides for a while in
their place: so a machine without an accelerator can count the operators of one, and test what they compute.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from lightning_amp._torch import multiplies_in_tf32
from lightning_amp.costs.device_rates import CPU_CORE, Rates, nearest_rates, products_under
from lightning_amp.errors import InstallError

_DEVICE_TYPE: ContextVar[str | None] = ContextVar("device type whose settings are taken", default=None)


def launches_operators(like: Tensor) -> bool:
    """Whether the tensor's device has its operators launched: no CPU's, unless `settings_of` says so."""
    return (_DEVICE_TYPE.get() or like.device.type) not in ("cpu", "meta")


@contextmanager
def settings_of(device_type: str) -> Iterator[None]:
    """Take the settings of another type of device, in this thread and as long as the context is entered.

    Args:
        device_type: "cpu", "cuda" or another one of torch's.

    Raises:
        InstallError: An empty name.
    """
    if not device_type:
        raise InstallError(f"settings of {device_type!r} do not exist; name a type of device, such as 'cpu' or 'cuda'")
    token = _DEVICE_TYPE.set(device_type)
    try:
        yield
    finally:
        _DEVICE_TYPE.reset(token)


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
