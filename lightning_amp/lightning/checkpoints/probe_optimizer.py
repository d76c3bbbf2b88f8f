"""Test whether an optimiser updates an element, or a parameter, by its own gradient and state alone."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_amp.lightning._compat import rank_zero_warn

STEPS = 3
SHAPE = (4, 6)
LR = 0.01
NOT_TRIED = ("params", "param_names", "lr", "initial_lr", "max_lr", "min_lr")
"""Options of a group that say nothing of how an update is computed."""


def mixes(
    optimizer: Optimizer, known: Sequence[str], tried: Callable[[Optimizer], bool | None], each: str, technique: str
) -> bool:
    """Whether an optimiser's update of one element (or parameter) depends on others; warns where it cannot be tried.

    Args:
        optimizer: Of any class; those of torch are not tried.
        known: Names of classes of torch of which it does.
        tried: `mixes_elements` or `mixes_parameters`.
        each: "element" or "parameter", for the warning.
        technique: The one that splits them over ranks, for the warning.
    """
    kind = type(optimizer)
    # a class of another package may have the name, and be tried
    if any(base.__name__ in known and base.__module__.startswith("torch.optim") for base in kind.__mro__):
        return True
    if kind.__module__.startswith("torch.optim"):
        return False
    mixed = tried(optimizer)
    if mixed is None:
        rank_zero_warn(
            f"It could not be tried whether the optimizer {kind.__name__!r} updates each {each} separately. If it does"
            f" not, {technique}, which splits the {each}s over ranks, trains otherwise than one device. Leave"
            f" {technique} out if you do not know."
        )
    return bool(mixed)


def mixes_elements(optimizer: Optimizer, *, flat: bool) -> bool | None:
    """Whether two ranks train two parts of a parameter otherwise than one the whole; None where it cannot be tried.

    An optimiser of the same kind, with the options of each group in turn, takes three steps on the CPU; the run's is
    left as it is. The learning rate is `LR`, for that of a schedule may begin at zero, where nothing moves.

    Args:
        optimizer: Of any class.
        flat: Whether a rank has elements in a row, as of a flattened parameter; else it has rows.
    """
    values = _values()
    return _mixes(optimizer, [[value] for value in values], [_halves(value, flat) for value in values])


def mixes_parameters(optimizer: Optimizer) -> bool | None:
    """Whether two ranks train two parameters otherwise than one trains both, in the same way."""
    halves = [_halves(value, False) for value in _values()]
    return _mixes(optimizer, halves, halves)


def _values() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=draw, dtype=torch.float64) for _ in range(STEPS + 1)]


def _mixes(optimizer: Optimizer, together: list[list[Tensor]], apart: list[list[Tensor]]) -> bool | None:
    """Whether parameters of one optimiser are trained otherwise than those that have one each."""
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        # the steps of one that wraps another would be the other's, on the run's parameters
        return None
    mixes, before = False, torch.cat([value.flatten() for value in together[0]])
    # of hundreds of groups most differ in nothing but the learning rate
    options = [{k: v for k, v in group.items() if k not in NOT_TRIED} for group in optimizer.param_groups]
    for group in {repr(one): one for one in options}.values():
        try:
            with torch.random.fork_rng(devices=[]):
                whole, again = (_trained(optimizer, group, together) for _ in range(2))
                # an optimiser for each: one that reads all of its parameters, such as for a norm, would see both halves
                parts = [_trained(optimizer, group, [[value] for value in own]) for own in zip(*apart, strict=True)]
        except Exception:
            return None
        if torch.equal(whole, before) or not torch.equal(whole, again):
            # from what does not move, or draws random numbers, nothing can be seen
            return None
        mixes |= not torch.allclose(torch.cat(parts), whole, rtol=1e-9, atol=1e-12)
    return mixes


def _halves(x: Tensor, flat: bool) -> list[Tensor]:
    return list((x.flatten() if flat else x).chunk(2))


def _trained(optimizer: Optimizer, group: dict[str, Any], trained: list[list[Tensor]]) -> Tensor:
    """All elements after a few steps, of parameters of which values are given, and then the gradients of each step."""
    values, *gradients = trained
    parameters = [nn.Parameter(value.clone()) for value in values]
    # without `__init__`, whose arguments are not known: attributes are those of the run's optimiser, options the
    # group's
    other: Any = object.__new__(type(optimizer))
    # a scheduler puts its own step on the instance, and hooks belong to the run; a count of steps is copied
    kept = {id(p): p for one in optimizer.param_groups for p in one["params"]}
    for name, value in vars(optimizer).items():
        if name not in ("step", "state", "param_groups", "defaults") and not name.startswith("_optimizer_"):
            other.__dict__[name] = value
            # what cannot be copied, such as a lock, is shared
            with suppress(Exception):
                other.__dict__[name] = copy.deepcopy(value, dict(kept))
    other.defaults = optimizer.defaults
    other._optimizer_step_pre_hooks = other._optimizer_step_post_hooks = OrderedDict()
    other.state = defaultdict(dict)
    other.param_groups = [{**group, "lr": LR, "params": parameters}]
    for step in gradients:
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = grad.clone()
        other.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])
