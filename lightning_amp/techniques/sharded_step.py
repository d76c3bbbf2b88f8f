"""Run a step of a LightningModule on sharded tensors, and gather what the step returns and what metrics receive."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_amp.errors import ShardError
from lightning_amp.footprint.copies.fake_copy import map_tensors
from lightning_amp.holding import holding
from lightning_amp.sharding.dispatch.guards import guarded
from lightning_amp.sharding.sharded_tensor import ShardedTensor
from lightning_amp.sharding.splits import MeshAxis
from lightning_amp.techniques.put_methods import methods_put


def run_sharded(name: str, step: Callable[[], Any], module: nn.Module, axes: Sequence[MeshAxis]) -> Any:
    """Run a step and return its result, with all tensors gathered.

    Args:
        name: Name of the step, such as "training_step".
        step: Function that runs it.
        module: The LightningModule.
        axes: All mesh axes over which tensors of the step may be sharded.

    Raises:
        ShardError: The training loss is sharded.
    """
    with holding(RUNNING, True), guarded(axes), whole_in_metrics(module):
        found = step()
        loss = found.get("loss") if isinstance(found, dict) else found
        if name == "training_step" and isinstance(loss, ShardedTensor) and loss.splits:
            raise ShardError(
                f"{name!r} returned a loss with {loss.splits}; a loss is a number: take the mean or the sum of it"
            )
        return map_tensors(found, lambda _, x: whole(x))


RUNNING: ContextVar[bool] = ContextVar("RUNNING", default=False)
"""Whether a step runs. A step that another step calls is a part of it: it gets and returns tensors with gradients."""


def whole(x: Tensor) -> Tensor:
    """Gather a sharded tensor, without gradients; other tensors are returned unchanged."""
    if not isinstance(x, ShardedTensor):
        return x
    # callbacks and loggers do not train on it
    with torch.no_grad():
        return x.full_tensor()


@contextmanager
def whole_in_metrics(module: nn.Module) -> Iterator[None]:
    """Gather the arguments of the module's metrics, because metrics count the elements that they receive."""

    def with_whole(update: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return update(*map_tensors(args, lambda _, x: whole(x)), **map_tensors(kwargs, lambda _, x: whole(x)))

        return call

    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    with methods_put((metric, {"update": with_whole(metric.update)}) for metric in metrics):
        yield


def tensors(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch, with their paths."""
    found = dict[str, Tensor]()
    map_tensors(batch, found.setdefault)
    return iter(found.items())
