"""Show the progress of long work outside Lightning on standard error: a bar on a terminal, else lines of text."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import Any, TypeVar

Item = TypeVar("Item")
SLOW = 10.0
"""Seconds between two lines of text, where no bar can be drawn."""
LONG = 3.0
"""Seconds after which work of unknown length is shown."""
WIDEST = 34
"""Characters of what it does now, so that a bar has 80 at most."""


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


class _Work:
    """Work of unknown length: after `LONG` seconds a bar that says what is counted; without a terminal, lines of it."""

    def __init__(self, description: str) -> None:
        self._description, self._now, self._counts = description, "", 0
        self._bar: Any = None
        self._over, self._lock = False, Lock()
        self._show_after(LONG)

    def _show_after(self, seconds: float) -> None:
        self._timer = Timer(seconds, self._show)
        self._timer.daemon = True
        self._timer.start()

    def count(self, what: str) -> None:
        with self._lock:
            self._counts, self._now = self._counts + 1, what
            if self._bar is not None:
                self._bar.update(0, description=self._text)

    @property
    def _text(self) -> str:
        # the one that runs now is not done
        done = max(0, self._counts - 1)
        now = f", now {self._now:.{WIDEST}}" if self._now else ""
        return f"{self._description}: {done:,} step{'s' * (done != 1)} counted{now}"

    def _show(self) -> None:
        with self._lock:
            if self._over:
                return
            if not sys.stderr.isatty():
                print(f"{self._text} ...", file=sys.stderr, flush=True)
                self._show_after(SLOW)
                return
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(self._text, total=None)
            self._bar.start()

    def end(self) -> None:
        with self._lock:
            self._over = True
            self._timer.cancel()
            if self._bar is not None:
                self._bar.stop()


_working: list[_Work] = []
"""The work that is shown, if any: parts of it show nothing of their own."""


@contextmanager
def shown_if_long(description: str, *, show: bool = True) -> Iterator[None]:
    """Show on standard error what a block of code counts, once it has run for `LONG` seconds."""
    if _working or not show:
        yield
        return
    _working.append(_Work(description))
    try:
        yield
    finally:
        _working.pop().end()


def counting(what: str) -> None:
    """Say what is counted from now on, to the block of `shown_if_long` around this, if any."""
    for work in _working:
        work.count(what)
