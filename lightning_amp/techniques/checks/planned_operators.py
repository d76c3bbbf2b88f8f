"""Compare the operators that a step runs with those that its plan was made by, and warn once if they differ.

A plan that counts places by operators is for one sequence of them. In another one, as after a branch on a value or with
a kernel of another layout, places are elsewhere: results stay exact, and the peak may differ from the predicted one.
"""

import base64
import warnings
import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from torch import nn

from lightning_amp._torch import has_no_values


def as_text(operators: Sequence[Any]) -> str:
    """Return the names of operators in the text form of a plan, compressed: a network repeats them."""
    return base64.b64encode(zlib.compress("\n".join(map(str, operators)).encode(), 9)).decode()


def names_in(text: str) -> list[str]:
    """Return the names of operators in a plan; none for a plan without them."""
    return zlib.decompress(base64.b64decode(text)).decode().split("\n") if text else []


class PlannedOperators:
    """The operators of a plan.

    Args:
        technique: The technique whose places they are.
        text: Their names as a plan has them; "" for a plan of an earlier version, with which nothing is compared.
    """

    def __init__(self, technique: str, text: str) -> None:
        self._technique, self._text = technique, text
        # the last operators that were equal: comparing objects takes a hundredth of the time of their names
        self._equal: list[Any] | None = None
        self._warned = not text

    def compare(self, ran: list[Any], module: nn.Module) -> None:
        """Warn if a step of a module with values has run other operators, unless it was done before."""
        if self._warned or ran == self._equal:
            return
        pairs = zip_longest(names_in(self._text), map(str, ran))
        unlike = next(((place, *pair) for place, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        if unlike is None:
            self._equal = ran
            return
        if any(map(has_no_values, module.parameters())):
            # a count of another batch, which has its own peak
            return
        self._warned = True
        place, planned, found = unlike
        warnings.warn(
            f"{self._technique}: the step runs other operators than the one that was counted for its plan; they differ"
            f" first at operator {place}, where the step runs {found or 'nothing more'}, and the count"
            f" {planned or 'nothing more'}. Results are exact, but segments end elsewhere, so that the peak may differ"
            " from the predicted one",
            stacklevel=2,
        )
