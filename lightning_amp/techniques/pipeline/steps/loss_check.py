"""Compare the loss of a batch with those of its micro-batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp.errors import DataError

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
HALF = 1e-2
"""Of other types, and under autocast: difference of two losses that counts as rounding, relative to the larger."""


def single(value: Any) -> Any:
    """A tensor of half precision in single precision; anything else as it is."""
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


def compare(loss: Tensor, losses: list[Tensor], weights: Any, *, rounds: bool) -> DataError | None:
    """What is wrong with the loss of a batch, if it is no mean of the losses of its micro-batches with these weights.

    With `rounds` they are of autocast.
    """
    mean = float(sum(weight * float(own) for weight, own in zip(weights, losses, strict=True)))
    found = float(loss)
    rounding = HALF if rounds else TOLERANCE.get(loss.dtype, HALF)
    # written so that nan, which one process would train on too, passes where both are
    if abs(found - mean) <= rounding * max(abs(found), *(abs(float(own)) for own in losses)):
        return None
    if found != found and mean != mean:
        return None
    return DataError(
        f"a batch was trained on in {len(losses)!r} micro-batches, whose losses have a mean over samples of"
        f" {mean!r}, and the loss of the batch is {found!r}: it is no mean over samples. A mean over entries"
        " that are not masked has other weights; a sum, a contrastive loss and one that draws random"
        " numbers cannot be cut. Nothing was changed: take schedule='gpipe', which computes the loss of the"
        " whole batch at once, or micro_batches=1, or leave 'pipeline' out"
    )


@contextmanager
def evaluating(module: nn.Module, evaluates: bool) -> Iterator[None]:
    """A module in evaluation mode, if it `evaluates`."""
    modes = [(part, part.training) for part in module.modules()]
    if evaluates:
        module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
