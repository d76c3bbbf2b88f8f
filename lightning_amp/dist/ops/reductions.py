"""Reductions over dims that are split: parts are reduced, then added up or compared over the ranks."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_amp.dist.by_rule import NO_RULE, by_rule
from lightning_amp.dist.collectives import all_reduce, reduce_now
from lightning_amp.dist.redistribute import own_part
from lightning_amp.dist.registry import name_of, operator, shard_error
from lightning_amp.dist.sharded_tensor import local_of, redistribute, shape_of, splits_of, wrap
from lightning_amp.dist.splits import MeshAxis, Splits

Dims = int | Sequence[int] | None


def dims_of(dim: Dims, n: int) -> list[int]:
    """The dims that are reduced, in ascending order; all of them where none is named."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(n))
    return sorted({d % n for d in ([dim] if isinstance(dim, int) else dim)})


def after(splits: Splits, gone: Sequence[int], keep: bool) -> Splits:
    """The splits of a result without the dims that are reduced, or with size 1 there."""
    rest = Splits.of([s for s in splits if s.dim not in gone])
    return rest if keep else rest.mapped(lambda d: d - sum(other < d for other in gone))


def axes_of(splits: Splits, gone: Sequence[int]) -> list[MeshAxis]:
    """The axes that the reduced dims are split over."""
    return [s.axis for s in splits if s.dim in gone]


