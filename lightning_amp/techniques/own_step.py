"""Run an optimizer's own step for some of its parameters alone, where its state is."""

from collections.abc import Callable, Mapping
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_amp.default_dtype import types_of_the_update
from lightning_amp.footprint.host_state import update_on_host


def why_whole(optimizer: Optimizer) -> str:
    """Return why an optimizer cannot update its parameters a few at a time; "" if it can."""
    kind = type(optimizer)
    if isinstance(optimizer, LBFGS) or not kind.__module__.startswith("torch.optim"):
        return (
            f"the optimizer {kind.__name__!r} may read several gradients at once; allowed are those of torch.optim,"
            " without LBFGS"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "the optimizer's step is differentiated"
    return ""


def update(optimizer: Optimizer, parameters: Mapping[int, Tensor]) -> None:
    """Update parameters, given by their ids; gradients stay on them."""
    on_host = update_on_host(optimizer)
    if on_host is None:
        step_for(optimizer, parameters)
    else:
        on_host(optimizer, parameters)


def step_for(
    optimizer: Optimizer, tensors: Mapping[int, Tensor], changed: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> None:
    """Run an optimizer's step for some tensors, with the options of their groups.

    Args:
        tensors: What is updated, by the id of the parameter in whose place it is.
        changed: A group's options -> those of this step.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [
        {**changed(group), "params": own}
        for group in groups
        if (own := [tensors[id(p)] for p in group["params"] if id(p) in tensors])
    ]
    device = next(iter(tensors.values())).device.type
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False), types_of_the_update():
            # without the wrappers that run hooks of the optimizer, which belong to its whole step
            unwrap(type(optimizer).step)(optimizer)
    finally:
        optimizer.param_groups = groups
