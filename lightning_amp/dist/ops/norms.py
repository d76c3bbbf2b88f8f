"""Normalisation over dims that are split: statistics of the parts are gathered and combined.

Forward one all-gather of (mean, sum of squared deviations, count) per axis, backward one all-reduce of two sums. As in
torch's kernels, only the input and two numbers per group are kept.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_amp.dist.collectives import reduce_now, stacked
from lightning_amp.dist.registry import BY_RULE, name_of, operator, shard_error
from lightning_amp.dist.sharded_tensor import local_of, part_in, shape_of, splits_of, wrap
from lightning_amp.dist.splits import MeshAxis, Splits


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with the statistics over some dims of all ranks.

    Computed in float32 at least, as torch's kernels under autocast.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dims: Sequence[int],
        axes: Sequence[MeshAxis],
        eps: float,
        centre: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given, x = x, x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        count = torch.tensor(float(prod(x.shape[d] for d in dims)), dtype=x.dtype, device=x.device)
        mean = x.mean(list(dims), keepdim=True) if centre else x.new_zeros(_reduced(x.shape, dims))
        squares = (x - mean).square().sum(list(dims), keepdim=True)
        count = count.expand_as(mean)
        for axis in axes:
            means, squares, counts = stacked(torch.stack([mean, squares, count]), axis).unbind(1)
            count = counts.sum(0)
            mean = (means * counts).sum(0) / count
            squares = squares.sum(0) + (counts * (means - mean).square()).sum(0)
        scale = (squares / count + eps).rsqrt()
        ctx.save_for_backward(given, weight, mean, scale)
        ctx.of = tuple(dims), tuple(axes), centre, None if bias is None else bias.shape
        ctx.n = count.flatten()[0]
        ctx.mark_non_differentiable(mean, scale)
        found = (x - mean) * scale
        found = found if weight is None else found * weight
        found = found if bias is None else found + bias
        return found.to(given.dtype), mean, scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        given, weight, mean, scale = ctx.saved_tensors
        dims, axes, centre, bias_shape = ctx.of
        grad, x = grad.to(mean.dtype), given.to(mean.dtype)
        normal = (x - mean) * scale
        inner = grad if weight is None else grad * weight
        sums = torch.stack([inner.sum(dims, keepdim=True) * centre, (inner * normal).sum(dims, keepdim=True)])
        for axis in axes:
            sums = reduce_now(sums, axis)
        of_x = scale * (inner - (sums[0] + normal * sums[1]) / ctx.n)
        of_weight = None if weight is None else _summed_to(grad * normal, weight.shape).to(weight.dtype)
        of_bias = None if bias_shape is None else _summed_to(grad, bias_shape)
        return of_x.to(given.dtype), of_weight, of_bias, None, None, None, None


def _reduced(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    return [1 if d in dims else n for d, n in enumerate(shape)]


def _summed_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    dims = [d for d, n in enumerate(shape) if n == 1 and x.shape[d] != 1]
    return x.sum(dims, keepdim=True) if dims else x


def normalised(
    x: Tensor, dims: Sequence[int], eps: float, *parameters: Tensor | None, centre: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of a normalised tensor, mean and 1 / standard deviation.

    Args:
        x, dims: The tensor, and the dims that statistics go over.
        eps: Added to the variance.
        parameters: Weight and bias with as many dims as the tensor, of size 1 where they are broadcast.
        centre: Whether the mean is subtracted.
    """
    splits = splits_of(x)
    own = [
        None if p is None else part_in(p, splits.without(*[d for d, n in enumerate(shape_of(p)) if n == 1]))
        for p in (*parameters, None, None)[:2]
    ]
    axes = [split.axis for split in splits if split.dim in dims]
    return tuple(_Normalise.apply(local_of(x), *own, tuple(dims), axes, eps, centre))


@operator("layer_norm", "rms_norm")
def _layer_norm(func: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, *rest: Any) -> Any:
    n, rms = len(shape_of(x)), name_of(func) == "rms_norm"
    dims = range(n - len(shape), n)
    if not any(split.dim in dims for split in splits_of(x)):
        return BY_RULE
    bias, eps = (None, torch.finfo(x.dtype).eps if rest[0] is None else rest[0]) if rms else rest[:2]
    form = [*[1] * (n - len(shape)), *shape]
    parameters = [None if p is None else p.view(form) for p in (weight, bias)]
    return wrap(normalised(x, dims, eps, *parameters, centre=not rms)[0], splits_of(x))


@operator("group_norm")
def _group_norm(func: Any, x: Tensor, groups: int, weight: Any, bias: Any, eps: float, cudnn: bool) -> Any:
    if not any(split.dim for split in splits_of(x)):
        return BY_RULE
    apart = x.unflatten(1, (groups, -1))
    form = [1, groups, -1, *[1] * (len(shape_of(x)) - 2)]
    parameters = [None if p is None else p.view(form) for p in (weight, bias)]
    found = normalised(apart, range(2, len(shape_of(apart))), eps, *parameters)[0]
    return wrap(found, splits_of(apart)).flatten(1, 2)


@operator("batch_norm", "instance_norm")
def _batch_norm(
    func: Any, x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any
) -> Any:
    """Statistics per channel, over the batch and all positions, or per sample; running ones are the same on all ranks."""
    (momentum, eps, _), n, batch = rest, len(shape_of(x)), name_of(func) == "batch_norm"
    form = [1, -1, *[1] * (n - 2)]
    if not batch and mean is not None:
        raise shard_error(func, [x], "it has running statistics of instances")
    if not training:
        return BY_RULE
    dims = [*([0] if batch else []), *range(2, n)]
    parameters = [None if p is None else p.view(form) for p in (weight, bias)]
    found, mean_now, scale = normalised(x, dims, eps, *parameters)
    if mean is not None and variance is not None:
        size, channels = prod(shape_of(x)[d] for d in dims), splits_of(x).at(1)
        own = Splits.of([channels._replace(dim=0)] if channels else [])
        now = [mean_now.flatten(), (scale**-2 - eps).flatten() * (size / max(size - 1, 1))]
        with torch.no_grad():
            for running, value in zip((mean, variance), now, strict=True):
                whole = part_in(wrap(value, own), splits_of(running))
                local_of(running).lerp_(whole.to(running.dtype), momentum)
    return wrap(found, splits_of(x))
