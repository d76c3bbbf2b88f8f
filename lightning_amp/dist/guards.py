"""Catch what would bypass sharded tensors in silence: autograd Functions, gradients inside a step, early stops.

A `torch.autograd.Function` unpacks its tensors in C++, so autograd would see the wrapper and lose the part's gradient.
`torch.autograd.grad` of values that every rank has would return one rank's share of a gradient.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from lightning_amp.dist._torch import tree_leaves
from lightning_amp.dist.collectives import all_reduce
from lightning_amp.dist.registry import AUTOGRAD_FUNCTIONS, FUNCTIONS, shard_error
from lightning_amp.dist.sharded_tensor import ShardedTensor, local_of, part_in, splits_of, wrap
from lightning_amp.dist.splits import MeshAxis

_GRAD = torch.autograd.grad
PASSED_ON = ("RegisterPostBackwardFunction",)
"""Functions of torch that return their tensors as they are: FSDP2's, which waits for a block's gradients."""


@contextmanager
def guarded(axes: Sequence[MeshAxis]) -> Iterator[None]:
    """For the time of a step: Functions of the user are refused, and gradients taken by hand are whole.

    Args:
        axes: All axes that tensors of the step may be split over.
    """
    apply = torch.autograd.Function.__dict__["apply"]

    def checked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        handler = AUTOGRAD_FUNCTIONS.get(cls)
        given = any(type(t) is ShardedTensor for t in tree_leaves((args, kwargs)))
        if given and handler is not None:
            return handler(*args, **kwargs)
        if given and cls.__name__ in PASSED_ON:
            found = apply.__get__(None, cls)(*map(local_of, args), **kwargs)
            tensors = [t for t in args if isinstance(t, Tensor)]
            return tuple(wrap(t, splits_of(a)) for t, a in zip(found, tensors, strict=True))
        found = None if given else apply.__get__(None, cls)(*args, **kwargs)
        # a Function may use sharded tensors that are no arguments of it, as reentrant checkpoints do
        if given or any(type(t) is ShardedTensor for t in tree_leaves(found)):
            remedy = "register what it does with lightning_amp.register_shard"
            if cls.__name__ == "CheckpointFunction":
                remedy = "call checkpoint with use_reentrant=False"
            raise shard_error(cls, tree_leaves(args), "autograd Functions do not see parts", remedy=remedy)
        return found

    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> Any:
        return _grad(axes, outputs, inputs, grad_outputs, **kwargs)

    FUNCTIONS[_GRAD] = grad
    names = _names_of(_GRAD)
    try:
        torch.autograd.Function.apply = classmethod(checked)  # type: ignore[assignment,method-assign]
        for home, name in names:
            home[name] = grad
        # ranks have to issue the same collectives when blocks run again
        with set_checkpoint_early_stop(False):
            yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        for home, name in names:
            home[name] = _GRAD
        FUNCTIONS.pop(_GRAD, None)


def _names_of(function: Callable[..., Any]) -> list[tuple[dict[str, Any], str]]:
    """The modules, as dictionaries, that have a function under a name, as after `from torch.autograd import grad`."""
    homes = [home for home in gc.get_referrers(function) if isinstance(home, dict) and "__spec__" in home]
    return [
        (home, name)
        for home in homes
        for name, value in home.items()
        if value is function and home["__name__"] != __name__
    ]


def _grad(
    axes: Sequence[MeshAxis], outputs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any
) -> tuple[Tensor | None, ...]:
    """Gradients of values inside a step.

    Every rank differentiates its copy of a whole output, so a copy counts as one of R. The gradient of a whole input is
    the sum of what the ranks find; that of a split one is its owner's.
    """
    outs, ins = ([t] if isinstance(t, Tensor) else list(t) for t in (outputs, inputs))
    seeds = [grad_outputs] * len(outs) if isinstance(grad_outputs, Tensor | None) else list(grad_outputs)
    parts = list[Tensor | None]()
    for out, seed in zip(outs, seeds, strict=True):
        missing = [axis.size for axis in axes if splits_of(out).on(axis) is None]
        given = torch.ones_like(local_of(out)) if seed is None else part_in(seed, splits_of(out))
        for size in missing:
            given = given / size
        parts.append(given)
    found = _GRAD(list(map(local_of, outs)), list(map(local_of, ins)), parts, **kwargs)
    result = list[Tensor | None]()
    for value, one in zip(found, ins, strict=True):
        whole = value
        for axis in axes:
            if whole is not None and splits_of(one).on(axis) is None:
                whole = all_reduce(whole, axis)
        result.append(None if whole is None else wrap(whole, splits_of(one)))
    return tuple(result)
