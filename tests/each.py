"""Run a test once for every value in a loop of one test, where values are many and alike, such as seeds."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import product
from typing import Any


def each(
    **values: Iterable[Any] | Callable[[], Iterable[Any]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that calls the test with all combinations; a failure says with which.

    Args:
        **values: By the name of the argument. A function is called when the test runs, not when it is imported.
    """

    def of(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def in_turn(**fixtures: Any) -> None:
            for chosen in product(*(v() if callable(v) else v for v in values.values())):
                named = dict(zip(values, chosen, strict=True))
                try:
                    test(**fixtures, **named)
                except BaseException as error:
                    error.add_note(f"with {named!r}")
                    raise

        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in values]
        in_turn.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return in_turn

    return of
