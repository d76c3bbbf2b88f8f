"""Compute an operator on sharded tensors: by its handler, by a rule, or by the operators it consists of."""

from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import in_transform
from lightning_amp.errors import ShardError
from lightning_amp.footprint.live_bytes import tensors_of
from lightning_amp.holding import holding
from lightning_amp.sharding._torch import is_composite
from lightning_amp.sharding.below_autograd import OnItsWay, above_autograd, below_autograd, taken_apart
from lightning_amp.sharding.dispatch.by_rule import IN_PLACE, layout_of, rule_plan, view_of
from lightning_amp.sharding.dispatch.plans import PLANS, CallPlan, keep, key_of, laid_out, run, run_on
from lightning_amp.sharding.registry import BY_RULE, LOST, OPERATORS, mapped, name_of, shard_error
from lightning_amp.sharding.sharded_tensor import (
    COMPUTE,
    ShardedTensor,
    copy_of,
    dense_like,
    held_by,
    is_view,
    local_of,
    part_in,
    splits_of,
    wrap,
)
from lightning_amp.sharding.splits import REASON, WHOLE


def function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a torch function, by its cached plan if there is one."""
    tensors = list[Tensor]()
    try:
        key = key_of(func, args, kwargs, tensors)
        plan, stays = PLANS.get(key, (None, False))
    except TypeError:
        key = plan = None
    if in_transform():
        raise shard_error(func, [args], "it is called inside a transform of torch.func, such as vmap")
    if plan is not None:
        if stays:
            found = run_on([local_of(t) for t in tensors], plan, func, args, kwargs, tensors)
        else:
            found = run(plan, func, args, kwargs, tensors)
        return mapped(found, Tensor.requires_grad_) if kwargs.get("requires_grad") else found
    if getattr(func, "__name__", "") == "__set__":
        raise shard_error(func, args, "it would set an attribute of the wrapper alone", remedy="use copy_")
    found, call = below_autograd(func, args, kwargs)
    # `call.plan` is that of the last operator, and is only valid for the function if it runs one operator on the same
    # tensors: a function may permute or drop tensors before its operator
    same = len(tensors) == len(call.tensors) and all(map(is_, tensors, call.tensors))
    if key is not None and call.n_operators == 1 and call.plan is not None and same:
        keep(key, call.plan, tensors)
    found = mapped(found, _plain)
    # requires_grad is set above autograd
    return mapped(found, Tensor.requires_grad_) if kwargs.get("requires_grad") else found


def operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator, with autograd.

    Replicated results are wrapped too: the caller may be a function of several operators, and autograd is off there, so
    operators on a plain tensor would have no gradient.
    """
    with above_autograd() as call:
        call.n_operators += 1
        call.plan, call.tensors = None, tensors_of((args, kwargs))
        if func._schema.is_mutable:
            _refuse_writes(func, args, call.tensors)
        if any(type(t) is ShardedTensor and t.splits for t in call.tensors):
            found = _on_parts(func, args, kwargs, call)
        else:
            found = func(*mapped(args, local_of), **mapped(kwargs, local_of))
            found = args[0] if func._schema.is_mutable else found
            copy = next((t for t in call.tensors if getattr(t, "copied", False)), None)
            if copy is not None and not func._schema.is_mutable:
                # a view of a replicated copy is a copy too: a write to it would also be lost
                lost = lambda t: view_of(func) or is_view(t, held_by(copy))  # noqa: E731
                found = mapped(found, lambda t: copy_of(copy, wrap(t, WHOLE, copied=True)) if lost(t) else t)
        return mapped(found, _wrapped)


