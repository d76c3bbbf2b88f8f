"""Set a context variable, or replace attributes of an object, temporarily."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable within the block, and reset it afterwards."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def replacing(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of an object for the duration of a block, including those that a class inherits."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in values.items():
            if name in before:
                setattr(owner, name, before[name])
            elif vars(owner)[name] is value:
                # otherwise a library that was imported meanwhile has replaced it
                delattr(owner, name)
