"""Register functions and operators that support sharded tensors, and create the error for those that do not."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_amp.errors import ShardError
from lightning_amp.footprint.live_bytes import tensors_of

Handler = Callable[..., Any]
AnyHandler = TypeVar("AnyHandler", bound=Handler)

LOST = "it writes into a copy, which is a view of a tensor in torch; other ranks would not see the write"
LIBRARIES = ("torch", "lightning", "pytorch_lightning")
"""Packages whose lines no message names."""
BY_RULE = object()
"""Value that a handler returns to have the operator computed by the rules of lightning_amp.graph."""
OPERATORS: dict[str, Handler] = {}
"""Handlers by operator, "linear" (aten) or "space::name": (operator, *args, **kwargs) -> result, plan or BY_RULE."""
FUNCTIONS: dict[Any, Handler] = {}
"""Handlers by Python function, such as torch.Tensor.register_hook: (*args, **kwargs) -> result."""
AUTOGRAD_FUNCTIONS: dict[type[torch.autograd.Function], Handler] = {}
"""Handlers by autograd Function: (*args) -> result, which replaces `apply`."""


def operator(*names: str) -> Callable[[AnyHandler], AnyHandler]:
    """Register a handler of aten operators, by their names without overload."""

    def add(handler: AnyHandler) -> AnyHandler:
        OPERATORS.update(dict.fromkeys(names, handler))
        return handler

    return add


def composed(**table: Handler) -> None:
    """Register operators that are compositions of others; each is called without the operator argument."""

    def handler(func: Any, *args: Any, _call: Handler, **kwargs: Any) -> Any:
        return _call(*args, **kwargs)

    OPERATORS.update({name: partial(handler, _call=call) for name, call in table.items()})


def function(*functions: Any) -> Callable[[AnyHandler], AnyHandler]:
    """Register a handler of Python functions."""

    def add(handler: AnyHandler) -> AnyHandler:
        FUNCTIONS.update(dict.fromkeys(functions, handler))
        return handler

    return add


def name_of(func: Any) -> str:
    """Return the key of an operator in `OPERATORS`."""
    space, _, name = func._schema.name.partition("::")
    return str(name if space == "aten" else func._schema.name)


def mapped(value: Any, change: Callable[[Any], Any], kind: Any = Tensor) -> Any:
    """Apply a function to all values of a type in nested arguments, by default to tensors."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change, kind) for key, item in value.items()}
    return type(value)([mapped(item, change, kind) for item in value]) if isinstance(value, list | tuple) else value


def shard_error(func: Any, args: Sequence[Any], why: str, *, remedy: str = "") -> ShardError:
    """Return the error of an operator that cannot be computed on shards, with the module that called it."""
    name = name_of(func) if hasattr(func, "_schema") else getattr(func, "__name__", repr(func))
    tensors = list(map(describe, tensors_of(args)))
    remedy = remedy or "compute it on `full_tensor()`, or register a handler with lightning_amp.register_shard"
    return ShardError(f"{name!r}{_caller()} got {', '.join(tensors) or 'no tensors'}: {why}. To go on, {remedy}")


def describe(x: Tensor) -> str:
    """Return shape and splits of a tensor as text."""
    splits = getattr(x, "splits", None)
    return f"{tuple(x.shape)!r}" + (f" ({splits})" if splits is not None else "")


def _caller() -> str:
    """Find the innermost method of a module on the stack whose code is the user's, for a message."""
    frame = sys._getframe(1)
    while frame is not None:
        caller, package = frame.f_locals.get("self"), frame.f_globals.get("__name__", "").partition(".")[0]
        # a line of `Module.__call__` or `LightningModule.log` says nothing about the module
        if isinstance(caller, nn.Module) and package not in LIBRARIES:
            return f" in {type(caller).__name__!r}, {frame.f_code.co_filename}:{frame.f_lineno},"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
