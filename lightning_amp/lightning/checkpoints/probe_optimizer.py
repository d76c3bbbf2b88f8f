"""Test whether an optimiser updates each element, or each parameter, by its own gradient and state alone."""

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
"""Options of a group that do not affect how an update is computed."""


def mixes(
    optimizer: Optimizer, known: Sequence[str], tried: Callable[[Optimizer], bool | None], each: str, technique: str
) -> bool:
    """Whether an optimiser's update of one element (or parameter) depends on others; warns if it cannot be tested.

    Args:
        optimizer: Any optimiser; those of torch are not tested.
        known: Class names of torch's optimisers that mix elements.
        tried: `mixes_elements` or `mixes_parameters`.
        each: "element" or "parameter", for the warning.
        technique: The technique that shards parameters, for the warning.
    """
    kind = type(optimizer)
    # a class of another package may have the same name, and is tested
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
    """Whether two ranks that train two shards of a parameter differ from one that trains all; None if not testable.

    A copy of the optimiser takes three steps on the CPU, with the options of each group in turn; the original does not
    change. The learning rate is `LR`, because a schedule may begin at zero, where parameters do not move.

    Args:
        optimizer: Any optimiser.
        flat: Whether shards are ranges of the flattened parameter; else they are rows.
    """
    values = _values()
    return _mixes(optimizer, [[value] for value in values], [_halves(value, flat) for value in values])


def mixes_parameters(optimizer: Optimizer) -> bool | None:
    """Whether two ranks that train one parameter each differ from one rank that trains both; None if not testable."""
    halves = [_halves(value, False) for value in _values()]
    return _mixes(optimizer, halves, halves)


def _values() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=draw, dtype=torch.float64) for _ in range(STEPS + 1)]


def _mixes(optimizer: Optimizer, together: list[list[Tensor]], separate: list[list[Tensor]]) -> bool | None:
    """Whether one optimiser for all parameters trains them differently from one optimiser for each."""
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        # a wrapper's step would run the wrapped optimiser on the run's parameters
        return None
    mixes, before = False, torch.cat([value.flatten() for value in together[0]])
    # hundreds of groups often differ in the learning rate only
    options = [{k: v for k, v in group.items() if k not in NOT_TRIED} for group in optimizer.param_groups]
    for group in {repr(one): one for one in options}.values():
        try:
            with torch.random.fork_rng(devices=[]):
                whole, again = (_trained(optimizer, group, together) for _ in range(2))
                # one optimiser each: an optimiser that computes a norm of all parameters would read both halves
                parts = [_trained(optimizer, group, [[value] for value in own]) for own in zip(*separate, strict=True)]
        except Exception:
            return None
        if torch.equal(whole, before) or not torch.equal(whole, again):
            # an optimiser that does not move, or draws random numbers, cannot be tested
            return None
        mixes |= not torch.allclose(torch.cat(parts), whole, rtol=1e-9, atol=1e-12)
    return mixes


def _halves(x: Tensor, flat: bool) -> list[Tensor]:
    return list((x.flatten() if flat else x).chunk(2))


def _trained(optimizer: Optimizer, group: dict[str, Any], trained: list[list[Tensor]]) -> Tensor:
    """Return all elements after the steps; `trained` has the initial values, and then the gradients of each step."""
    values, *gradients = trained
    parameters = [nn.Parameter(value.clone()) for value in values]
    # without `__init__`, whose arguments are not known: attributes come from the run's optimiser, options from `group`
    other: Any = object.__new__(type(optimizer))
    # not copied: a scheduler's replacement of `step`, and hooks of the run
    kept = {id(p): p for one in optimizer.param_groups for p in one["params"]}
    for name, value in vars(optimizer).items():
        if name not in ("step", "state", "param_groups", "defaults") and not name.startswith("_optimizer_"):
            other.__dict__[name] = value
            # values that cannot be copied, such as a lock, are shared
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