@operator("sum", "mean", "nansum")
def _sum(func: Any, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    shape, splits, name = shape_of(x), splits_of(x), name_of(func)
    gone = dims_of(dim, len(shape))
    add = torch.nansum if name == "nansum" else torch.sum
    axes = axes_of(splits, gone)
    if not axes and name == "mean":
        return wrap(torch.mean(local_of(x), gone, keepdim, dtype=dtype), after(splits, gone, keepdim))
    found = add(local_of(x), gone, keepdim, dtype=dtype)
    for axis in axes:
        found = (
            all_reduce(found, axis)
            if found.is_floating_point() or found.is_complex()
            else reduce_now(found, axis)
        )
    found = found / prod(shape[d] for d in gone) if name == "mean" else found
    return wrap(found, after(splits, gone, keepdim))


@operator("var", "std", "var_mean", "std_mean")
def _variance(
    func: Any,
    x: Tensor,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Any:
    shape, name = shape_of(x), name_of(func)
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    gone = dims_of(dim, len(shape))
    less = correction if correction is not None else int(unbiased is None or unbiased)
    mean = torch.mean(x, gone, True)
    found = torch.sum((x - mean).square(), gone, keepdim) / (prod(shape[d] for d in gone) - less)
    found = found.sqrt() if name.startswith("std") else found
    return (found, mean if keepdim else torch.mean(x, gone)) if name.endswith("mean") else found


@operator("amax", "amin", "max", "min")
def _extreme(func: Any, x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    shape, splits, name = shape_of(x), splits_of(x), name_of(func)
    largest = name.endswith("max")
    if isinstance(dim, Tensor):
        return torch.maximum(x, dim) if largest else torch.minimum(x, dim)
    gone, local = dims_of(dim, len(shape)), local_of(x)
    axes = axes_of(splits, gone)
    with_places = name in ("max", "min") and dim is not None
    if with_places:
        return _along(func, x, gone[0], keepdim)
    reduced = torch.amax if largest else torch.amin
    if not axes:
        return wrap(reduced(local, gone, keepdim), after(splits, gone, keepdim))
    best = reduced(local.detach(), gone, True)
    for axis in axes:
        best = reduce_now(best, axis, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN)
    if not local.requires_grad:
        return wrap(best if keepdim else _squeezed(best, gone), after(splits, gone, keepdim))
    # as torch: what is largest more than once shares the gradient
    hit = local.detach() == best
    count, found = hit.to(best.dtype).sum(gone, keepdim), torch.where(hit, local, 0).sum(gone, keepdim)
    for axis in axes:
        count, found = reduce_now(count, axis), all_reduce(found, axis)
    return wrap(found / count, after(splits, gone, keepdim))


def _squeezed(x: Tensor, gone: Sequence[int]) -> Tensor:
    return x.squeeze(tuple(gone))


def _along(func: Any, x: Tensor, dim: int, *rest: Any) -> Any:
    """An operator that goes along one dim: where it is split, another one is split instead."""
    found = by_rule(func, name_of(func), (x, dim, *rest), {})
    if found is NO_RULE:
        raise shard_error(func, [x], "no rule says what it does to a sharded tensor")
    return found


@operator("argmax", "argmin")
def _place_of_extreme(func: Any, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    if dim is None:
        return getattr(torch, name_of(func))(torch.flatten(x), 0, keepdim)
    shape, splits = shape_of(x), splits_of(x)
    dim %= len(shape)
    split = splits.at(dim)
    if split is None:
        return wrap(func(local_of(x), dim, keepdim), after(splits, [dim], keepdim))
    # the first of the best values: the smallest place among the ranks that have it
    local, largest = local_of(x).detach(), "max" in name_of(func)
    value, place = (torch.max if largest else torch.min)(local, dim, keepdim=True)
    best = reduce_now(value, split.axis, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN)
    at = torch.arange(split.owners.n, device=local.device)
    own = own_part(at, 0, split.owners, split.axis.rank)[place]
    own = torch.where(value == best, own, split.owners.n)
    found = reduce_now(own, split.axis, dist.ReduceOp.MIN)
    return wrap(found if keepdim else found.squeeze(dim), after(splits, [dim], keepdim))


@operator("linalg_vector_norm", "norm", "frobenius_norm")
def _norm(
    func: Any, x: Tensor, ord: Any = 2, dim: Dims = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    if name_of(func) == "frobenius_norm":
        ord, dim, keepdim = 2, ord if not isinstance(ord, int) or ord != 2 else dim, bool(dim or keepdim)
    shape, splits = shape_of(x), splits_of(x)
    gone, ord = dims_of(dim, len(shape)), 2 if ord is None else ord
    if not axes_of(splits, gone):
        found = torch.linalg.vector_norm(local_of(x), ord, gone, keepdim, dtype=dtype)
        return wrap(found, after(splits, gone, keepdim))
    x = x if dtype is None else x.to(dtype)
    if ord in (float("inf"), float("-inf")):
        return (torch.amax if ord > 0 else torch.amin)(x.abs(), gone, keepdim)
    if ord == 0:
        return torch.sum(x != 0, gone, keepdim).to(x.dtype)
    if ord == 1:
        return torch.sum(x.abs(), gone, keepdim)
    if ord == 2:
        local = local_of(x)
        squares = torch.sum(
            (local * local.conj()).real if local.is_complex() else local.square(), gone, keepdim
        )
        for axis in axes_of(splits, gone):
            squares = all_reduce(squares, axis)
        return wrap(_root(squares), after(splits, gone, keepdim))
    return torch.sum(x.abs() ** ord, gone, keepdim) ** (1 / ord)


def _root(squares: Tensor) -> Tensor:
    """The square root, with a gradient of zero at zero as torch's norm has it."""
    zero = squares == 0
    return torch.where(zero, squares, squares.masked_fill(zero, 1).sqrt())


@operator("any", "all")
def _any(func: Any, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    shape, splits = shape_of(x), splits_of(x)
    gone = dims_of(dim, len(shape))
    found = func(local_of(x)) if dim is None else func(local_of(x), dim, keepdim)
    op = dist.ReduceOp.MAX if name_of(func) == "any" else dist.ReduceOp.MIN
    for axis in axes_of(splits, gone):
        found = reduce_now(found, axis, op)
    return wrap(found, after(splits, gone, keepdim))


@operator("count_nonzero")
def _count_nonzero(func: Any, x: Tensor, dim: Dims = None) -> Tensor:
    return torch.sum(x != 0, dims_of(dim, len(shape_of(x))))


@operator("prod")
def _product(
    func: Any, x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    shape, splits = shape_of(x), splits_of(x)
    gone = dims_of(dim, len(shape))
    local = local_of(x) if dtype is None else local_of(x).to(dtype)
    if not axes_of(splits, gone):
        found = local.prod() if dim is None else local.prod(dim, keepdim)
        return wrap(found, after(splits, gone, keepdim))
    whole = redistribute(wrap(local, splits), Splits.of([s for s in splits if s.dim not in gone]))
    return whole.prod() if dim is None else whole.prod(dim, keepdim)


@operator("logsumexp")
def _logsumexp(func: Any, x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    shape, splits = shape_of(x), splits_of(x)
    gone = dims_of(dim, len(shape))
    if not axes_of(splits, gone):
        return wrap(torch.logsumexp(local_of(x), gone, keepdim), after(splits, gone, keepdim))
    top = torch.amax(x.detach(), gone, True)
    top = torch.where(torch.isfinite(top), top, 0)
    found = torch.sum(torch.exp(x - top), gone, True).log() + top
    return found if keepdim else found.squeeze(tuple(gone))
