"""Run a module's steps on a batch whose tensors are split over ranks."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from lightning_amp.techniques.sequence.split_batch import HowToSplit
from lightning_amp.techniques.sharded_step import run_sharded


def step_of(step: Callable[..., Any], name: str, how: HowToSplit) -> Callable[..., Any]:
    """A step of a LightningModule that splits its batch, and returns whole tensors.

    Args:
        step: The module's.
        name: Of the step.
        how: Which dims are split.
    """

    @wraps(step)
    def split(module: nn.Module, batch: Any, *args: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            return step(module, how.batch(batch), *args, **kwargs)

        return run_sharded(name, call, module, how.axes)

    return split
