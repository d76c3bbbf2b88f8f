"""Report the progress of long work outside Lightning on standard error: a bar, or lines in a log file."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
SLOW = 10.0
"""Seconds without a word after which a line is written where no bar can be drawn."""


def track(iterable: Iterable[Item], *, description: str, total: int) -> Iterator[Item]:
    """Hand on the items one by one, with a progress bar when standard error is a terminal, else a line when slow."""
    if not sys.stderr.isatty():
        yield from _with_lines(iterable, description, total)
        return
    # rich takes 50 ms to import; a run whose output goes to a file never pays for it.
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
