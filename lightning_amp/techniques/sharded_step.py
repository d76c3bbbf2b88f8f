"""Run a LightningModule's step on sharded tensors: what comes out of it, and what metrics get, is whole."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_amp.dist.dispatch.guards import guarded
from lightning_amp.dist.sharded_tensor import ShardedTensor
from lightning_amp.dist.splits import MeshAxis
from lightning_amp.errors import ShardError
from lightning_amp.footprint.copies.fake_copy import map_tensors
from lightning_amp.holding import holding
from lightning_amp.techniques.put_methods import methods_put


def run_sharded(name: str, step: Callable[[], Any], module: nn.Module, axes: Sequence[MeshAxis]) -> Any:
    """What a step returns, with its tensors whole.

    Args:
        name: Of the step.
        step: Calls it.
        module: Whose step it is.
        axes: All axes that tensors of the step may be split over.

    Raises:
        ShardError: A loss for training that is split.
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
"""Whether a step runs. One that it calls gets what it is given, and returns it with gradients: it is a part of it."""


def whole(x: Tensor) -> Tensor:
    """A tensor without splits; it is not trained on."""
    if not isinstance(x, ShardedTensor):
        return x
    # what callbacks and loggers get is not trained on
    with torch.no_grad():
        return x.full_tensor()


@contextmanager
def whole_in_metrics(module: nn.Module) -> Iterator[None]:
    """Let the module's metrics see whole tensors: they add up counts of what they are given."""

    def with_whole(update: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return update(*map_tensors(args, lambda _, x: whole(x)), **map_tensors(kwargs, lambda _, x: whole(x)))

        return call

    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    with methods_put((metric, {"update": with_whole(metric.update)}) for metric in metrics):
        yield


def tensors(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, with their paths."""
    found = dict[str, Tensor]()
    map_tensors(batch, found.setdefault)
    return iter(found.items())
