"""Progress bars on long work that is not Lightning's own, drawn on standard error."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def track(iterable: Iterable[Item], *, description: str, total: int) -> Iterator[Item]:
    """Hand on the items one by one, with a progress bar when standard error is a terminal.

    Args:
        iterable: What to iterate over.
        description: Text left of the bar.
        total: Expected number of items.
    """
    if not sys.stderr.isatty():
        yield from iterable
        return
    # rich takes 50 ms to import; a run whose output goes to a file never pays for it.
    from rich.console import Console
    from rich.progress import track as draw

    yield from draw(iterable, description=description, total=total, console=Console(stderr=True))
