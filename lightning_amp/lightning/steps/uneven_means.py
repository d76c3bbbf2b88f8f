"""Warn if a loss is a mean over labels whose number differs between ranks: cross-entropy with labels that are left out.

Ranks average gradients by their numbers of samples, which is exact for means over samples. `cross_entropy` and
`nll_loss` divide by the labels that count, or by their class weights.

This watch is for steps of which mean_over_samples.py cannot judge the loss.

Known limits: only the first step is watched, only calls through `torch.nn.functional`, and only the labels of rank 0.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_amp._torch import FakeTensor, unseen, without_torch_function
from lightning_amp.dist.sharded_tensor import local_of
from lightning_amp.holding import replacing
from lightning_amp.lightning._compat import rank_zero_warn

WATCHED = ("cross_entropy", "nll_loss")


@contextmanager
def warning_of_uneven_means() -> Iterator[None]:
    """Warn in this context, once, of a mean over labels whose number may differ between ranks."""
    warned = list[str]()
    with ExitStack() as watched:
        for name in WATCHED:
            watched.enter_context(replacing(F, **{name: _watched(name, getattr(F, name), warned)}))
        yield


def _watched(name: str, function: Callable[..., Tensor], warned: list[str]) -> Callable[..., Tensor]:
    bind = partial(signature(function).bind)

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        # torch passes to `__torch_function__` what its own module has under this name; `logits` and graphs of `chunk`
        # know the function itself
        with replacing(F, **{name: function}):
            loss = function(*args, **kwargs)
        # no part of the step: it is neither counted nor in a graph that is captured now
        with unseen(), without_torch_function():
            given = bind(*args, **kwargs)
            given.apply_defaults()
            # under `sequence` the labels are in shards; those of this rank are enough to warn by
            target = local_of(given.arguments["target"])
            if warned or not loss.requires_grad or isinstance(loss, FakeTensor) or isinstance(target, FakeTensor):
                return loss
            kind = given.arguments
            if why := why_uneven(target, kind["weight"], kind["ignore_index"], kind["reduction"]):
                warned.append(name)
                warn_of_labels(name, why)
        return loss

    return called


def warn_of_labels(name: str, why: str) -> None:
    """Warn on the first rank of a loss that divides by what its labels decide."""
    rank_zero_warn(
        f"{name} divides by {why}: their number differs between the ranks of the data axis, whose gradients"
        " are averaged by samples. They are not those of the union of the batches then, as under ddp."
        " Exact is the sum over the labels (reduction='sum') divided by"
        " self.trainer.strategy.reduce(count, reduce_op='mean') of the labels that count, if all ranks have"
        " equally many samples"
    )


def why_uneven(target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str) -> str:
    """Return what a mean divides by; "" if it divides by a number that depends on the shapes only."""
    if reduction != "mean" or target.is_floating_point():
        return ""
    if weight is not None:
        return "the class weights of its labels"
    left_out = int((target == ignore_index).sum())
    return f"the labels that count, all but {left_out} of {target.numel()} (ignore_index={ignore_index})" * bool(
        left_out
    )
