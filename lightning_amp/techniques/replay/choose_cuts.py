"""Choose where the segments of a training step end: the least time of replays under a bound of bytes.

Of a segment [p, q) it is known (`stretches_of` in install.py)

    out     bytes of storages made in it that are read after it: held from here on, whatever the segment is
    saved   bytes of those and of what autograd saves of it: held from here on if the segment is kept; if it is
            replayed, only while the backward pass is in it
    time    of its operators, if it is replayed
    at work most bytes that its operators hold at once, and the time of those that lead to each saved tensor: if it is
            replayed for one tensor after the other

so that held + saved (or at work) <= bound has to be true of every segment, with held the bytes that the segments before
hold. That is a shortest path over places and bytes held, found by dynamic programming. Places are those between
operators across which few bytes are carried; bytes are counted in parts of the bound. What a rank then really holds is
counted on the step with the segments in it.

A backward pass inside the step, as of manual optimization, frees what autograd saved before it: no segment goes across,
and held from there on is only what is read later, whatever the segments before are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT, AT_ONCE, ONE_BY_ONE = 0, 1, 2
"""Kinds of stretches: as it is, replayed as a whole, or anew for each tensor that the backward pass asks for."""
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
        at_work: [p, q] bytes while the backward pass is in it, one tensor after the other.
        one_by_one_seconds: [p, q] of all replays then.
        borders: Of the places, those at which a backward pass frees what was saved.
    """

    places: Array
    out: Array
    saved: Array
    seconds: Array
    at_work: Array
    one_by_one_seconds: Array
    borders: tuple[int, ...] = ()

    def of_kind(self, kind: int) -> tuple[Array, Array, Array]:
        """Of segments of a kind, [p, q]: bytes in their backward pass, bytes held from then on, seconds of replays."""
        if kind == KEPT:
            return self.saved, self.saved, np.zeros_like(self.seconds)
        # what has no operators is not run again
        empty = self.seconds == 0
        if kind == AT_ONCE:
            return self.saved, self.out, np.where(empty, np.inf, self.seconds)
        inside = np.minimum(self.at_work, self.saved)
        return inside, self.out, np.where(empty, np.inf, self.one_by_one_seconds)

    @property
    def all_saved(self) -> int:
        """Most bytes that autograd keeps at once of the step as it is."""
        return _most(self, [])


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """A choice.

    Attributes:
        segments: Their ends and kinds.
        n_bytes: Most bytes of activations that are held at once.
        seconds: What replays take.
    """

    segments: list[tuple[int, int]]
    n_bytes: int
    seconds: float


def fastest(stretches: Stretches, bound: float, *, kinds: Sequence[int] = (KEPT, AT_ONCE)) -> Cuts | None:
    """The segments that take least time while activations take no more than a bound; None where none are within it."""
    aim = bound
    # bytes held are rounded to parts of the bound, so that a choice may exceed it by a few: then less is aimed at
    while (found := _fastest(stretches, aim, kinds)) is not None and found.n_bytes > bound:
        aim -= max(found.n_bytes - bound, aim / PARTS)
    return found


