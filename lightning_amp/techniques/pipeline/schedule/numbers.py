"""Check times, bytes and counts given by callers."""

from collections.abc import Iterable
from typing import Any, SupportsFloat, TypeAlias

from lightning_amp.errors import PlanError
from lightning_amp.quantities import is_number

Numbers: TypeAlias = Iterable[SupportsFloat]
LARGEST = 1e100
"""More than any time or number of bytes, and sums of these stay floats."""


def numbers_of(name: str, given: Any, length: int | None = None, *, above_zero: bool = False) -> list[float]:
    """The numbers as Python's own, unrounded.

    Args:
        name: What the caller calls them.
        given: A list, a tuple, an array.
        length: How many there must be; none: one or more.
        above_zero: Whether 0 is not allowed either.

    Raises:
        PlanError: Something else, or a number out of range.
    """
    found = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(found, str | bytes) or not isinstance(found, Iterable):
        raise PlanError(f"{name}={given!r} is not supported; allowed is a list of numbers: pass one")
    listed = [n.item() if hasattr(n, "item") else n for n in found]
    if not listed or length not in (None, len(listed)):
        raise PlanError(
            f"{name} got {len(listed)!r} numbers; allowed are"
            f" {'one or more' if length is None else repr(length)}: pass one for each"
        )
    for place, n in enumerate(listed):
        if not (is_number(n) and 0 <= n <= LARGEST and (n > 0 or not above_zero)):
            raise PlanError(
                f"{name}[{place}]={n!r} is not supported; allowed are numbers"
                f" {'above 0' if above_zero else 'from 0'} to {LARGEST:g}: correct it"
            )
    return listed


def rows_of(name: str, given: Any, stages: int, length: int) -> list[list[float]]:
    """One row of numbers for all stages, or a row for each.

    Args:
        name, given, length: As those of `numbers_of`; `given` may be a list of rows.
        stages: How many rows there must be then.

    Raises:
        PlanError: Something else, or a number out of range.
    """
    rows = given.tolist() if hasattr(given, "tolist") else given
    rows = list(rows) if isinstance(rows, Iterable) else rows
    if not isinstance(rows, list) or not any(isinstance(row, Iterable) for row in rows):
        return [numbers_of(name, rows, length)]
    if len(rows) != stages:
        raise PlanError(
            f"{name} got {len(rows)!r} rows; allowed are a number for each layer, or a row for each of"
            f" {stages!r} stages: pass one of these"
        )
    return [numbers_of(f"{name}[{i}]", row, length) for i, row in enumerate(rows)]


def check_count(name: str, count: object) -> int:
    """The number, if it counts something.

    Raises:
        PlanError: Not a whole number of 1 or more.
    """
    if type(count) is not int or count < 1:
        raise PlanError(f"{name}={count!r} is not supported; allowed is a whole number of 1 or more: correct it")
    return count
