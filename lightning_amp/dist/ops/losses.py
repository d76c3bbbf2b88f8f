"""Losses of sharded predictions and targets: sums of the parts, added up, and divided once."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_amp.dist.collectives import all_reduce, reduce_now
from lightning_amp.dist.registry import name_of, operator, shard_error
from lightning_amp.dist.sharded_tensor import local_of, part_in, redistribute, shape_of, splits_of, wrap
from lightning_amp.dist.splits import WHOLE, Splits
from lightning_amp.graph.loss_rules import BY_VALUE

NONE, MEAN, SUM = 0, 1, 2


@operator(*BY_VALUE)
def _by_value(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Losses that compare value with value."""
    names = [a.name for a in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    reduction = given.get("reduction", MEAN)
    tensors = {k: v for k, v in given.items() if isinstance(v, Tensor)}
    shape = torch.broadcast_shapes(*map(shape_of, tensors.values()))
    lead = max((t for t in tensors.values() if splits_of(t)), key=lambda t: t.numel())
    splits = splits_of(lead).mapped(lambda d: d + len(shape) - len(shape_of(lead)))
    for name, tensor in tensors.items():
        given[name] = (
            part_in(torch.broadcast_to(tensor, shape), splits) if tensor.dim() else part_in(tensor, WHOLE)
        )
    given["reduction"] = NONE if reduction == NONE else SUM
    found = func(**given)
    if reduction == NONE:
        return wrap(found, splits)
    for split in splits:
        found = all_reduce(found, split.axis)
    return found / prod(shape) if reduction == MEAN else found


@operator("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
def _by_class(
    func: Any,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Losses of [row, class, ...] with classes [row, ...] or probabilities of the same shape."""
    is_entropy = "cross" in name_of(func)
    n, probabilities = len(shape_of(x)), len(shape_of(x)) == len(shape_of(target))
    classes = 1 if n > 1 else 0
    split = splits_of(x).at(classes)
    if split is not None:
        if is_entropy and not probabilities and n == 2 and weight is None and not label_smoothing:
            return _over_classes(x, target, reduction, ignore_index)
        if split.axis.unknown == "error":
            raise shard_error(func, [x, target], "classes are split, and weights or smoothing are given")
        x = redistribute(x, splits_of(x).replaced(split.axis, None))
    have = splits_of(x) or (
        splits_of(target)
        if probabilities
        else splits_of(target).mapped(lambda d: d + (d >= classes and n > 1))
    )
    rows = have.without(classes)
    of_target = rows if probabilities else rows.mapped(lambda d: d - (d > classes))
    a, t = part_in(x, rows), part_in(target, of_target)
    w = None if weight is None else part_in(weight, WHOLE)
    smoothing = [label_smoothing] if is_entropy else []
    if reduction == NONE:
        return wrap(func(a, t, w, NONE, ignore_index, *smoothing), rows.mapped(lambda d: d - (d > classes)))
    found = func(a, t, w, SUM, ignore_index, *smoothing)
    for s in rows:
        found = all_reduce(found, s.axis)
    if reduction == SUM:
        return found
    if probabilities:
        return found / (prod(shape_of(x)) // shape_of(x)[classes])
    kept = t != ignore_index
    count = kept.to(found.dtype).sum() if w is None else (w[t.clamp(0)] * kept).sum().to(found.dtype)
    for s in rows:
        count = reduce_now(count, s.axis)
    return found / count


def _over_classes(x: Tensor, target: Tensor, reduction: int, ignore_index: int) -> Tensor:
    """Cross-entropy of logits whose classes are split: two sums per row are sent, never the logits."""
    kept = target != ignore_index
    top = torch.amax(x.detach(), 1, True)
    moved = x - top
    total = torch.sum(torch.exp(moved), 1).log()
    own = torch.gather(moved, 1, target.clamp(min=0)[:, None]).squeeze(1)
    found = (total - own) * kept.to(total.dtype)
    if reduction == NONE:
        return found
    return found.sum() / kept.sum() if reduction == MEAN else found.sum()


@operator("gather")
def _gather(func: Any, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """Values looked up along a dim; where it is split each rank gives its own, and the results are added up."""
    dim %= len(shape_of(x))
    split = splits_of(x).at(dim)
    rest = splits_of(x).without(dim)
    if any(shape_of(index)[s.dim] != s.owners.n for s in rest):
        x = redistribute(x, Splits.of([s for s in splits_of(x) if s.dim == dim]))
        rest = WHOLE
    if split is None:
        along = splits_of(index).at(dim)
        splits = rest if along is None else Splits.of([*rest, along]) if rest.on(along.axis) is None else rest
        return wrap(torch.gather(part_in(x, rest), dim, part_in(index, splits)), splits)
    own = part_in(index, rest)
    place = torch.full((split.owners.n,), -1, dtype=torch.int64, device=own.device)
    start = 0
    for low, high in split.owners.spans[split.axis.rank]:
        place[low:high] = torch.arange(start, start + high - low, device=own.device)
        start += high - low
    mine = place[own]
    local = local_of(redistribute(x, Splits.of([*rest, split])))
    found = torch.gather(local, dim, mine.clamp(min=0))
    found = torch.where(mine >= 0, found, torch.zeros((), dtype=found.dtype, device=found.device))
    found = all_reduce(found, split.axis) if found.is_floating_point() else reduce_now(found, split.axis)
    return wrap(found, rest)
