"""Normalise by statistics over the values of all ranks of some axes.

    mean = sum_r n_r mean_r / n     M2 = sum_r M2_r + n_r (mean_r - mean)^2     n = sum_r n_r
    rstd = (M2 / n + eps)^-1/2
    y = weight x' + bias            dx = rstd (g - sum g / n - x' sum (g x') / n)
    with x' = (x - mean) rstd and g = weight dy

Exact up to rounding for any number of values per rank, zero included: statistics are combined from deviations (Chan,
Golub and LeVeque 1983), for sums of squares would lose the digits that the mean has in common with every value. dx is
the gradient of the sum of all ranks' losses. Gradients of weight and bias are the rank's own part, which is averaged
over the ranks like all others: an average of parameter gradients is the gradient of the average of the losses.

Collectives per axis: forward one all-gather of 2 K + 1 numbers, backward one all-reduce of 2 K. As in torch's kernels,
only the input and two numbers per group are kept. Half precision is summed in single precision.

Legend: K groups of values that have a mean each, such as channels; n_r values of a group on rank r.
Known limit: second derivatives are refused.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm

from lightning_amp.dist.collectives import reduce_now, stacked
from lightning_amp.dist.sharded_tensor import local_of, part_in, splits_of, wrap
from lightning_amp.dist.splits import WHOLE, MeshAxis, Splits
from lightning_amp.shapes import Scalar

Axes = Sequence[MeshAxis]
Statistics = tuple[Float[Tensor, " group"], Float[Tensor, " group"], Scalar]
"""Mean, sum of squared deviations and number of values of each group."""


def union_moments(
    means: Float[Tensor, "part group"], m2s: Float[Tensor, "part group"], counts: Float[Tensor, "part 1"]
) -> Statistics:
    """Mean, sum of squared deviations and number of the union; a part may be empty."""
    count = counts.sum()
    mean = (counts * means).sum(dim=0) / count
    return mean, torch.addcmul(m2s, counts, (means - mean).square()).sum(dim=0), count


@torch.no_grad()
def union_statistics(x: Tensor, dims: Sequence[int], axes: Axes, *, centre: bool = True) -> Statistics:
    """Mean, sum of squared deviations and number of the values over some dims of all ranks.

    Args:
        x: This rank's values.
        dims: Of the values that have one mean.
        axes: The ranks.
        centre: Whether deviations are those from the mean; else from zero.
    """
    x = x.to(_precise(x))
    groups, n = prod(size for d, size in enumerate(x.shape) if d not in dims), prod(x.shape[d] for d in dims)
    if not n:
        mean = m2 = x.new_zeros(groups)
    elif not centre:
        mean, m2 = x.new_zeros(groups), x.square().sum(list(dims)).flatten()
    elif x.device.type == "cpu" and list(dims) == _channel_dims(x):
        # torch.var over these dims takes five times as long there
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
        m2 = var * n
    else:
        var, mean = torch.var_mean(x, list(dims), correction=0)
        mean, m2 = mean.flatten(), var.flatten() * n
    count = x.new_full((), n)
    for axis in axes:
        parts = stacked(torch.cat([mean, m2, count[None]]), axis)
        mean, m2, count = union_moments(*torch.split(parts, [groups, groups, 1], dim=1))
    return mean, m2, count


def normalised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    dims: Sequence[int],
    axes: Axes,
    eps: float,
    centre: bool = True,
) -> Tensor:
    """This rank's part of a normalised tensor.

    Args:
        x, dims, axes, centre: As of `union_statistics`.
        weight, bias: With as many dims as x, of size 1 where they are broadcast.
        eps: Added to the variance.
    """
    mean, m2, count = union_statistics(x, dims, axes, centre=centre)
    form = [1 if d in dims else n for d, n in enumerate(x.shape)]
    rstd = (m2 / count + eps).rsqrt()
    given = (mean.view(form), rstd.view(form), count, tuple(dims), tuple(axes), centre)
    return cast(Tensor, _Normalise.apply(x, weight, bias, *given))


def batch_normalised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    over: Axes = (),
    once: Callable[[Callable[[], Statistics]], Statistics] = lambda receive: receive(),
    track: Callable[[Tensor, Tensor, Tensor], None],
) -> Tensor:
    """A tensor, plain or sharded, normalised by channel.

    Args:
        x, weight, bias, eps: As of torch's batch_norm.
        over: Axes whose ranks have other samples, beside those that the tensor is split over.
        once: Returns what its argument returns, or has returned in a pass before.
        track: Called with the whole mean, sum of squared deviations and number of values, before anything is saved for
            the backward pass: a second pass may end there.
    """
    splits, part = splits_of(x), local_of(x)
    channels = splits.at(1)
    own = Splits.of([channels._replace(dim=0)] if channels else [])
    axes = [*(split.axis for split in splits if split.dim != 1), *over]
    mean, m2, count = once(lambda: union_statistics(part, _channel_dims(part), axes))
    whole_mean, whole_m2 = (part_in(wrap(value, own), WHOLE) for value in (mean, m2))
    track(whole_mean, whole_m2, count)
    parameters = (None if p is None else part_in(p, own) for p in (weight, bias))
    given = (mean, m2, count, eps, tuple(axes))
    found = _ByChannel.apply(part, *parameters, *given)
    return wrap(found, splits)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        rstd: Tensor,
        count: Tensor,
        dims: tuple[int, ...],
        axes: Axes,
        centre: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, rstd, count)
        ctx.of = dims, axes, centre, None if bias is None else bias.shape
        y = (x.to(mean.dtype) - mean).mul_(rstd)
        y = y if weight is None else y.mul_(weight)
        y = y if bias is None else y.add_(bias)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd, count = ctx.saved_tensors
        dims, axes, centre, bias_shape = ctx.of
        grad = grad.to(mean.dtype)
        normal = (x.to(mean.dtype) - mean).mul_(rstd)
        of_weight = None if weight is None else _summed_to(grad * normal, weight.shape).to(weight.dtype)
        of_bias = None if bias_shape is None else _summed_to(grad, bias_shape)
        # the same on all ranks, for all have the same graph: no rank waits for one that has left
        if not ctx.needs_input_grad[0]:
            return None, of_weight, of_bias, *[None] * 6
        inner = grad if weight is None else grad * weight
        sums = torch.stack([inner.sum(dims, keepdim=True) * centre, (inner * normal).sum(dims, keepdim=True)])
        for axis in axes:
            sums = reduce_now(sums, axis)
        average, slope = sums / count
        of_x = (inner - average).sub_(normal.mul_(slope)).mul_(rstd)
        return of_x.to(x.dtype), of_weight, of_bias, *[None] * 6


class _ByChannel(torch.autograd.Function):
    """By statistics over all dims but the second.

    Passes over x, which are what it takes on a CPU, are few: torch's kernel for given statistics has the sums of dy and
    dx without the sums of all ranks, and what is taken off that dx is one more normalisation of x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        m2: Tensor,
        count: Tensor,
        eps: float,
        axes: Axes,
    ) -> Tensor:
        var = m2 / count
        ctx.save_for_backward(x, weight, mean, var, count)
        ctx.eps, ctx.axes = eps, axes
        return batch_norm(x.to(mean.dtype), mean, var, weight, bias, eps=eps).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, count = ctx.saved_tensors
        own = x.to(mean.dtype)
        factor = None if weight is None else weight.to(mean.dtype)
        dx, tilt, total = _with_given_statistics(grad.to(mean.dtype), own, factor, mean, var, ctx.eps)
        sums = torch.cat([tilt, total])
        for axis in ctx.axes:
            sums = reduce_now(sums, axis)
        tilts, totals = sums.chunk(2)
        rstd = torch.rsqrt(var + ctx.eps)
        per_value = (rstd if factor is None else rstd * factor) / count
        dx.sub_(batch_norm(own, mean, var, per_value * tilts, per_value * totals, eps=ctx.eps))
        of_weight = of_bias = None
        if weight is not None:
            of_weight, of_bias = tilt.to(weight.dtype), total.to(weight.dtype)
        return dx.to(x.dtype), of_weight, of_bias, *[None] * 5


def _with_given_statistics(
    dy: Float[Tensor, "cell channel *position"],
    x: Float[Tensor, "cell channel *position"],
    weight: Float[Tensor, " channel"] | None,
    mean: Float[Tensor, " channel"],
    var: Float[Tensor, " channel"],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias as if mean and var did not depend on x; of one rank's values."""
    if not x.numel():
        # torch's kernel divides by their number
        return dy.clone(), torch.zeros_like(mean), torch.zeros_like(mean)
    dx, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
        dy, x, weight, mean, var, None, None, False, eps, [True, True, True]
    )
    return dx, d_weight, d_bias


def _channel_dims(x: Tensor) -> list[int]:
    """All dims but the second."""
    return [0, *range(2, x.dim())]


def _precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _summed_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    dims = [d for d, n in enumerate(shape) if n == 1 and x.shape[d] != 1]
    return x.sum(dims, keepdim=True) if dims else x
