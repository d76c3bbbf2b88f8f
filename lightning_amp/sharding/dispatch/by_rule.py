"""Plan an operator on sharded tensors by rules that map dims of its arguments to dims of its result.

The rules are those of `lightning_amp.graph`. A result dim is sharded like the argument dim that it follows; a sharded
dim that is summed over leaves partial sums, which are all-reduced. A dim that no rule maps must be replicated: another
dim is sharded instead, by one all-to-all, or the tensor is gathered if its axis allows it.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

import lightning_amp.graph.flow_rules  # noqa: F401  (it registers rules)
from lightning_amp.footprint.live_bytes import named_arguments, tensors_of
from lightning_amp.graph.flow import RULES, OperatorCall, Ref, dims_of, sums_of
from lightning_amp.sharding._torch import no_modes
from lightning_amp.sharding.dispatch.plans import PLANS, CallPlan, PartLayout, keep, key_of, run
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.registry import mapped, name_of, shard_error
from lightning_amp.sharding.sharded_tensor import (
    ShardedTensor,
    axes_in,
    held_by,
    is_view,
    meta_of,
    redistribute,
    shape_of,
    splits_of,
)
from lightning_amp.sharding.splits import MeshAxis, Split, Splits

Place = tuple[int, int]
"""A dim of a tensor argument: index of the tensor, dim."""
IN_PLACE = ("copy_", "fill_", "zero_")
"""Operators without an out-of-place form."""


def by_rule(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute an operator that has a rule."""
    tensors = list[Tensor]()
    key = key_of(func, args, kwargs, tensors)
    if key not in PLANS:
        plan = rule_plan(func, args, kwargs, tensors)
        assert plan is not None, f"{func} has a rule"
        keep(key, plan, tensors)
    return run(PLANS[key][0], func, args, kwargs, tensors)


def rule_plan(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], but: Sequence[int] = ()
) -> CallPlan | None:
    """Return the plan of an operator; None if it has no rule.

    The caller shards the dims `but` of the first tensor, not the plan. `tensors` are the tensors among the arguments.
    """
    call, results = call_of(func, args, kwargs, tensors)
    if call is None:
        return None
    # labels[tensor, dim] is the result dim that follows it, or -1 - i in the i-th group of summed dims; dims with one
    # label are sharded together, and a dim without a label must be replicated
    labels: dict[Place, int] = {}
    for j, places in [*enumerate(dims_of(call) or ()), *((-1 - i, group) for i, group in enumerate(sums_of(call)))]:
        # two dims of one tensor, as in a diagonal, cannot be sharded in the same way
        if len({k for k, _ in places}) == len(places):
            labels |= {place: j for place in places if not (place[0] == 0 and place[1] in but)}
    # label -> axis over which its dims are sharded
    taken: dict[int, MeshAxis] = {}
    targets: list[list[Split]] = [[] for _ in tensors]
    result, sums = list[Split](), list[MeshAxis]()
    for axis in axes_in(*tensors):
        chosen = _chosen(func, tensors, labels, axis, taken, results[0])
        if chosen is None:
            continue
        label, owners = chosen
        taken[label] = axis
        for (k, d), other in labels.items():
            if other == label and shape_of(tensors[k])[d] == owners.n:
                targets[k].append(Split(axis, d, owners))
        if label >= 0:
            result.append(Split(axis, label, owners))
        else:
            sums.append(axis)
    # A summed label has no dim in the result: the all-reduce over its axis makes the result replicated there.
    splits = Splits.of(result)
    return CallPlan(
        name=name_of(func),
        arguments=tuple(map(Splits.of, targets)),
        result=splits,
        # All results have the splits of the first: rules map only dims that all results share. `_finished` asserts the
        # resulting shapes.
        shapes=tuple(tuple(splits.local_shape(shape)) for shape in results),
        sums=tuple(sums),
        view=view_of(func),
        mutable=func._schema.is_mutable,
    )


