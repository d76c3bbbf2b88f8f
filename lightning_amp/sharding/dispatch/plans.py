"""Define and run plans: how an operator is computed on shards. Calls with equal shapes and splits reuse a plan."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lightning_amp.holding import holding
from lightning_amp.sharding.collectives import all_reduce
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.redistribute import resplit
from lightning_amp.sharding.registry import name_of
from lightning_amp.sharding.sharded_tensor import ShardedTensor, copy_of, is_view, part_in, splits_of
from lightning_amp.sharding.splits import REASON, MeshAxis, Splits

TENSOR = object()
"""Placeholder of the next tensor in the arguments of a plan."""


class PartLayout(NamedTuple):
    """Strides of torch's results on global tensors, and whether the first result is a view of the first tensor."""

    strides: tuple[tuple[int, ...], ...]
    view: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """How one call is computed on shards.

    Attributes:
        name: Name of the operator, under which its collectives are counted.
        arguments: Splits to which its tensors are redistributed, in the order of the arguments.
        result: Splits of its results.
        shapes: Shapes of the results' local shards.
        sums: Axes over which the results are all-reduced.
        call, args: Function and arguments that replace the operator; None calls the operator with the caller's
            arguments.
        settled: Final splits of the results, if some ranks would own nothing of them; else None.
        view: Whether torch's schema declares a view of the first tensor.
        layout: Layout of the global results; set when a plan is run.
        mutable: Whether the first tensor is written to and returned.
    """

    name: str
    arguments: tuple[Splits, ...]
    result: Splits
    shapes: tuple[tuple[int, ...], ...]
    sums: tuple[MeshAxis, ...] = ()
    call: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    settled: Splits | None = None
    view: bool = False
    layout: "PartLayout | None" = None
    mutable: bool = False


def plan_of_call(
    func: Any, given: Sequence[Splits], splits: Splits, shape: Sequence[int], *call: Any, view: bool = False
) -> CallPlan:
    """Return a plan that calls a function in place of an operator.

    Args:
        func, given: Operator, and the splits to which its tensors are redistributed.
        splits, shape: Splits and global shape of the result.
        call: The function and its arguments, in which TENSOR stands for the next tensor.
        view: Whether torch's schema declares that the operator returns a view of the first tensor.
    """
    # every rank must own an index: a long enough dim is sharded evenly, and a shorter one is gathered
    settled = splits
    for split in splits:
        axis, _, owners = split
        if not all(owners.period_counts):
            even = split._replace(owners=Owners.even(owners.n, axis.size))
            settled = settled.replaced(axis, even if owners.n >= axis.size else None)
    return CallPlan(
        name=name_of(func),
        arguments=tuple(given),
        result=splits,
        shapes=(tuple(splits.local_shape(shape)),),
        call=call[0],
        args=call[1:],
        settled=None if settled is splits else settled,
        view=view,
    )


PLANS: dict[Any, tuple[CallPlan, bool]] = {}
"""Plan of each key (`key_of`), and whether it needs no communication, so that the fast path can be taken."""


def key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """Return a hashable key of all that a plan depends on, or raise TypeError; append the call's tensors."""
    key = (func, *[_frozen(arg, tensors) for arg in args])
    return (key, tuple((name, _frozen(value, tensors)) for name, value in kwargs.items())) if kwargs else key


def _frozen(value: Any, tensors: list[Tensor]) -> Any:
    kind = type(value)
    if kind is ShardedTensor:
        tensors.append(value)
        return value.whole_shape, value.splits, value.strides, value.copied, value.held.dtype
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype
    if kind is list or kind is tuple:
        # scale factors come in lists
        return tuple([item if type(item) is float else _frozen(item, tensors) for item in value])
    if kind is float or kind is complex:
        # no layout depends on its value, which may differ from step to step
        return kind
    if kind is slice:
        return slice, _frozen((value.start, value.stop, value.step), tensors)
    # 1 and True are equal
    return (kind, value) if kind is bool else value


