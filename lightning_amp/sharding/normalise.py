"""Normalise by statistics over the values of all ranks of some axes: layer, RMS, group, instance and batch norm.

    mean = sum_r n_r mean_r / n     M2 = sum_r M2_r + n_r (mean_r - mean)^2     n = sum_r n_r
    rstd = (M2 / n + eps)^-1/2
    y = weight x' + bias            dx = rstd (g - sum g / n - x' sum (g x') / n)
    with x' = (x - mean) rstd and g = weight dy

Exact up to rounding for any number of values per rank, including zero. Statistics are combined from deviations (Chan,
Golub and LeVeque 1983), because sums of squares lose the digits that the mean shares with every value. dx is the
gradient of the sum of all ranks' losses. Gradients of weight and bias are those of the local values, and are averaged
over the ranks like all others: an average of parameter gradients is the gradient of the average of the losses.

Collectives per axis: forward one all-gather of 2 K + 1 numbers, backward one all-reduce of 2 K. As in torch's kernels,
only the input and two numbers per group are saved. Half precision is summed in single precision.

For double backward, the backward pass is recomputed by operators and collectives that autograd follows.

Legend: K groups of values with one mean each, such as channels; n_r values of a group on rank r.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import batch_norm

from lightning_amp.shapes import Scalar
from lightning_amp.sharding._torch import never_compiled
from lightning_amp.sharding.collectives import all_reduce, reduce_now, stacked
from lightning_amp.sharding.registry import BY_RULE, name_of, operator, shard_error
from lightning_amp.sharding.sharded_tensor import local_of, part_in, shape_of, splits_of, wrap
from lightning_amp.sharding.splits import WHOLE, MeshAxis, Splits

Axes = Sequence[MeshAxis]
LARGE = 16
"""Least values per channel for which parameters may be expanded to every channel of every sample."""
Statistics = tuple[Float[Tensor, " group"], Float[Tensor, " group"], Scalar]
"""Mean, sum of squared deviations and number of values of each group."""


@torch.no_grad()
def union_statistics(x: Tensor, dims: Sequence[int], axes: Axes, *, centre: bool = True, per: int = 1) -> Statistics:
    """Return mean, sum of squared deviations and number of values over `dims` and all ranks of `axes`.

    Without `centre`, deviations are from zero. `per`: channels per group, if `dims` are all dims but the second.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    groups, n = prod(size for d, size in enumerate(x.shape) if d not in dims), prod(x.shape[d] for d in dims)
    if not n:
        mean = m2 = x.new_zeros(groups)
    elif not centre:
        mean, m2 = x.new_zeros(groups), x.square().sum(list(dims)).flatten()
    elif x.device.type == "cpu" and _by_channel(x, dims):
        # torch.var over these dims takes five times as long on a CPU
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
        m2 = var * n
    else:
        var, mean = torch.var_mean(x, list(dims), correction=0)
        mean, m2 = mean.flatten(), var.flatten() * n
    if per > 1:
        # all channels have the same number of values
        each, groups = mean.view(-1, per), groups // per
        mean = each.mean(1)
        m2 = torch.addcmul(m2.view(-1, per), each - mean[:, None], each - mean[:, None], value=n).sum(1)
    count = x.new_full((), n * per)
    for axis in axes:
        parts = stacked(torch.cat([mean, m2, count[None]]), axis)
        # combine the ranks; a shard may be empty
        means, m2s, counts = torch.split(parts, [groups, groups, 1], dim=1)
        count = counts.sum()
        mean = (counts * means).sum(dim=0) / count
        m2 = torch.addcmul(m2s, counts, (means - mean).square()).sum(dim=0)
    return mean, m2, count


@never_compiled
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
    """Return the local shard of a tensor normalised over some dims and axes; `eps` is added to the variance.

    Weight and bias have as many dims as x, of size 1 where they are broadcast.
    """
    first, shape, per, parameters = min(dims), x.shape, 1, [weight, bias]
    flat = all(p is None or not any(n > 1 for n in p.shape[first + 1 :]) for p in parameters)
    large = x.numel() >= LARGE * prod(shape[: first + 1]) > 0
    if centre and flat and large and list(dims) == list(range(first, x.dim())):
        # torch's batch-norm kernels take fewer passes: each entry of the first of `dims` becomes a channel, and `per`
        # channels have one mean
        rows, per, dims = shape[: first + 1], shape[first], (0, 2)
        x = x.reshape(1, prod(rows), -1)
        ones = [1] * (len(shape) - first - 1)
        parameters = [None if p is None else p.expand(*rows, *ones).reshape(1, -1, 1) for p in parameters]
    statistics = union_statistics(x, dims, axes, centre=centre, per=per)
    given = (*statistics, eps, tuple(dims), axes, centre, per)
    return cast(Tensor, _Normalise.apply(x, *parameters, *given)).view(shape)


