"""Keep what a block's first forward pass received from other ranks, for its recomputation, which sends nothing.

A block that is recomputed in the backward pass would repeat its communication. A layer that receives a few numbers
calls `once`, which keeps them from the first pass to the end of the backward pass. A tensor as large as an activation
should be sent again instead.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

from lightning_amp.holding import holding

T = TypeVar("T")
_through: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar("through", default=None)


def once(receive: Callable[[], T]) -> T:
    """Return `receive()`; in a recomputed block, the value that was received at the same place of the first pass."""
    through = _through.get()
    return receive() if through is None else through(receive)


def nothing_kept() -> AbstractContextManager[None]:
    """Context manager for computation inside a pass that is not part of it."""
    return holding(_through, None)


def first_pass(received: list[Any]) -> AbstractContextManager[None]:
    """Context manager for the first pass of a block: received values are appended to the list, in order."""

    def keep(receive: Callable[[], Any]) -> Any:
        received.append(receive())
        return received[-1]

    return holding(_through, keep)


def second_pass(received: list[Any]) -> AbstractContextManager[None]:
    """Context manager for the recomputation of a block, which may happen several times."""
    values = iter(received)

    def again(receive: Callable[[], Any]) -> Any:
        # a pass that receives more often than the first one communicates again; its results are compared later
        for value in values:
            return value
        return receive()

    return holding(_through, again)
