"""Test whether an optimiser updates every element of a parameter by that element's gradient and state alone."""

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

STEPS = 3
SHAPE = (4, 6)


def mixes_elements(optimizer: Optimizer, *, flat: bool) -> bool | None:
    """Whether two parts of a parameter are trained otherwise than the whole; None where it cannot be tried.

    An optimiser of the same kind, with the same options, takes three steps on the CPU; the run's is left as it is.

    Args:
        optimizer: Of any class.
        flat: Whether a rank has elements in a row, as of a flattened parameter; else it has rows.
    """
    draw = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(SHAPE, generator=draw, dtype=torch.float64) for _ in range(STEPS + 1))
    try:
        with torch.random.fork_rng(devices=[]):
            whole = _trained(optimizer, [values], [[grad] for grad in gradients])
            halves = [_halves(value, flat) for value in (values, *gradients)]
            parts = _trained(optimizer, halves[0], halves[1:])
    except Exception:
        return None
    return not torch.allclose(parts, whole, rtol=1e-9, atol=1e-12)


def _halves(x: Tensor, flat: bool) -> list[Tensor]:
    return list((x.flatten() if flat else x).chunk(2))


def _trained(optimizer: Optimizer, values: list[Tensor], gradients: list[list[Tensor]]) -> Tensor:
    """All elements after a few steps."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    other: Any = object.__new__(type(optimizer))
    # a scheduler puts its own step on the instance, and hooks belong to the run
    other.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(other, name, OrderedDict())
    other.state = defaultdict(dict)
    other.param_groups = [{**optimizer.param_groups[0], "params": parameters}]
    for step in gradients:
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = grad.clone()
        other.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])