def keep(key: Any, plan: CallPlan, tensors: Sequence[Tensor]) -> None:
    """Cache a plan for calls with the same shapes and splits."""
    if len(PLANS) > 10_000:
        # shapes that vary from step to step would fill the cache without limit
        PLANS.clear()
    # fast path: the call needs only a lookup and the operator. Splits are interned, so that `is` compares them
    stays = all(splits_of(t) is splits for t, splits in zip(tensors, plan.arguments, strict=True))
    PLANS[key] = plan, stays and not plan.sums and plan.settled is None


def run(plan: CallPlan, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    """Compute a call by its plan."""
    with holding(REASON, plan.name):
        parts = [part_in(t, splits) for t, splits in zip(tensors, plan.arguments, strict=True)]
        return run_on(parts, plan, func, args, kwargs, tensors)


def run_on(
    parts: list[Tensor],
    plan: CallPlan,
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
) -> Any:
    """Compute a call by its plan, given the local shards of its tensors."""
    rest = iter(parts)
    if plan.call is not None:
        found = plan.call(*_filled(plan.args, rest))
    else:
        found = func(*_filled(args, rest), **dict(zip(kwargs, _filled(kwargs.values(), rest), strict=True)))
    if plan.mutable:
        return tensors[0]
    if isinstance(found, Tensor):
        return _finished(found, plan, 0, parts, tensors)
    assert len(found) == len(plan.shapes), f"{len(found)} results of {plan.name!r}"
    results = [_finished(t, plan, i, parts, tensors) for i, t in enumerate(found)]
    return type(found)(results)


def _filled(values: Iterable[Any], parts: Iterator[Tensor]) -> list[Any]:
    """Replace tensors in the arguments by local shards."""
    return [
        next(parts)
        if value is TENSOR or isinstance(value, Tensor)
        else type(value)(_filled(value, parts))
        if type(value) in (list, tuple)
        else value
        for value in values
    ]


def _finished(part: Tensor, plan: CallPlan, i: int, parts: list[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    # a wrong rule must raise an error, not train
    assert part.shape == plan.shapes[i], f"a part of shape {tuple(part.shape)} for {plan.shapes[i]}"
    strides, view = (None, plan.view) if plan.layout is None else (plan.layout.strides[i], plan.layout.view)
    # Before the checks for views: until it is reduced, the shard is a partial sum in new memory.
    for axis in plan.sums:
        part = all_reduce(part, axis)
    splits = plan.result
    if (plan.call is not None or plan.view) and not view and is_view(part, parts[0]):
        # on global tensors torch returns a copy; here it is a view, such as if all indices of the shard are selected
        part = part.clone()
    if plan.settled is not None:
        part, splits = resplit(part, splits, plan.settled), plan.settled
    copied = False
    if view:
        # A view in torch that does not share memory with the first tensor here is a copy: on the same device it was
        # sent or copied here, so that writes would be lost, and raise an error. Across devices, torch copies too.
        moved = plan.settled is not None or plan.arguments[0] is not splits_of(tensors[0])
        shares = is_view(part, parts[0])
        copied = moved or (getattr(tensors[0], "copied", False) if shares else part.device == parts[0].device)
    if not splits and not copied:
        return laid_out(part, strides, view)
    return copy_of(tensors[0], ShardedTensor(part, splits, copied, strides))


def laid_out(whole: Tensor, strides: tuple[int, ...] | None, view: bool) -> Tensor:
    """Give a new replicated tensor the strides that it has in torch; a view is returned unchanged."""
    if view or strides is None or whole.numel() < 2:
        return whole
    same = all(n == 1 or a == b for n, a, b in zip(whole.shape, whole.stride(), strides, strict=True))
    return whole if same else whole.new_empty_strided(whole.shape, strides).copy_(whole)
