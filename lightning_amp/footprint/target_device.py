"""Choose settings of a computation by device type, and override the type for which tensors are counted.

A CPU is fastest with tensors that fit its cache and with the least work. An accelerator has a launch overhead for every
operator, and waits when the host reads a value. It is fastest with few operators on large tensors and no reads of data.
The results are the same.

The device of a tensor decides; meta tensors count as CPU tensors. `settings_of` overrides this, so that a machine
without an accelerator can plan for one, count its operators and test their results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from lightning_amp._torch import FakeTensor
from lightning_amp.holding import holding, replacing

_DEVICE_TYPE: ContextVar[str | None] = ContextVar("device type whose settings are taken", default=None)


def launches_operators(like: Tensor) -> bool:
    """Whether the tensor's device launches operators asynchronously: not a CPU, unless `settings_of` overrides it."""
    return device_type_of(like) not in ("cpu", "meta")


def device_type_of(like: Tensor) -> str:
    """Return the type of the tensor's device, or the one of `settings_of`."""
    return _DEVICE_TYPE.get() or like.device.type


def counts_for_accelerator() -> bool:
    """Whether `settings_of` has named another type of device than a CPU."""
    return _DEVICE_TYPE.get() not in (None, "cpu", "meta")


@contextmanager
def settings_of(device_type: str) -> Iterator[None]:
    """Use the settings of another device type, such as "cuda", in this thread while the context is entered."""
    with holding(_DEVICE_TYPE, device_type):
        yield


@contextmanager
def optimizers_of_device() -> Iterator[None]:
    """Let torch's optimizers take the form on the host's tensors that is their default on the device of `settings_of`.

    On an accelerator that is one operator for many tensors (foreach), whose temporaries are as large as all parameters.
    """
    if not counts_for_accelerator():
        yield
        return
    kinds = [*vars(torch_optimizer)["_foreach_supported_types"], FakeTensor]
    own = {"_foreach_supported_types": kinds, "_get_foreach_kernels_supported_devices": lambda: ["cpu"]}
    with replacing(torch_optimizer, **own):
        yield