def call_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
) -> tuple[OperatorCall | None, list[tuple[int, ...]]]:
    """Return an operator's call in the form that rules read, and its result shapes; None if it has no rule."""
    name, mutable = name_of(func), func._schema.is_mutable
    op = name.removesuffix("_") if mutable and name.removesuffix("_") in RULES else name
    if op not in RULES:
        if torch.Tag.pointwise not in func.tags and name not in IN_PLACE:
            return None, []
        # an elementwise operator follows the rule of add
        op = "add"
    # An in-place operator follows the rule of its out-of-place form; its result has the shape of the first tensor,
    # which broadcasting cannot change.
    shapes = tuple(tuple(shape_of(t)) for t in tensors)
    results = [shapes[0]] if mutable else result_shapes(func, args, kwargs)
    # Tensors are numbered in the order of `tensors_of`, so that a rule's Ref is an index into `tensors`.
    numbers = iter(map(Ref, range(len(tensors))))
    given, by_name = (mapped(values, lambda _: next(numbers)) for values in (args, kwargs))
    arguments = named_arguments(func, given, by_name)
    return OperatorCall(op=op, shapes=shapes, result=results[0], arguments=arguments), results


def view_of(func: Any) -> bool:
    """Whether an operator may return a view of its first tensor."""
    returns = func._schema.returns
    return not func._schema.is_mutable and bool(returns) and returns[0].alias_info is not None


def result_shapes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes of an operator's results, computed on meta tensors."""
    try:
        return [tuple(t.shape) for t in _without_values(func, args, kwargs)[0]]
    except NotImplementedError:
        raise shard_error(func, args, "the shape of its result depends on values") from None
    except RuntimeError:
        kinds = {t.dtype for t in tensors_of((args, kwargs)) if t.is_floating_point()}
        if len(kinds) < 2:
            raise
        # autocast casts factors to one dtype, but not meta tensors; the shape does not depend on the dtype
        return [tuple(t.shape) for t in _without_values(func, args, kwargs, torch.float32)[0]]


_LAYOUTS: dict[Any, PartLayout | None] = {}


def layout_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PartLayout | None:
    """Return the layout of an operator's global result; None if meta tensors do not give it: new memory, contiguous."""
    try:
        key = key_of(func, args, kwargs, [])
        if key in _LAYOUTS:
            return _LAYOUTS[key]
    except TypeError:
        key = None
    try:
        results, given = _without_values(func, args, kwargs)
        # some operators, such as type_as, return their argument although their schema does not say so
        view = bool(results and given) and is_view(results[0], given[0])
        found = PartLayout(tuple(t.stride() for t in results), view)
    except (NotImplementedError, RuntimeError):
        assert not view_of(func), f"{func} returns a view"
        found = None
    if key is not None:
        if len(_LAYOUTS) > 10_000:
            _LAYOUTS.clear()
        _LAYOUTS[key] = found
    return found


