"""Show the progress of long work outside Lightning on standard error: a bar on a terminal, else lines of text."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
SLOW = 10.0
"""Seconds between two lines of text, where no bar can be drawn."""


def track(iterable: Iterable[Item], *, description: str, total: int) -> Iterator[Item]:
    """Yield the items, with a progress bar if standard error is a terminal, else with a line every `SLOW` seconds."""
    if not sys.stderr.isatty():
        yield from _with_lines(iterable, description, total)
        return
    # importing rich takes 50 ms, which is spent only on a terminal
    from rich.console import Console
    from rich.progress import track as draw

    yield from draw(iterable, description=description, total=total, console=Console(stderr=True))


def _with_lines(iterable: Iterable[Item], description: str, total: int) -> Iterator[Item]:
    last = time.monotonic()
    for done, item in enumerate(iterable, start=1):
        if time.monotonic() - last >= SLOW:
            print(f"{description}: {done:,} of {total:,}", file=sys.stderr, flush=True)
            last = time.monotonic()
        yield item
