"""Define units that have split a module's parameters over the data axis and reduce their gradients themselves."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer


class Units(Protocol):
    """What a training step, checkpoints and optimisers ask of it.

    Attributes:
        groups: With the axes "replicate" and "shard", where groups of ranks have the same parts; else None.
        offload: Whether this rank's parts lie in the host's memory.
        deferred: Whether the module came without values, so that no rank is to have all of them.
    """

    groups: DeviceMesh | None
    offload: bool
    deferred: bool

    def backward(self, loss: Tensor) -> AbstractContextManager[None]:
        """Around the backward pass of a loss, after which gradients are averaged; a collective."""
        ...

    def optimizers_made(self, optimizers: Iterable[Optimizer]) -> None:
        """The optimisers of the fit exist now."""
        ...

    def before_update(self) -> None:
        """An optimiser is about to change the parts."""
        ...

    def after_update(self) -> None:
        """An optimiser has changed the parts."""
        ...

    def on_rows(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method while the module has this rank's parts as parameters."""
        ...

    def undo(self) -> None:
        """Give the module back as it was."""
        ...