def _on_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: OnItsWay) -> Any:
    name, tensors, mutable = name_of(func), call.tensors, func._schema.is_mutable
    handler = OPERATORS.get(name)
    with holding(REASON, name):
        if handler is None and mutable and name not in IN_PLACE:
            by_value = torch.Tag.pointwise in func.tags and name.removesuffix("_") not in OPERATORS
            if not by_value:
                return _by_copy(func, args, kwargs)
        found: Any = BY_RULE
        if handler is not None:
            # handlers receive all arguments, including defaults
            rest = func._schema.arguments[len(args) :]
            by_place = [kwargs.get(a.name, a.default_value) for a in rest if not a.kwarg_only]
            by_name = {a.name: kwargs.get(a.name, a.default_value) for a in rest if a.kwarg_only}
            found = handler(func, *args, *by_place, **by_name)
        plan = rule_plan(func, args, kwargs, tensors) if found is BY_RULE else found
        if type(plan) is CallPlan:
            if not plan.mutable:
                plan = replace(plan, layout=layout_of(func, args, kwargs))
            call.plan = plan
            return run(plan, func, args, kwargs, tensors)
        if found is BY_RULE and not is_composite(func):
            return _gathered(func, args, kwargs)
        if found is BY_RULE:
            # decompose; replicated tensors are wrapped, because autograd is disabled there
            try:
                with taken_apart():
                    return func.decompose(*mapped(args, _wrapped), **mapped(kwargs, _wrapped))
            except ShardError as error:
                raise ShardError(f"{name!r} cannot be computed on parts: {error}") from None
        if mutable:
            return found
        if name == "scaled_dot_product_attention":
            # the memory format of its result depends on the kernel
            strides = iter([dense_like(found)])
        else:
            layout = layout_of(func, args, kwargs)
            strides = iter(layout.strides if layout else ())
        view = view_of(func) or name.startswith("unsafe_")
        return mapped(found, lambda t: _as_in_torch(t, next(strides, None), tensors, view))


def _as_in_torch(x: Tensor, strides: tuple[int, ...] | None, tensors: list[Tensor], view: bool) -> Tensor:
    """Give a handler's result the strides that it has in torch; if it is not a view, it gets its own memory."""
    # dropout in evaluation mode returns its argument
    if any(t is x for t in tensors):
        return x
    # a handler may return its shard unchanged if this rank has nothing to do, while other ranks allocate
    if not view and any(is_view(local_of(x), held_by(t)) for t in tensors):
        x = wrap(local_of(x).clone(), splits_of(x))
    if type(x) is not ShardedTensor:
        return laid_out(x, strides, view)
    return copy_of(tensors[0], wrap(x.held, x.splits, x.copied, strides))


def _refuse_writes(func: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    if any(a.is_out for a in func._schema.arguments) or torch.Tag.inplace_view in func.tags:
        why = "it writes to out=, or changes a shape in place"
        raise shard_error(func, tensors, why, remedy="use the operator that returns a new tensor")
    target = next((t for t in tensors if t is args[0]), None)
    if type(target) is ShardedTensor:
        if target.copied:
            raise shard_error(func, tensors, LOST, remedy="write into the tensor itself, or build it with cat or where")
    elif any(s.axis.unknown == "error" for t in tensors for s in splits_of(t)):
        why = "it writes sharded values into a tensor that every rank has whole"
        raise shard_error(func, tensors, why, remedy="use the operator that returns a new tensor")


def _by_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an in-place operator by its out-of-place form and a copy."""
    space, _, name = func._schema.name.partition("::")
    # for example "add_", or "__iand__" for "&="
    name = name.replace("__i", "__") if name.startswith("__i") else name[:-1]
    new = getattr(getattr(getattr(torch.ops, space), name, None), func._overloadname, None)
    if new is None:
        raise shard_error(func, args, "no rule says what it does to a sharded tensor")
    return args[0].copy_(new(*args, **kwargs))


def _gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator on gathered tensors, if all of their axes allow it."""
    tensors = tensors_of((args, kwargs))
    if any(s.axis.unknown == "error" for t in tensors for s in splits_of(t)) or func._schema.is_mutable:
        values = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags)
        why = "its result depends on values that lie on several ranks" if values else ""
        raise shard_error(func, tensors, why or "no rule says what it does to a sharded tensor")
    args, kwargs = mapped((args, kwargs), lambda x: part_in(x, WHOLE))
    return func(*args, **kwargs)


def _wrapped(x: Tensor) -> Tensor:
    return x if type(x) is ShardedTensor else ShardedTensor(x, WHOLE)


def _plain(x: Tensor) -> Tensor:
    return x.local if type(x) is ShardedTensor and not x.splits and not x.copied else x


COMPUTE.update(function=function, operator=operator)