@never_compiled
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
    """Normalise a plain or sharded tensor by channel.

    Args:
        x, weight, bias, eps: As in torch's batch_norm.
        over: Axes whose ranks have other samples, in addition to those that shard the tensor.
        once: Returns the result of its argument, or that of an earlier pass.
        track: Called with the global mean, sum of squared deviations and number of values, before anything is saved for
            the backward pass, because a second pass may stop there.
    """
    splits, part = splits_of(x), local_of(x)
    dims = [0, *range(2, part.dim())]
    channels = splits.at(1)
    own = Splits.of([channels._replace(dim=0)] if channels else [])
    axes = [*(split.axis for split in splits if split.dim != 1), *over]
    mean, m2, count = once(lambda: union_statistics(part, dims, axes))
    whole_mean, whole_m2 = (part_in(wrap(value, own), WHOLE) for value in (mean, m2))
    track(whole_mean, whole_m2, count)
    form = [1, -1, *[1] * (part.dim() - 2)]
    parameters = (None if p is None else part_in(p, own).view(form) for p in (weight, bias))
    return wrap(_Normalise.apply(part, *parameters, mean, m2, count, eps, dims, axes, True, 1), splits)


def _by_channel(x: Tensor, dims: Sequence[int]) -> bool:
    """Whether the dims are all but the second: torch's batch-norm kernels take fewer passes over the values."""
    return x.dim() > 1 and list(dims) == [0, *range(2, x.dim())]


class _Normalise(torch.autograd.Function):
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
        dims: Sequence[int],
        axes: Axes,
        centre: bool,
        per: int,
    ) -> Tensor:
        var = m2 / count
        ctx.save_for_backward(x, weight, mean, var, count)
        ctx.of = eps, dims, axes, centre, per, None if bias is None else bias.shape
        mean, var = (value.repeat_interleave(per) for value in (mean, var)) if per > 1 else (mean, var)
        own = x.to(mean.dtype)
        if _by_channel(x, dims):
            scale, shift = (None if p is None else p.flatten().to(mean.dtype) for p in (weight, bias))
            return batch_norm(own, mean, var, scale, shift, eps=eps).to(x.dtype)
        form = [1 if d in dims else n for d, n in enumerate(x.shape)]
        y = (own - mean.view(form)).mul_((var + eps).rsqrt().view(form))
        y = y if weight is None else y.mul_(weight)
        y = y if bias is None else y.add_(bias)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _differentiable(ctx, grad)
        x, weight, mean, var, count = ctx.saved_tensors
        eps, dims, axes, centre, per, bias_shape = ctx.of
        mean, var = (value.repeat_interleave(per) for value in (mean, var)) if per > 1 else (mean, var)
        own, grad, rstd = x.to(mean.dtype), grad.to(mean.dtype), (var + eps).rsqrt()
        form = [1 if d in dims else n for d, n in enumerate(x.shape)]
        # torch's kernel divides by the number of values
        by_channel = _by_channel(x, dims) and bool(x.numel())
        if by_channel:
            factor = None if weight is None else weight.flatten().to(mean.dtype)
            # gradient with mean and var as constants
            of_x, tilt, total = torch.ops.aten.native_batch_norm_backward(
                grad, own, factor, mean, var, None, None, False, eps, [True, True, True]
            )
            of_weight, of_bias = tilt.view(form), total.view(form)
            # The kernel has summed dy and dy x' by channel: multiplied by the channel's weight, these are the local
            # sums of g and g x', which are all-reduced below.
            sums = torch.stack([total, tilt])
            sums = sums if factor is None else sums.mul_(factor)
        else:
            normal = (own - mean.view(form)).mul_(rstd.view(form))
            inner = grad if weight is None else grad * weight
            of_weight, of_bias = grad * normal, grad
            sums = torch.stack([inner.sum(dims).flatten() * centre, (inner * normal).sum(dims).flatten()])
        sums = sums.view(2, -1, per).sum(2) if per > 1 else sums
        for axis in axes:
            sums = reduce_now(sums, axis)
        sums = sums.repeat_interleave(per, 1) if per > 1 else sums
        average, slope = (sums / count).mul_(rstd)
        if by_channel:
            # slope x' + average, as a line in x: a tensor as large as x would be needed otherwise
            steep, least = slope * rstd, average - slope * rstd * mean
            of_x.addcmul_(own, steep.view(form), value=-1).sub_(least.view(form))
        else:
            of_x = (inner * rstd.view(form)).sub_(average.view(form)).sub_(normal.mul_(slope.view(form)))
        return (
            of_x.to(x.dtype),
            None if weight is None else of_weight.sum_to_size(weight.shape).to(weight.dtype),
            None if bias_shape is None else of_bias.sum_to_size(bias_shape),
            *[None] * 8,
        )


