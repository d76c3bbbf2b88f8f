"""Count the labels that a step's loss is a mean over: torch's cross-entropy with labels or class weights.

`cross_entropy` and `nll_loss` divide by the labels that count, or by their class weights. If the loss of a step is the
result of such a call, and nothing else, a rank's weight is what its mean divides by, c_r:

    w_r = c_r R / sum c,        (1 / R) sum_r w_r L_r = mean over the labels of the ranks' batches

`MeansOverLabels` counts c_r during the call, and finds out whether the loss is the result of one by the autograd graph:
between the two are only views, copies and casts. Any other loss is averaged by samples, and is warned of if its labels
show that this is another gradient than that of the union of batches.

Known limits: only calls through `torch.nn.functional` are counted, so a function imported from there by name is not,
nor one in a compiled function. Without a judged loss (mean_over_samples.py) only the first step is warned of, and only
by the labels of rank 0. A module that multiplies its gradients by a number of labels itself counts them twice.
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
from lightning_amp.holding import replacing
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.sharding.sharded_tensor import local_of

WATCHED = ("cross_entropy", "nll_loss")
SAME_VALUE = (
    *("AliasBackward0", "CloneBackward0", "ToCopyBackward0", "ReshapeAliasBackward0", "ViewBackward0"),
    *("UnsafeViewBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0"),
    *("MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1"),
)
"""Autograd nodes whose result has the value of their argument, if that is one number."""


class MeansOverLabels:
    """The means over labels that one step computes.

    Attributes:
        looks: Whether to find `uneven`, which waits for the device.
        uneven: Name of a function, and what it divides by that depends on its labels; None if none does.
    """

    def __init__(self, *, looks: bool) -> None:
        self.uneven: tuple[str, str] | None = None
        self.looks = looks
        self._means: list[tuple[Any, Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calls in this context."""
        with ExitStack() as watched:
            for name in WATCHED:
                watched.enter_context(replacing(F, **{name: self._watched(name, getattr(F, name))}))
            yield

    def behind(self, loss: object) -> Tensor | None:
        """Return what the loss divides by, if it is one of the means and nothing else; else None."""
        node = loss.grad_fn if isinstance(loss, Tensor) and loss.numel() == 1 else None
        while node is not None:
            found = next((count for mean, count in self._means if mean is node), None)
            if found is not None or node.name() not in SAME_VALUE:
                return found
            node = node.next_functions[0][0]
        return None

    def _watched(self, name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        bind = partial(signature(function).bind)

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Tensor:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            # torch passes to `__torch_function__` what its own module has under this name; `logits` and graphs of
            # `chunk` know the function itself
            with replacing(F, **{name: function}):
                loss = function(*args, **kwargs)
            # no part of the step: it is neither counted nor in a graph that is captured now
            with unseen(), without_torch_function():
                given = bind(*args, **kwargs)
                given.apply_defaults()
                self._note(name, loss, given.arguments)
            return loss

        return called

    def _note(self, name: str, loss: Tensor, kind: Any) -> None:
        # under `sequence` the labels are in shards; those of this rank are enough to warn by
        target = local_of(kind["target"])
        if not loss.requires_grad or isinstance(loss, FakeTensor) or isinstance(target, FakeTensor):
            return
        weight, ignored, reduction = kind["weight"], kind["ignore_index"], kind["reduction"]
        if self.looks and self.uneven is None and (why := why_uneven(target, weight, ignored, reduction)):
            self.uneven = name, why
        if loss.grad_fn is not None and kind["size_average"] is None and kind["reduce"] is None:
            count = count_labels(target, weight, ignored, reduction)
            if count is not None:
                self._means.append((loss.grad_fn, count))


def count_labels(target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor | None:
    """Return what a mean divides by, in float64: its labels, or the sum of their class weights; None if by neither."""
    if reduction != "mean" or target.is_floating_point() or (weight is not None and weight.requires_grad):
        return None
    counts = target != ignore_index
    if weight is None:
        return counts.sum(dtype=torch.float64)
    # `ignore_index` is no index of the weights; zeros in place of a selection, whose size the host would wait for
    weights = weight.detach().double()[target.masked_fill(~counts, 0).long()]
    return weights.masked_fill(~counts, 0).sum()


def warn_of_labels(name: str, why: str) -> None:
    """Warn on the first rank of a loss that divides by what its labels decide."""
    rank_zero_warn(
        f"{name} divides by {why}: their number differs between the ranks of the data axis, whose gradients"
        " are averaged by samples. They are not those of the union of the batches then, as under ddp."
        " Exact is a step whose loss is the result of torch.nn.functional.cross_entropy and nothing else, which is"
        " averaged by the labels that count; or the sum over the labels (reduction='sum') divided by"
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
