"""Compute an operator on parts by the rules that say which dims of its result follow which dims of its arguments.

The rules are those of `lightning_amp.graph`: a dim of a result that follows a dim of an argument is split as this one
is, and a dim that is summed over leaves a sum to be added up. A dim that neither follows has to be whole: the tensor is
split along another dim instead, by one all-to-all, or gathered where its axis allows that.

A plan is made once for an operator, its arguments and their splits, and kept.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

import lightning_amp.graph.flow_rules
import lightning_amp.graph.loss_rules
import lightning_amp.graph.place_rules  # noqa: F401  (these register rules)
from lightning_amp.dist.collectives import all_reduce
from lightning_amp.dist.owners import Owners
from lightning_amp.dist.registry import shard_error
from lightning_amp.dist.sharded_tensor import part_in, shape_of, splits_of, wrap
from lightning_amp.dist.splits import MeshAxis, Split, Splits
from lightning_amp.graph.flow import RULES, Call, Ref, dims_of, sums_of

NO_RULE = object()
Place = tuple[int, int]
"""A dim of a tensor argument: number of the tensor, dim."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Layouts of the arguments and of the result, shapes of the result's parts, and axes to add up over."""

    arguments: tuple[Splits, ...]
    result: Splits
    shapes: tuple[tuple[int, ...], ...]
    sums: tuple[MeshAxis, ...]


_PLANS: dict[Any, _Plan] = {}


