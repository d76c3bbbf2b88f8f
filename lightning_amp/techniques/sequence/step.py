"""Run a module's steps on a batch whose tensors are split over ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_amp.dist.guards import guarded
from lightning_amp.dist.sharded_tensor import ShardedTensor
from lightning_amp.errors import ShardError
from lightning_amp.techniques.sequence.split_batch import HowToSplit, mapped

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def step_of(step: Callable[..., Any], name: str, how: HowToSplit) -> Callable[..., Any]:
    """A step of a LightningModule that splits its batch, and returns whole tensors.

    Args:
        step: The module's.
        name: Of the step.
        how: Which dims are split.
    """

    @wraps(step)
    def split(module: nn.Module, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with guarded(how.axes), whole_in_metrics(module):
            found = step(module, how.batch(batch), *args, **kwargs)
            loss = found.get("loss") if isinstance(found, dict) else found
            if name == "training_step" and isinstance(loss, ShardedTensor) and loss.splits:
                raise ShardError(
                    f"{name!r} returned a loss with {loss.splits}; a loss is a number: take the mean or the sum of it"
                )
            return mapped(found, lambda _, x: whole(x))

    return split


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
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    updates = [metric.update for metric in metrics]

    def with_whole(update: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return update(*mapped(args, lambda _, x: whole(x)), **mapped(kwargs, lambda _, x: whole(x)))

        return call

    for metric, update in zip(metrics, updates, strict=True):
        metric.update = with_whole(update)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for metric, update in zip(metrics, updates, strict=True):
            metric.update = update  # type: ignore[method-assign]