def _fastest(stretches: Stretches, bound: float, kinds: Sequence[int]) -> Cuts | None:
    k, unit, n = len(stretches.places), max(bound, 1) / PARTS, len(kinds)
    # the last column is of what cannot be
    time = np.full((k, PARTS + 2), np.inf)
    time[0, 0] = 0
    before = np.zeros((k, PARTS + 1, 3), int)
    held = np.arange(PARTS + 1)
    # [p, q, kind]
    inside, held_on, took = (np.stack(x, -1) for x in zip(*map(stretches.of_kind, kinds), strict=True))
    # rounded, so that a choice may exceed the bound by a few parts, which `fastest` checks
    more = np.rint(held_on / unit).astype(int)
    # the segment itself has to fit in addition to what is held
    room = (bound - inside) // unit
    border = 0
    for q in range(1, k):
        (starts,) = np.nonzero((room[:q, q] >= 0).any(1))
        starts = starts[starts >= border]
        if not len(starts):
            continue
        # [p, kind, bytes held at q] -> bytes held at p
        at = held - more[starts, q, :, None]
        at = np.where((at >= 0) & (at <= room[starts, q, :, None]), at, PARTS + 1)
        found = (time[starts[:, None, None], at] + took[starts, q, :, None]).reshape(n * len(starts), -1)
        # the first of the fastest: in the order of places, and of kinds
        best = found.argmin(0)
        time[q, :-1] = found[best, held]
        came_from = at.reshape(n * len(starts), -1)[best, held]
        before[q] = np.stack([starts[best // n], came_from, np.array(kinds)[best % n]], 1)
        if q in stretches.borders:
            # all choices hold the same bytes from a border on, so that only the fastest goes on, with these bytes
            border, h, read = q, int(np.argmin(time[q, :-1])), int(np.rint(stretches.out[0, q] / unit))
            fewest = min(read, PARTS), time[q, h], before[q, h].copy()
            time[q] = np.inf
            time[q, fewest[0]], before[q, fewest[0]] = fewest[1:]
    h = int(np.argmin(time[-1]))
    seconds = float(time[-1, h])
    if not np.isfinite(seconds):
        return None
    segments, q = list[tuple[int, int]](), k - 1
    while q:
        p, h, kind = map(int, before[q, h])
        segments.append((int(stretches.places[q]), kind))
        q = p
    segments.reverse()
    while segments and segments[-1][1] == KEPT:
        # as is what comes after the last
        segments.pop()
    return Cuts(segments=segments, n_bytes=_most(stretches, segments), seconds=seconds)


def _most(stretches: Stretches, segments: list[tuple[int, int]]) -> int:
    held, most, p = 0.0, 0.0, 0
    of = {kind: stretches.of_kind(kind) for kind in {KEPT, *(kind for _, kind in segments)}}
    ends = [(int(np.searchsorted(stretches.places, end)), kind) for end, kind in segments]
    # as is what comes after the last segment, up to each border and the end
    kept_from = ends[-1][0] if ends else 0
    ends += [(q, KEPT) for q in (*stretches.borders, len(stretches.places) - 1) if q > kept_from]
    for q, kind in ends:
        inside, held_on, _ = of[kind]
        most, held, p = max(most, held + inside[p, q]), held + held_on[p, q], q
        held = stretches.out[0, q] if q in stretches.borders else held
    return int(most)


def least(stretches: Stretches, *, kinds: Sequence[int] = (KEPT, AT_ONCE)) -> Cuts:
    """The segments with the fewest bytes, up to a part CLOSE of all."""
    low, high = 0.0, float(stretches.all_saved)
    best = Cuts(segments=[], n_bytes=stretches.all_saved, seconds=0.0)
    while high - low > CLOSE * stretches.all_saved:
        middle = (low + high) / 2
        found = fastest(stretches, middle, kinds=kinds)
        if found is None:
            low = middle
        else:
            # the choice may take less than it was allowed: the search goes on below what it takes
            best, high = found, min(middle, found.n_bytes)
    return best


class Replays:
    """The choices that a step has.

    Args:
        look: Records the step, or says why it cannot.
    """

    def __init__(self, look: Callable[[], Stretches | str]) -> None:
        self._look = look
        self._least: dict[Sequence[int], Cuts] = {}

    @cached_property
    def stretches(self) -> Stretches | str:
        """What stretches of the step hold, or why it is not known."""
        return self._look()

    def choose(self, bound: int | None) -> Cuts | str:
        """The fastest choice with activations within a bound, or that of the fewest bytes.

        None is for the fewest bytes of segments that are replayed at once: one tensor after the other takes several
        times as long, which only a bound asks for.
        """
        stretches = self.stretches
        if isinstance(stretches, str):
            return stretches
        if bound is not None and bound > 0:
            for some in ((KEPT, AT_ONCE), (KEPT, AT_ONCE, ONE_BY_ONE)):
                if (cuts := fastest(stretches, bound, kinds=some)) and cuts.segments:
                    return cuts
        # what is kept counts in the forward pass too, which the bound does not include
        kinds: tuple[int, ...] = (KEPT, AT_ONCE) if bound is None else (ONE_BY_ONE,)
        if kinds not in self._least:
            self._least[kinds] = least(stretches, kinds=kinds)
        best = self._least[kinds]
        return best if best.segments else "autograd keeps nothing that a replay would make"
