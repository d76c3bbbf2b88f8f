"""Compare the order in which a step does something with that of the count that its plan was made by, and warn once.

A plan may give places to operators, or numbers to tensors that are saved. They hold for one order. In another one, as
after a branch on a value or with a kernel of another layout, they mean others: results stay exact, and the peak may
differ from the predicted one. Steps are compared whose batch has the shapes of the counted one: a larger batch is
counted by itself before it runs.
"""

import base64
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any


def as_text(shapes: Iterable[Sequence[int]], order: Iterable[Any]) -> str:
    """Return a batch's shapes, and names or numbers, in the text form of a plan; compressed: a network repeats them."""
    lines = "\n".join([_in_words(shapes), *map(str, order)])
    return base64.b64encode(zlib.compress(lines.encode(), 9)).decode()


def lines_in(text: str) -> list[str]:
    """Return the shapes, and the names or numbers, in the text of a plan."""
    return zlib.decompress(base64.b64decode(text)).decode().split("\n")


def _in_words(shapes: Iterable[Sequence[int]]) -> str:
    return " ".join("x".join(map(str, shape)) for shape in shapes)


class PlannedOrder:
    """The order of a plan.

    Args:
        text: It in the form of a plan; "" for a plan without it, with which nothing is compared.
        says: The warning, with the fields `place`, `found` and `planned` of the first difference.
        first: How many are compared; None for all.
    """

    def __init__(self, text: str, says: str, *, first: int | None = None) -> None:
        self._text, self._says, self._first = text, says, first
        self._shapes = ""
        # what was equal last: comparing objects takes a fraction of the time of their names
        self._equal: Sequence[Any] | None = None
        self._warned = not text

    def compare(self, shapes: Iterable[Sequence[int]], found: Sequence[Any], is_count: Callable[[], bool]) -> None:
        """Warn if the step of a batch of the counted shapes has another order.

        Not if that was said before, nor if the step is a count, on fake tensors. Of a batch without tensors the sizes
        are not known.
        """
        if self._warned or (found := found[: self._first]) == self._equal:
            return
        self._shapes = self._shapes or lines_in(self._text)[0]
        if not self._shapes or self._shapes != _in_words(shapes):
            return
        pairs = zip_longest(lines_in(self._text)[1:][: self._first], map(str, found))
        unlike = next(((place, *pair) for place, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        if unlike is None:
            self._equal = found
            return
        if is_count():
            # it finds the peak of this order
            return
        self._warned = True
        place, planned, other = unlike
        nothing = "nothing more"
        warnings.warn(self._says.format(place=place, found=other or nothing, planned=planned or nothing), stacklevel=2)