def _differentiable(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients by operators and collectives that autograd follows."""
    x, weight, _, _, count = ctx.saved_tensors
    eps, dims, axes, centre, per, bias_shape = ctx.of

    def average(values: Tensor) -> Tensor:
        sums = values.sum(list(dims)).view(-1, per).sum(1)
        for axis in axes:
            sums = all_reduce(sums, axis)
        return (sums / count).repeat_interleave(per).view([1 if d in dims else n for d, n in enumerate(x.shape)])

    own, grad = x.to(count.dtype), grad.to(count.dtype)
    own = own - average(own) if centre else own
    y = own * (average(own.square()) + eps).rsqrt()
    y = y if weight is None else y * weight
    inputs = [t for t, needed in zip((x, weight), ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(y, inputs, grad, create_graph=True) if inputs else ())
    of_bias = None if bias_shape is None else grad.sum_to_size(bias_shape)
    return *(next(found) if needed else None for needed in ctx.needs_input_grad[:2]), of_bias, *[None] * 8


def _normalised(x: Tensor, dims: Sequence[int], eps: float, *parameters: Tensor | None, centre: bool = True) -> Tensor:
    """Normalise a sharded tensor by statistics over some dims of the global tensor; see `normalised`."""
    splits = splits_of(x)
    weight, bias = [
        None if p is None else part_in(p, splits.without(*[d for d, n in enumerate(shape_of(p)) if n == 1]))
        for p in parameters
    ]
    axes = [split.axis for split in splits if split.dim in dims]
    found = normalised(local_of(x), weight, bias, dims=dims, axes=axes, eps=eps, centre=centre)
    return wrap(found, splits)


@operator("layer_norm", "rms_norm")
def _layer_norm(func: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, *rest: Any) -> Any:
    n, rms = len(shape_of(x)), name_of(func) == "rms_norm"
    dims = range(n - len(shape), n)
    if not any(split.dim in dims for split in splits_of(x)):
        return BY_RULE
    bias, eps = (None, *rest[:1]) if rms else rest[:2]
    if eps is None:
        # eps of the dtype in which torch sums: that of a 16-bit dtype would be 0.8 % of a variance of 1
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    form = [*[1] * (n - len(shape)), *shape]
    parameters = [None if p is None else p.view(form) for p in (weight, bias)]
    return _normalised(x, dims, eps, *parameters, centre=not rms)


@operator("group_norm")
def _group_norm(func: Any, x: Tensor, groups: int, weight: Any, bias: Any, eps: float, cudnn: bool) -> Any:
    if not any(split.dim for split in splits_of(x)):
        return BY_RULE
    grouped = x.unflatten(1, (groups, -1))
    form = [1, groups, -1, *[1] * (len(shape_of(x)) - 2)]
    parameters = [None if p is None else p.view(form) for p in (weight, bias)]
    return _normalised(grouped, range(2, len(shape_of(grouped))), eps, *parameters).flatten(1, 2)


@operator("instance_norm")
def _instance_norm(
    func: Any, x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any
) -> Any:
    if mean is not None:
        raise shard_error(func, [x], "it has running statistics of instances")
    n, eps = len(shape_of(x)), rest[1]
    parameters = [None if p is None else p.view([1, -1, *[1] * (n - 2)]) for p in (weight, bias)]
    return _normalised(x, range(2, n), eps, *parameters)


@operator("batch_norm")
def _batch_norm(
    func: Any, x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any
) -> Any:
    """Compute statistics per channel over the batch and all positions; running statistics are equal on all ranks."""
    if not training:
        return BY_RULE
    momentum, eps = rest[:2]

    @torch.no_grad()
    def track(now: Tensor, m2: Tensor, count: Tensor) -> None:
        if mean is not None and variance is not None:
            for running, value in ((mean, now), (variance, m2 / (count - 1).clamp(min=1))):
                part = part_in(value, splits_of(running))
                local_of(running).lerp_(part.to(running.dtype), momentum)

    return batch_normalised(x, weight, bias, eps, track=track)
