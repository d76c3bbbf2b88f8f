"""Normalisation over dims that are split: statistics of the parts are gathered and combined (dist/normalise.py)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_amp.dist.normalise import batch_normalised, normalised
from lightning_amp.dist.registry import BY_RULE, name_of, operator, shard_error
from lightning_amp.dist.sharded_tensor import local_of, part_in, shape_of, splits_of, wrap


def _normalised(x: Tensor, dims: Sequence[int], eps: float, *parameters: Tensor | None, centre: bool = True) -> Tensor:
    """See `normalised`; the statistics are those over some dims of the whole tensor."""
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
    bias, eps = (None, torch.finfo(x.dtype).eps if rest[0] is None else rest[0]) if rms else rest[:2]
    form = [*[1] * (n - len(shape)), *shape]
    parameters = [None if p is None else p.view(form) for p in (weight, bias)]
    return _normalised(x, dims, eps, *parameters, centre=not rms)


@operator("group_norm")
def _group_norm(func: Any, x: Tensor, groups: int, weight: Any, bias: Any, eps: float, cudnn: bool) -> Any:
    if not any(split.dim for split in splits_of(x)):
        return BY_RULE
    apart = x.unflatten(1, (groups, -1))
    form = [1, groups, -1, *[1] * (len(shape_of(x)) - 2)]
    parameters = [None if p is None else p.view(form) for p in (weight, bias)]
    return _normalised(apart, range(2, len(shape_of(apart))), eps, *parameters).flatten(1, 2)


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
    """Statistics per channel, over the batch and all positions; running ones are the same on all ranks."""
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
