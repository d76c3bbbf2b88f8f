"""Choose the segments of a training step that are replayed: the least replay time under a memory bound.

For a segment [p, q) of operators the following is known (`stretches_of` in install.py):

    out     bytes of storages that it makes and that are read after it: held afterwards, for any kind of segment
    saved   bytes of those and of the tensors that autograd saves from it: held afterwards if the segment is kept; if it
            is replayed, only while the backward pass is in it
    time    time of its operators, if it is replayed
    at work peak of its operators, and the time of those that lead to each saved tensor: if it is replayed for one
            tensor at a time, or for several that were saved one after the other, up to a window of bytes

Every segment must satisfy held + saved (or at work) <= bound, where held is what the segments before it hold. The
choice is a shortest path over (place, bytes held), found by dynamic programming. Places are positions between operators
where few bytes are alive; bytes are counted in units of bound / PARTS. The actual bytes of a rank are then counted on
the step with the chosen segments.

A backward pass inside the step, as in manual optimization, frees the tensors that autograd saved before it. No segment
crosses it, and afterwards only tensors that are read later are held, for any segments before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT, AT_ONCE, ONE_BY_ONE = 0, 1, 2
"""Kinds of segments: not replayed, replayed as a whole, or replayed for each tensor that the backward pass reads."""
KINDS = KEPT, AT_ONCE, ONE_BY_ONE
WINDOWS = 0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4
"""Windows that are tried, as shares of the bound."""
PARTS = 256
"""Number of units in which bytes held are counted, up to the bound."""
CLOSE = 0.01
"""Precision of the least bound, as a share of all saved bytes."""
Array = NDArray[Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Stretches:
    """Bytes and times of the segments between any two places.

    Attributes:
        places: Places among operators, from 0 to the end.
        out, saved: [p, q] bytes of the segment from places[p] to places[q].
        seconds: [p, q] time of its operators.
        at_work: [p, q] bytes while the backward pass is in it, replayed for one tensor at a time.
        one_by_one_seconds: [p, q] time of all replays in that case.
        saved_each: [p, q] mean bytes of its saved storages.
        borders: Indices of places at which a backward pass frees saved tensors.
        views: Whether operators that only return views have places.
        why_nothing: Why a replay may have nothing to free.
    """

    places: Array
    out: Array
    saved: Array
    seconds: Array
    at_work: Array
    one_by_one_seconds: Array
    saved_each: Array
    borders: tuple[int, ...] = ()
    views: bool = True
    why_nothing: str = "autograd keeps nothing that a replay would make"

    def of_kind(self, kind: int, window: float = 0) -> tuple[Array, Array, Array]:
        """Return for segments of a kind, [p, q]: bytes in their backward pass, bytes held afterwards, replay time.

        `window`: bytes of saved tensors that a replay for one tensor also makes.
        """
        if kind == KEPT:
            return self.saved, self.saved, np.zeros_like(self.seconds)
        # a segment without operators is not replayed
        empty = self.seconds == 0
        if kind == AT_ONCE:
            return self.saved, self.out, np.where(empty, np.inf, self.seconds)
        inside = np.minimum(self.at_work + window, self.saved)
        # as many replays less as tensors are in the window; the segment runs at least once
        each = np.maximum(self.saved_each, 1)
        seconds = np.maximum(self.one_by_one_seconds * each / (each + window), self.seconds)
        return inside, self.out, np.where(empty, np.inf, seconds)

    @property
    def all_saved(self) -> int:
        """Most bytes that autograd keeps at once without replay."""
        return _most(self, [])


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Chosen segments.

    Attributes:
        segments: Their ends and kinds.
        n_bytes: Most bytes of activations that are held at once.
        seconds: Time of all replays.
        window: Bytes of saved tensors that a replay for one tensor also makes.
    """

    segments: list[tuple[int, int]]
    n_bytes: int
    seconds: float
    window: int = 0


def fastest(
    stretches: Stretches, bound: float, *, kinds: Sequence[int] = (KEPT, AT_ONCE), window: int = 0
) -> Cuts | None:
    """Return the segments with the least time whose activations fit a bound; None if none fit."""
    aim = bound
    # bytes held are rounded, so a choice may exceed the bound slightly: then the aim is lowered
    while (found := _fastest(stretches, aim, kinds, window)) is not None and found.n_bytes > bound:
        aim -= max(found.n_bytes - bound, aim / PARTS)
    return found


