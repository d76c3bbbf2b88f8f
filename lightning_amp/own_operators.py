"""Mark operators of the library that run within a user's step, so that places in the step do not depend on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OWN: ContextVar[bool] = ContextVar("own", default=False)


@contextmanager
def own_operators() -> Iterator[None]:
    """Mark the operators in this context as the library's: they are not part of the user's step, which places count."""
    token = _OWN.set(True)
    try:
        yield
    finally:
        _OWN.reset(token)


def are_own_operators() -> bool:
    """Whether operators of now are in `own_operators`."""
    return _OWN.get()
