"""Give a context variable a value for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Let a context variable have a value for as long as the block lasts."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