def by_rule(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator; NO_RULE where no rule says what it does."""
    leaves = list[Tensor]()
    key = (func, _frozen(args, leaves), tuple((k, _frozen(v, leaves)) for k, v in kwargs.items()))
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) > 10_000:
            # shapes that vary from step to step would fill it without end
            _PLANS.clear()
        made = _made(func, name, args, kwargs, leaves)
        if made is None:
            return NO_RULE
        plan = _PLANS[key] = made
    parts = iter([part_in(t, splits) for t, splits in zip(leaves, plan.arguments, strict=True)])
    found = func(*[_filled(arg, parts) for arg in args], **{k: _filled(v, parts) for k, v in kwargs.items()})
    if func._schema.is_mutable:
        return args[0]
    if isinstance(found, Tensor):
        return _result(func, found, plan, plan.shapes[0])
    return type(found)(_result(func, t, plan, shape) for t, shape in zip(found, plan.shapes, strict=True))


def _result(func: Any, part: Tensor, plan: _Plan, shape: tuple[int, ...]) -> Tensor:
    # a rule that is wrong must not train
    assert tuple(part.shape) == shape, f"{func} gave a part of shape {tuple(part.shape)} for {shape}"
    for axis in plan.sums:
        part = all_reduce(part, axis)
    return wrap(part, plan.result)


def _frozen(value: Any, leaves: list[Tensor]) -> Any:
    """What a plan depends on; collects tensors in the order of the arguments."""
    if isinstance(value, Tensor):
        leaves.append(value)
        same = next(i for i, t in enumerate(leaves) if t is value)
        return shape_of(value), splits_of(value), value.dtype, same
    if isinstance(value, list | tuple):
        return tuple(_frozen(item, leaves) for item in value)
    return type(value), value


def _filled(value: Any, parts: Any) -> Any:
    if isinstance(value, Tensor):
        return next(parts)
    return [_filled(item, parts) for item in value] if isinstance(value, list | tuple) else value


def _made(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor]
) -> _Plan | None:
    call, shapes = call_of(func, name, args, kwargs, leaves)
    if call is None:
        return None
    follows = dims_of(call)
    if follows is None:
        return None
    labels: dict[Place, int] = {}
    for j, sources in enumerate(follows):
        labels |= dict.fromkeys(sources, j)
    sums = sums_of(call)
    for i, group in enumerate(sums):
        labels |= dict.fromkeys(group, -1 - i)
    return plan_of(func, leaves, labels, shapes, mutable=func._schema.is_mutable)


def call_of(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor]
) -> tuple[Call | None, list[tuple[int, ...]]]:
    """An operator's call as rules see it, and the shapes of its results."""
    op, mutable = name.rstrip("_") if not name.startswith("_") else name, func._schema.is_mutable
    elementwise = torch.Tag.pointwise in func.tags or op in ("copy", "fill", "zero", "masked_fill")
    if not elementwise and op not in RULES:
        return None, []
    where = {id(t): i for i, t in reversed(list(enumerate(leaves)))}

    def swapped(value: Any, tensor: Any) -> Any:
        if isinstance(value, Tensor):
            return tensor(value)
        return [swapped(item, tensor) for item in value] if isinstance(value, list | tuple) else value

    shapes = tuple(map(shape_of, leaves))
    if mutable:
        results = [shapes[0]]
    else:
        meta = [
            torch.empty(shape, dtype=t.dtype, device="meta") for shape, t in zip(shapes, leaves, strict=True)
        ]
        given = [swapped(arg, lambda t: meta[where[id(t)]]) for arg in args]
        with torch.no_grad():
            out = func(*given, **{k: swapped(v, lambda t: meta[where[id(t)]]) for k, v in kwargs.items()})
        results = [tuple(t.shape) for t in ([out] if isinstance(out, Tensor) else out)]
    arguments = {
        a.name: swapped(
            args[i] if i < len(args) else kwargs.get(a.name, a.default_value), lambda t: Ref(where[id(t)])
        )
        for i, a in enumerate(func._schema.arguments)
    }
    # a result that is computed value by value needs no rule of its own
    op = op if op in RULES else "add"
    return Call(op=op, shapes=shapes, result=results[0], arguments=arguments), results


def plan_of(
    func: Any,
    leaves: list[Tensor],
    labels: dict[Place, int],
    shapes: list[tuple[int, ...]],
    *,
    mutable: bool = False,
) -> _Plan:
    """Choose for every axis what is split over it.

    Args:
        func, leaves: The operator and its tensors.
        labels: Of the dims of arguments: the dim of the result that follows it, or a negative number where it is
            summed over; dims with one number are split together. What has none has to be whole.
        shapes: Of the results, which are split in the same way.
        mutable: Whether the first tensor is written to, and so keeps its splits.
    """
    taken: dict[int, MeshAxis] = {}
    targets: list[list[Split]] = [[] for _ in leaves]
    result, sums = list[Split](), list[MeshAxis]()
    for axis in sorted({s.axis for t in leaves for s in splits_of(t)}, key=lambda a: a.name):
        chosen = _chosen(func, leaves, labels, axis, taken, shapes[0], mutable)
        if chosen is None:
            continue
        label, owners = chosen
        taken[label] = axis
        for (k, d), other in labels.items():
            if other == label and shape_of(leaves[k])[d] == owners.n:
                targets[k].append(Split(axis, d, owners))
        if label >= 0:
            result.append(Split(axis, label, owners))
        else:
            sums.append(axis)
    splits = Splits.of(result)
    if mutable:
        for split in splits_of(leaves[0]):
            assert splits.on(split.axis) == split, "what is written to keeps its splits"
    parts = tuple(tuple(splits.local_shape(shape)) for shape in shapes)
    return _Plan(tuple(map(Splits.of, targets)), splits, parts, tuple(sums))


def _chosen(
    func: Any,
    leaves: list[Tensor],
    labels: dict[Place, int],
    axis: MeshAxis,
    taken: dict[int, MeshAxis],
    result: tuple[int, ...],
    mutable: bool,
) -> tuple[int, Owners] | None:
    """The label that is split over an axis, and its owners; None where all tensors are whole on it."""
    split = [(k, s) for k, t in enumerate(leaves) if (s := splits_of(t).on(axis)) is not None]
    # the largest tensor stays where it is; the first one where torch would write into it
    k, lead = min(
        split, key=lambda found: (mutable and found[0] != 0, -prod(shape_of(leaves[found[0]])), found[0])
    )
    label = labels.get((k, lead.dim))
    if mutable and k != 0:
        why = "it writes sharded values into a tensor that is not split in this way"
        raise shard_error(func, leaves, why, remedy="use the operator that returns a new tensor")
    free = [
        (result[other], other)
        for (j, d), other in labels.items()
        if j == k and other >= 0 and other not in taken and splits_of(leaves[k]).at(d) is None
    ]
    size, other = max(free, default=(0, 0))
    if label is not None and label not in taken:
        # a sum leaves the result whole on every rank: where that is large, another dim is split instead
        large = prod(result) * axis.size > prod(shape_of(leaves[k]))
        if label < 0 and large and size >= axis.size and axis.unknown == "error" and not mutable:
            return other, Owners.even(size, axis.size)
        return label, lead.owners
    if mutable:
        raise shard_error(
            func, leaves, f"it needs dim {lead.dim} whole, in place", remedy="use it out of place"
        )
    if size >= axis.size:
        return other, Owners.even(size, axis.size)
    if axis.unknown == "gather":
        return None
    dims = [d for d in range(len(shape_of(leaves[k]))) if d != lead.dim]
    raise shard_error(
        func,
        leaves,
        f"it needs dim {lead.dim} whole, and none of the dims {dims} can be split instead over {axis.size} ranks",
    )
