"""Keep what a block's first forward pass received from other ranks, for its second pass, which sends nothing.

A block that runs again in the backward pass computes the same a second time, and would send the same a second time. A
layer that receives a few numbers asks for them by `once`: they are kept from the first pass to the end of the backward
pass. What is as large as an activation is better sent again than kept.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

from lightning_amp.holding import holding

T = TypeVar("T")
_asked: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar("asked", default=None)


def once(receive: Callable[[], T]) -> T:
    """What `receive()` returns; in a block's second pass what it has returned at the same place of the first one."""
    through = _asked.get()
    return receive() if through is None else through(receive)


def nothing_kept() -> AbstractContextManager[None]:
    """For what is computed within a pass and is no part of it."""
    return holding(_asked, None)


def first_pass(received: list[Any]) -> AbstractContextManager[None]:
    """While the block runs for the first time: what it receives is kept in the list, in order."""

    def keep(receive: Callable[[], Any]) -> Any:
        received.append(receive())
        return received[-1]

    return holding(_asked, keep)


def second_pass(received: list[Any]) -> AbstractContextManager[None]:
    """While the block runs again, as it may several times."""
    values = iter(received)
    # a pass that asks more often is another function: received then, for ranks may do so together, and compared
    return holding(_asked, lambda receive: next(values, None) or receive())
