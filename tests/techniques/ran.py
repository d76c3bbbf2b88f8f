"""Notes of the techniques that were called; apart from the files of modules, whose variables a block may not change."""

NAMES: set[str] = set()
"""Techniques that were called."""


def note(name: str) -> None:
    NAMES.add(name)
