"""Join the reasons of many blocks into one text: each reason once, with the names of its blocks."""

from collections.abc import Iterable

SHOWN = 3
"""Reasons that are spelled out."""


def group_reasons(reasons: Iterable[tuple[str, str]]) -> str:
    """Of pairs of a block's name and a reason: "of blocks.0 to blocks.11 it has hooks; of head.2 it is compiled"."""
    blocks: dict[str, list[str]] = {}
    for name, reason in dict.fromkeys(reasons):
        blocks.setdefault(reason, []).append(name)
    said = [f"of {' and '.join(_runs(names))} {reason}" for reason, names in blocks.items()]
    more = len(said) - SHOWN
    return "; ".join([*said[:SHOWN], *([f"and {more} more reasons"] if more > 0 else [])])


def _runs(names: Iterable[str]) -> list[str]:
    """Names, of which "blocks.0" and what follows it by number are one: "blocks.0 to blocks.11"."""
    runs: list[tuple[str, str]] = []
    for name in names:
        if runs and name == _next(runs[-1][1]):
            runs[-1] = runs[-1][0], name
        else:
            runs.append((name, name))
    return [first if first == last else f"{first} to {last}" for first, last in runs]


def _next(name: str) -> str:
    before, dot, number = name.rpartition(".")
    return f"{before}{dot}{int(number) + 1}" if number.isdecimal() else ""
