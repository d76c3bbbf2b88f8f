"""Choose where the segments of a training step end: the least time of replays under a bound of bytes.

Of a segment [p, q) it is known (look.py)

    out     bytes of storages made in it that are read after it: held from here on, whatever the segment is
    saved   bytes of those and of what autograd saves of it: held from here on if the segment is kept; if it is
            replayed, only while the backward pass is in it
    time    of its operators, if it is replayed

so that held + saved <= bound has to be true of every segment, with held the bytes that the segments before hold. That
is a shortest path over places and bytes held, found by dynamic programming. Places are those between operators across
which few bytes are carried; bytes are counted in parts of the bound. What a rank then really holds is counted on the
step with the segments in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PARTS = 256
"""Of a bound, in which bytes held are counted."""
CLOSE = 0.01
"""Part of the bytes to which the least bound is found."""
Array = NDArray[Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Stretches:
    """What segments between any two places hold and take.

    Attributes:
        places: Places among operators, from 0 to the end.
        out, saved: [p, q] bytes of the segment from places[p] to places[q].
        seconds: [p, q] of its operators.
    """

    places: Array
    out: Array
    saved: Array
    seconds: Array

    @property
    def all_saved(self) -> int:
        """Bytes that autograd keeps of the step as it is."""
        return int(self.saved[0, -1])


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """A choice.

    Attributes:
        segments: Their ends, and whether they are replayed.
        n_bytes: Most bytes of activations that are held at once.
        seconds: What replays take.
    """

    segments: list[tuple[int, bool]]
    n_bytes: int
    seconds: float


def fastest(stretches: Stretches, bound: float) -> Cuts | None:
    """The segments that take least time while activations take no more than a bound; None where none are within it."""
    k, unit = len(stretches.places), max(bound, 1) / PARTS
    # the last column is of what cannot be
    time = np.full((k, PARTS + 2), np.inf)
    time[0, 0] = 0
    before = np.zeros((k, PARTS + 1, 3), int)
    held = np.arange(PARTS + 1)
    # [p, q, again]
    more = np.rint(np.stack([stretches.saved, stretches.out], -1) / unit).astype(int)
    took = np.stack([np.zeros_like(stretches.seconds), stretches.seconds], -1)
    took[:, :, 1][stretches.seconds == 0] = np.inf
    # the segment itself has to fit beside what is held
    room = (bound - stretches.saved) // unit
    for q in range(1, k):
        (p,) = np.nonzero(room[:q, q] >= 0)
        if not len(p):
            continue
        # [p, again, bytes held at q] -> bytes held at p
        at = held - more[p, q, :, None]
        at = np.where((at >= 0) & (at <= room[p, q, None, None]), at, PARTS + 1)
        found = (time[p[:, None, None], at] + took[p, q, :, None]).reshape(2 * len(p), -1)
        # the first of the fastest: in the order of places, and kept before replayed
        best = found.argmin(0)
        time[q, :-1] = found[best, held]
        before[q] = np.stack([p[best // 2], at.reshape(2 * len(p), -1)[best, held], best % 2], 1)
    h = int(np.argmin(time[-1]))
    seconds = float(time[-1, h])
    if not np.isfinite(seconds):
        return None
    segments, q = list[tuple[int, bool]](), k - 1
    while q:
        p, h, again = before[q, h]
        segments.append((int(stretches.places[q]), bool(again)))
        q = int(p)
    segments.reverse()
    while segments and not segments[-1][1]:
        # kept, as is what comes after the last
        segments.pop()
    return Cuts(segments=segments, n_bytes=_most(stretches, segments), seconds=seconds)


def _most(stretches: Stretches, segments: list[tuple[int, bool]]) -> int:
    held, most, p = 0.0, 0.0, 0
    ends = [*segments, (int(stretches.places[-1]), False)]
    for end, again in ends:
        q = int(np.searchsorted(stretches.places, end))
        most = max(most, held + stretches.saved[p, q])
        held += (stretches.out if again else stretches.saved)[p, q]
        p = q
    return int(most)


def least(stretches: Stretches) -> Cuts:
    """The segments with the fewest bytes, up to a part CLOSE of all."""
    low, high = 0.0, float(stretches.all_saved)
    best = Cuts(segments=[], n_bytes=stretches.all_saved, seconds=0.0)
    while high - low > CLOSE * stretches.all_saved:
        middle = (low + high) / 2
        found = fastest(stretches, middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, found.n_bytes)
    return best


class Replays:
    """The choices that a step has.

    Args:
        look: Records the step, or says why it cannot.
    """

    def __init__(self, look: Callable[[], Stretches | str]) -> None:
        self._look = look
        self._stretches: Stretches | str | None = None
        self._least: Cuts | None = None

    @property
    def stretches(self) -> Stretches | str:
        """What stretches of the step hold, or why it is not known."""
        if self._stretches is None:
            self._stretches = self._look()
        return self._stretches

    def choose(self, bound: int | None) -> Cuts | str:
        """The fastest choice with activations within a bound, or that of the fewest bytes; with None the latter."""
        if isinstance(self.stretches, str):
            return self.stretches
        if bound is not None and bound > 0 and (found := fastest(self.stretches, bound)) and found.segments:
            return found
        if self._least is None:
            self._least = least(self.stretches)
        return self._least if self._least.segments else "autograd keeps nothing that a replay would make"
