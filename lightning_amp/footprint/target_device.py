"""Choose the settings of a computation by its device, and say for which type of device tensors are counted.

A CPU is fastest with tensors that stay in its cache, and with no more work than is needed. An accelerator waits for
every launch of an operator, and for every number that the host wants to see: few operators on large tensors are
fastest there, and nothing may look at the data. What is computed is the same.

A tensor's device decides. Tensors without values (meta) stand for those on a CPU. `settings_of` decides for a while in
their place: so a machine without an accelerator can plan for one, count its operators, and test what they compute.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from lightning_amp.holding import holding

_DEVICE_TYPE: ContextVar[str | None] = ContextVar("device type whose settings are taken", default=None)


def launches_operators(like: Tensor) -> bool:
    """Whether the tensor's device has its operators launched: no CPU's, unless `settings_of` says so."""
    return (_DEVICE_TYPE.get() or like.device.type) not in ("cpu", "meta")


@contextmanager
def settings_of(device_type: str) -> Iterator[None]:
    """Take the settings of another type of device, such as "cuda", in this thread while the context is entered."""
    with holding(_DEVICE_TYPE, device_type):
        yield
