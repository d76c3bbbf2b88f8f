"""Compute one operator on the parts of sharded tensors: by its handler, by rule, or by the operators it consists of."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_amp.dist._torch import is_composite, tree_leaves, tree_map_only
from lightning_amp.dist.below_autograd import STATE, taken_apart
from lightning_amp.dist.by_rule import NO_RULE, by_rule
from lightning_amp.dist.registry import OPERATORS, name_of, shard_error
from lightning_amp.dist.sharded_tensor import DISPATCH, ShardedTensor
from lightning_amp.dist.splits import WHOLE, because


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator, with autograd; whole tensors are plain, but inside a composite operator."""
    inside = STATE.composite
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if func._schema.is_mutable:
        _refuse_lost_writes(func, args, tensors)
    if not any(type(t) is ShardedTensor and t.splits for t in tensors):
        found = func(*_unwrapped(args), **_unwrapped(kwargs))
        if func._schema.is_mutable:
            return args[0]
    else:
        name = name_of(func)
        handler = OPERATORS.get(name)
        with because(name):
            found = handler(func, *args, **kwargs) if handler else by_rule(func, name, args, kwargs)
            if found is NO_RULE:
                if not is_composite(func):
                    raise shard_error(func, args, "no rule says what it does to a sharded tensor")
                return _composite(func, args, kwargs)
    return tree_map_only(Tensor, _wrapped, found) if inside else found


def _refuse_lost_writes(func: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    target = next((t for t in tensors if t is args[0]), None)
    if type(target) is ShardedTensor:
        if target.copied:
            why = "it writes into a copy, which is a view of a tensor in torch; other ranks would not see the write"
            raise shard_error(
                func, args, why, remedy="write into the tensor itself, or build it with cat or where"
            )
    elif any(type(t) is ShardedTensor and t.splits for t in tensors):
        why = "it writes sharded values into a tensor that every rank has whole"
        raise shard_error(func, args, why, remedy="use the operator that returns a new tensor")


def _composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operators that one consists of. Whole tensors take part as sharded ones, for autograd is off on this level:
    what is done to a plain tensor would have no gradient.
    """
    outermost = not STATE.composite
    with taken_apart():
        found = func.decompose(*_all_wrapped(args), **_all_wrapped(kwargs))
    return tree_map_only(Tensor, _plain, found) if outermost else found


def _wrapped(x: Tensor) -> Tensor:
    return x if type(x) is ShardedTensor else ShardedTensor(x, WHOLE)


def _plain(x: Tensor) -> Tensor:
    return x.local if type(x) is ShardedTensor and not x.splits and not x.copied else x


def _map(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map(change, item) for key, item in value.items()}
    return type(value)(_map(change, item) for item in value) if type(value) in (list, tuple) else value


def _unwrapped(value: Any) -> Any:
    return _map(lambda t: t.local if type(t) is ShardedTensor else t, value)


def _all_wrapped(value: Any) -> Any:
    return _map(_wrapped, value)


DISPATCH.append(dispatch)
