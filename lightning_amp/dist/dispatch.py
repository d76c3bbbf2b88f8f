"""Compute one operator on the parts of sharded tensors: by its handler, by rule, or by the operators it consists of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_amp.dist._torch import is_composite
from lightning_amp.dist.below_autograd import STATE, OnItsWay, above_autograd, below_autograd, taken_apart
from lightning_amp.dist.by_rule import rule_plan
from lightning_amp.dist.plans import PLANS, Plan, keep, key_of, run
from lightning_amp.dist.registry import BY_RULE, LOST, OPERATORS, name_of, shard_error
from lightning_amp.dist.sharded_tensor import COMPUTE, ShardedTensor, redistribute, splits_of
from lightning_amp.dist.splits import WHOLE, because
from lightning_amp.errors import ShardError


def function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of torch: by its plan, if it has been called in this way before."""
    tensors = list[Tensor]()
    try:
        key = key_of(func, args, kwargs, tensors)
        plan = PLANS.get(key)
    except TypeError:
        return below_autograd(func, args, kwargs)[0]
    if plan is not None:
        return run(plan, func, args, kwargs, tensors)
    found, call = below_autograd(func, args, kwargs)
    same = len(tensors) == len(call.tensors) and all(
        a is b for a, b in zip(tensors, call.tensors, strict=True)
    )
    if call.n_operators == 1 and call.plan is not None and same:
        keep(key, call.plan)
    return found


def operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator, with autograd; whole tensors are plain, but inside a composite operator."""
    inside = STATE.composite
    with above_autograd() as call:
        call.n_operators += 1
        call.plan, call.tensors = None, tensors_in((args, kwargs))
        if func._schema.is_mutable:
            _refuse_writes(func, args, call.tensors)
        if any(type(t) is ShardedTensor and t.splits for t in call.tensors):
            found = _on_parts(func, args, kwargs, call)
        else:
            found = func(*mapped(_local, args), **mapped(_local, kwargs))
            found = args[0] if func._schema.is_mutable else found
        return mapped(_wrapped, found) if inside else found


def _on_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: OnItsWay) -> Any:
    name, tensors = name_of(func), call.tensors
    handler = OPERATORS.get(name)
    with because(name):
        found = (
            handler(func, *complete(func, args, kwargs), **only_named(func, kwargs)) if handler else BY_RULE
        )
        plan = rule_plan(func, args, kwargs, tensors) if found is BY_RULE else found
        if type(plan) is Plan:
            call.plan = plan
            return run(plan, func, args, kwargs, tensors)
        if found is not BY_RULE:
            return found
        if is_composite(func):
            return _composite(func, args, kwargs)
        if func._schema.is_mutable and name.endswith("_"):
            return _by_copy(func, args, kwargs)
        return _gathered(func, args, kwargs, tensors)


def complete(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of an operator that may be given by position, with their defaults."""
    rest = [a for a in func._schema.arguments[len(args) :] if not a.kwarg_only]
    return [*args, *[kwargs.get(a.name, a.default_value) for a in rest]]


def only_named(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments that have to be given by name, with their defaults."""
    return {a.name: kwargs.get(a.name, a.default_value) for a in func._schema.arguments if a.kwarg_only}


def _refuse_writes(func: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    if any(a.is_out for a in func._schema.arguments) or torch.Tag.inplace_view in func.tags:
        why = "it writes to out=, or changes a shape in place"
        raise shard_error(func, tensors, why, remedy="use the operator that returns a new tensor")
    target = next((t for t in tensors if t is args[0]), None)
    if type(target) is ShardedTensor:
        if target.copied:
            raise shard_error(
                func, tensors, LOST, remedy="write into the tensor itself, or build it with cat or where"
            )
    elif any(type(t) is ShardedTensor and t.splits for t in tensors):
        why = "it writes sharded values into a tensor that every rank has whole"
        raise shard_error(func, tensors, why, remedy="use the operator that returns a new tensor")


def _composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operators that one consists of. Whole tensors take part as sharded ones, for autograd is off on this level:
    what is done to a plain tensor would have no gradient.
    """
    outermost = not STATE.composite
    try:
        with taken_apart():
            found = func.decompose(*mapped(_wrapped, args), **mapped(_wrapped, kwargs))
    except ShardError as error:
        raise ShardError(f"{name_of(func)!r} cannot be computed on parts: {error}") from None
    return mapped(_plain, found) if outermost else found


def _by_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator in place by the one that returns a new tensor."""
    space, _, name = func._schema.name.partition("::")
    new = getattr(getattr(getattr(torch.ops, space), name[:-1], None), func._overloadname, None)
    if new is None:
        raise shard_error(func, tensors_in(args), "no rule says what it does to a sharded tensor")
    return args[0].copy_(new(*args, **kwargs))


def _gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """An operator on whole tensors, if all of their axes allow that."""
    if any(s.axis.unknown == "error" for t in tensors for s in splits_of(t)) or func._schema.is_mutable:
        values = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags)
        why = "its result depends on values that lie on several ranks" if values else ""
        raise shard_error(func, tensors, why or "no rule says what it does to a sharded tensor")
    return func(*mapped(_whole, args), **mapped(_whole, kwargs))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested arguments, in order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    return [t for item in items for t in tensors_in(item)]


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Nested arguments with their tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(change, item) for key, item in value.items()}
    return type(value)(mapped(change, item) for item in value) if type(value) in (list, tuple) else value


def _wrapped(x: Tensor) -> Tensor:
    return x if type(x) is ShardedTensor else ShardedTensor(x, WHOLE)


def _plain(x: Tensor) -> Tensor:
    return x.local if type(x) is ShardedTensor and not x.splits and not x.copied else x


def _local(x: Tensor) -> Tensor:
    return x.local if type(x) is ShardedTensor else x


def _whole(x: Tensor) -> Tensor:
    return _local(redistribute(x, WHOLE))


COMPUTE.update(function=function, operator=operator)
