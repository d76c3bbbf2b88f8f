"""Loops over many values in one test, and few rows of a matrix that have all pairs of its values."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import combinations, product
from typing import Any

import pytest

BEFORE_A_RELEASE = (pytest.mark.exhaustive, pytest.mark.release)
FEW = [pytest.param(True, id="few"), pytest.param(False, id="all", marks=BEFORE_A_RELEASE)]
"""For the argument `few` of a test or a fixture that runs a matrix: few rows of it, and before a release all."""


def each(**values: Iterable[Any] | Callable[[], Iterable[Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
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


def all_pairs(rows: Iterable[Any], choices: Callable[[Any], tuple[Any, ...]] = tuple) -> list[Any]:
    """So few of the rows that every pair of choices that any row makes is in one of them; of equal ones the fullest."""
    made = {choices(row): row for row in rows}
    pairs = {chosen: set(combinations(enumerate(chosen), 2)) for chosen in made}
    missing, found = set().union(*pairs.values()), []
    while missing:
        best = max(made, key=lambda chosen: (len(pairs[chosen] & missing), sum(map(bool, chosen))))
        found.append(made[best])
        missing -= pairs[best]
    return found