def _fastest(stretches: Stretches, bound: float, kinds: Sequence[int], window: int) -> Cuts | None:
    k, unit, n = len(stretches.places), max(bound, 1) / PARTS, len(kinds)
    # the last column represents impossible states
    time = np.full((k, PARTS + 2), np.inf)
    time[0, 0] = 0
    before = np.zeros((k, PARTS + 1, 3), int)
    held = np.arange(PARTS + 1)
    # [p, q, kind]
    inside, held_on, took = (
        np.stack(x, -1) for x in zip(*(stretches.of_kind(kind, window) for kind in kinds), strict=True)
    )
    # rounded, so that a choice may exceed the bound by a few units, which `fastest` checks
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
        # the first minimum, in the order of places and kinds
        best = found.argmin(0)
        time[q, :-1] = found[best, held]
        came_from = at.reshape(n * len(starts), -1)[best, held]
        before[q] = np.stack([starts[best // n], came_from, np.array(kinds)[best % n]], 1)
        if q in stretches.borders:
            # all choices hold the same bytes after a border, so only the fastest one is continued
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
        # the rest of the step is kept anyway
        segments.pop()
    most = _most(stretches, segments, window)
    return Cuts(segments=segments, n_bytes=most, seconds=seconds, window=window)


def _most(stretches: Stretches, segments: list[tuple[int, int]], window: int = 0) -> int:
    held, most, p = 0.0, 0.0, 0
    of = {kind: stretches.of_kind(kind, window) for kind in {KEPT, *(kind for _, kind in segments)}}
    ends = [(int(np.searchsorted(stretches.places, end)), kind) for end, kind in segments]
    # after the last segment everything is kept, up to each border and the end
    kept_from = ends[-1][0] if ends else 0
    ends += [(q, KEPT) for q in (*stretches.borders, len(stretches.places) - 1) if q > kept_from]
    for q, kind in ends:
        inside, held_on, _ = of[kind]
        most, held, p = max(most, held + inside[p, q]), held + held_on[p, q], q
        held = stretches.out[0, q] if q in stretches.borders else held
    return int(most)


def least(stretches: Stretches, *, kinds: Sequence[int] = (KEPT, AT_ONCE)) -> Cuts:
    """Return the segments with the fewest bytes, up to a share CLOSE of all."""
    low, high = 0.0, float(stretches.all_saved)
    best = Cuts(segments=[], n_bytes=stretches.all_saved, seconds=0.0)
    while high - low > CLOSE * stretches.all_saved:
        middle = (low + high) / 2
        found = fastest(stretches, middle, kinds=kinds)
        if found is None:
            low = middle
        else:
            # the choice may take less than the bound: the search continues below its bytes
            best, high = found, min(middle, found.n_bytes)
    return best


class Replays:
    """Choices of segments for a step.

    Args:
        look: Records the step, or returns why that is not possible.
    """

    def __init__(self, look: Callable[[], Stretches | str]) -> None:
        self._look = look
        self._least: dict[Sequence[int], Cuts] = {}

    @cached_property
    def stretches(self) -> Stretches | str:
        """Bytes and times of the step's segments, or the reason why they are unknown."""
        return self._look()

    def choose(self, bound: int | None) -> Cuts | str:
        """Return the fastest choice with replays that fits a bound, else that of the fewest bytes, or why none exists.

        With None, return the fewest bytes without segments of kind ONE_BY_ONE: these take several times as long, and
        are only used for a bound.
        """
        stretches = self.stretches
        if isinstance(stretches, str):
            return stretches
        if bound is not None and bound > 0:
            if (cuts := fastest(stretches, bound)) and cuts.segments:
                return cuts
            # a wider window needs fewer replays, of shorter segments
            some = [fastest(stretches, bound, kinds=KINDS, window=int(share * bound)) for share in WINDOWS]
            if fitting := [cuts for cuts in some if cuts and cuts.segments]:
                return min(fitting, key=lambda cuts: cuts.seconds)
        # kept segments also add to the forward pass, which the bound does not include
        kinds: tuple[int, ...] = (KEPT, AT_ONCE) if bound is None else (ONE_BY_ONE,)
        if kinds not in self._least:
            self._least[kinds] = least(stretches, kinds=kinds)
        best = self._least[kinds]
        return best if best.segments else stretches.why_nothing
