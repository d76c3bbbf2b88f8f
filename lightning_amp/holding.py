"""Set a context variable temporarily."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable within the block, and reset it afterwards."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
