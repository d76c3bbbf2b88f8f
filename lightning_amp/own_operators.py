"""Mark operators of the library that run within a user's step, so that places in the step do not depend on them."""

from contextlib import AbstractContextManager
from contextvars import ContextVar

from lightning_amp.holding import holding

_OWN: ContextVar[bool] = ContextVar("own", default=False)


def own_operators() -> AbstractContextManager[None]:
    """Mark the operators in this context as the library's: they are not part of the user's step, which places count."""
    return holding(_OWN, True)


def are_own_operators() -> bool:
    """Whether operators of now are in `own_operators`."""
    return _OWN.get()
