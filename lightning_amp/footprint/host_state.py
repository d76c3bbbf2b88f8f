"""Know the optimizers whose state is in host memory, and what updates parameters there.

A CPU's memory is the host's, so that no tensor shows on which side of a plan for a GPU it is.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

Update = Callable[[Optimizer, Mapping[int, Tensor]], None]
"""(optimizer, parameters by id) -> None: uses their gradients, and lets go of what it has of them."""
_UPDATES: WeakKeyDictionary[Optimizer, Update] = WeakKeyDictionary()


def keep_on_host(optimizer: Optimizer, update: Update | None) -> None:
    """Note that an optimizer's state is on the host, where `update` runs its step; None ends that."""
    if update is None:
        _UPDATES.pop(optimizer, None)
    else:
        _UPDATES[optimizer] = update


def update_on_host(optimizer: Optimizer) -> Update | None:
    """Return what updates an optimizer's parameters on the host; None if its state is on the device."""
    return _UPDATES.get(optimizer)


def on_device(optimizers: Iterable[Optimizer]) -> list[Any]:
    """Return the optimizers whose state is on the device."""
    return [one for one in optimizers if one not in _UPDATES]