def _without_values(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Run an operator on meta tensors; return results and tensor arguments, with floating-point ones in `dtype`."""
    given = list[Tensor]()

    def meta(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return torch.device("meta")
        made = meta_of(x)
        given.append(made.to(dtype) if dtype and made.is_floating_point() else made)
        return given[-1]

    kinds = Tensor | torch.device
    with no_modes(), torch.no_grad():
        out = func(*mapped(args, meta, kinds), **mapped(kwargs, meta, kinds))
    return tensors_of(out), given


def _chosen(
    func: Any,
    tensors: Sequence[Tensor],
    labels: dict[Place, int],
    axis: MeshAxis,
    taken: dict[int, MeshAxis],
    result: tuple[int, ...],
) -> tuple[int, Owners] | None:
    """Return the label that is sharded over an axis, and its owners; None if all tensors must be gathered there."""
    split = [(k, s) for k, t in enumerate(tensors) if (s := splits_of(t).on(axis)) is not None]
    mutable = func._schema.is_mutable
    if mutable and split[0][0] != 0:
        if axis.unknown == "gather":
            # the tensor that is written to keeps its memory, which views of it share
            return None
        why = "it writes sharded values into a tensor that is not split in this way"
        raise shard_error(func, tensors, why, remedy="use the operator that returns a new tensor")
    # the largest tensor is not moved, or the first one if it is written to
    k, lead = split[0] if mutable else max(split, key=lambda s: (prod(shape_of(tensors[s[0]])), -s[0]))
    label = labels.get((k, lead.dim))
    # A tensor that is written to keeps its splits, because its views share the memory.
    if mutable:
        if label is None or label in taken:
            why = f"it needs dim {lead.dim} whole, in place"
            raise shard_error(func, tensors, why, remedy="use it out of place")
        return label, lead.owners
    # an all-to-all sends 1 / R of what a gather sends, so another dim is preferred to gathering: dims of the result
    # first, then summed dims
    free = [
        (other >= 0, shape_of(tensors[k])[d], -other)
        for (j, d), other in labels.items()
        if j == k
        and other not in taken
        and splits_of(tensors[k]).at(d) is None
        and shape_of(tensors[k])[d] >= axis.size
    ]
    # All ranks choose the same dim, because it depends on shapes and labels, not on values or shard sizes.
    follows, size, other = max(free, default=(False, 0, 0))
    even = -other, Owners.even(size, axis.size)
    if label is not None and label not in taken:
        # operands with this label are sharded in the same way, so that only sums of a summed dim are sent. The
        # all-reduced result is replicated: if it is large, another dim is sharded instead
        large = prod(result) * axis.size > prod(shape_of(tensors[k]))
        return even if label < 0 and large and follows and axis.unknown == "error" else (label, lead.owners)
    if free:
        return even
    if axis.unknown == "gather":
        return None
    raise needs_whole(func, tensors, tensors[k], lead)


def needs_whole(func: Any, args: Any, x: Tensor, split: Split) -> Exception:
    """Return the error of an operator that needs a replicated dim of a tensor without another dim to shard."""
    dims = [d for d in range(len(shape_of(x))) if d != split.dim]
    return shard_error(
        func,
        args,
        f"it needs dim {split.dim} whole, and none of the dims {dims} can be split over {split.axis.size} ranks",
    )


def with_whole(func: Any, x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the tensor replicated along `dims`, for an operator that requires it."""
    return redistribute(x, splits_with_whole(func, x, splits_of(x), dims))


def splits_with_whole(func: Any, x: Tensor, splits: Splits, dims: Sequence[int], stay: Sequence[int] = ()) -> Splits:
    """Return splits without some dims: another dim, not in `stay`, is sharded instead, or the tensor is gathered."""
    shape = shape_of(x)
    for split in [s for s in splits if s.dim in dims]:
        axis = split.axis
        free = [d for d, n in enumerate(shape) if n >= axis.size and d not in (*dims, *stay) and splits.at(d) is None]
        if not free and axis.unknown == "error":
            raise needs_whole(func, [x], x, split)
        dim = max(free, key=lambda d: shape[d], default=None)
        to = None if dim is None else Split(axis, dim, Owners.even(shape[dim], axis.size))
        splits = splits.replaced(axis, to)
    return splits


def plan_without(func: Any, x: Tensor, dims: Sequence[int], *args: Any) -> CallPlan:
    """Return the plan of an operator as if some dims of a tensor, which the caller shards, were replicated."""
    rest = splits_of(x).without(*dims)
    with no_modes():
        part = torch.empty(rest.local_shape(shape_of(x)), dtype=held_by(x).dtype, device="meta")
    given = (ShardedTensor(part, rest), *args)
    plan = rule_plan(func, given, {}, [t for t in given if isinstance(t, Tensor)], dims)
    assert plan is not None, f"{func} has a rule"
    return plan
