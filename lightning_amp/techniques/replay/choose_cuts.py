"""Choose the segments of a training step that are replayed: the least replay time under a memory bound.

For a segment [p, q) of operators the following is known (stretches.py):

    out     bytes of storages that it makes and that are read after it: held afterwards, for any kind of segment
    saved   bytes of those and of the tensors that autograd saves from it: held afterwards if the segment is kept; if it
            is replayed, only while the backward pass is in it
    time    time of its operators that lead to tensors saved from it, if it is replayed
    at work peak of its operators, and the time of those that lead to each saved tensor: if it is replayed for one
            tensor at a time, or for several that were saved one after the other, up to a window of bytes

The last two exist for several levels: at a level, operators that take many seconds for each byte of their results, such
as products and convolutions, do not run again. Their results are held.

Every segment must satisfy held + saved (or at work) + gradients <= bound, where held is what the segments before it
hold. Gradients are those that the backward pass has made when it enters the segment, or when it leaves one that is
replayed for one tensor at a time, beyond those at the plain step's peak. The choice is a shortest path over (place,
bytes held), found by dynamic programming. Places are positions between operators where few bytes are alive; bytes are
counted in units of bound / PARTS. The actual bytes of a rank are then counted on the step with the chosen segments.

A backward pass inside the step, as in manual optimization, frees the tensors that autograd saved before it. No segment
crosses it, and afterwards only tensors that are read later are held, for any segments before it. Stretches after it
with operators of an optimizer are not replayed, and neither are those whose tensors it reads and leaves to others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
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
Way = tuple[int, int]
"""Kind and level of a segment."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Level:
    """Bytes and times of replayed segments that keep the results of some operators.

    Attributes:
        keeps: Places of these operators, sorted.
        held: [p, q] bytes of their results that are held after the segment, without those in `Stretches.out`.
        unsaved: [p, q] bytes of these that autograd does not save.
        seconds: [p, q] time of the operators that lead to saved tensors.
        at_work: [p, q] bytes while the backward pass is in it, replayed for one tensor at a time.
        one_by_one_seconds: [p, q] time of all replays in that case.
    """

    keeps: Array
    held: Array
    unsaved: Array
    seconds: Array
    at_work: Array
    one_by_one_seconds: Array


@dataclass(frozen=True, eq=False, kw_only=True)
class Stretches:
    """Bytes and times of the segments between any two places.

    Attributes:
        places: Places among operators, from 0 to the end.
        out, saved: [p, q] bytes of the segment from places[p] to places[q].
        saved_each: [p, q] mean bytes of its saved storages.
        levels: What else is known of replayed segments; the first level keeps no results.
        borders: Indices of places at which a backward pass frees saved tensors.
        barred: Indices of places; no segment with the operators from one of them to the next place is replayed.
        views: Whether operators that only return views have places.
        operators: Names of the operators at all places and the shapes of the batch, as in a plan.
        why_nothing: Why a replay may have nothing to free.
        gradients: [place] bytes of gradients when the backward pass has come there, beyond those at the peak of the
            plain step; 0 for none.
    """

    places: Array
    out: Array
    saved: Array
    saved_each: Array
    levels: tuple[Level, ...]
    borders: tuple[int, ...] = ()
    barred: tuple[int, ...] = ()
    views: bool = True
    operators: str = ""
    why_nothing: str = "autograd keeps nothing that a replay would make"
    gradients: Array | float = 0.0

    def without_gradients(self) -> "Stretches":
        """Return them without room for gradients."""
        return replace(self, gradients=0.0)

    def ways(self, kinds: Sequence[int]) -> list[Way]:
        """Return the kinds of segments with each level; a segment without replay has none."""
        levels = range(len(self.levels))
        return [(kind, level) for kind in kinds for level in levels if kind != KEPT or level == 0]

    def of_way(self, way: Way, window: float = 0) -> tuple[Array, Array, Array]:
        """Return for segments of a kind and level, [p, q]: bytes in their backward pass, bytes held afterwards, time.

        `window`: bytes of saved tensors that a replay for one tensor also makes.
        """
        kind, level = way[0], self.levels[way[1]]
        if kind == KEPT:
            return self.saved + self.gradients, self.saved, np.zeros_like(level.seconds)
        barred = np.searchsorted(self.barred, np.arange(len(self.places)))
        # a segment without operators is not replayed
        never = (level.seconds == 0) | (barred[None, :] > barred[:, None])
        whole, held = self.saved + level.unsaved, self.out + level.held
        if kind == AT_ONCE:
            return whole + self.gradients, held, np.where(never, np.inf, level.seconds)
        inside = np.minimum(level.at_work + window, whole)
        # as many replays less as tensors are in the window; the segment runs at least once
        each = np.maximum(self.saved_each, 1)
        seconds = np.maximum(level.one_by_one_seconds * each / (each + window), level.seconds)
        # it takes as much at its begin, where more gradients exist
        gradients = np.broadcast_to(self.gradients, len(self.places))[:, None]
        return inside + gradients, held, np.where(never, np.inf, seconds)

    @property
    def all_saved(self) -> int:
        """Most bytes that autograd keeps at once without replay."""
        return _most(self, [])


@dataclass(frozen=True, kw_only=True)
class Part:
    """A chosen segment.

    Attributes:
        end: Place at which it ends.
        kind: KEPT, AT_ONCE or ONE_BY_ONE.
        keeps: Places of its operators that do not run again.
        seconds: Time of its replays.
        share: Share of the bytes that it would hold without replay, of those that a replay frees.
    """

    end: int
    kind: int
    keeps: tuple[int, ...] = ()
    seconds: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Chosen segments.

    Attributes:
        parts: The segments; the rest of the step is kept.
        n_bytes: Most bytes of activations that are held at once.
        window: Bytes of saved tensors that a replay for one tensor also makes.
    """

    parts: tuple[Part, ...]
    n_bytes: int
    window: int = 0

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Their ends and kinds."""
        return [(part.end, part.kind) for part in self.parts]

    @property
    def seconds(self) -> float:
        """Time of all replays."""
        return sum(part.seconds for part in self.parts)

    @property
    def keeps(self) -> tuple[int, ...]:
        """Places of operators that do not run again."""
        return tuple(place for part in self.parts for place in part.keeps)


def fastest(
    stretches: Stretches, bound: float, *, kinds: Sequence[int] = (KEPT, AT_ONCE), window: int = 0
) -> Cuts | None:
    """Return the segments with the least time whose activations fit a bound; None if none fit."""
    aim, known = bound, _ways(stretches, kinds, window)
    # bytes held are rounded, so a choice may exceed the bound slightly: then the aim is lowered
    while (found := _fastest(stretches, aim, known, window)) is not None and found.n_bytes > bound:
        aim -= max(found.n_bytes - bound, aim / PARTS)
    return found


Ways = tuple[list[Way], Array, Array, Array, Array]
"""Kinds and levels; of each segment [p, q, way] what `of_way` returns, and whether another way is as good."""


def _ways(stretches: Stretches, kinds: Sequence[int], window: int) -> Ways:
    ways = stretches.ways(kinds)
    inside, held_on, took = (
        np.stack(x, -1) for x in zip(*(stretches.of_way(way, window) for way in ways), strict=True)
    )
    # a way that another equals or beats in all respects is left out
    needless = ~np.isfinite(took)
    for i, j in permutations(range(len(ways)), 2):
        beats = np.logical_and.reduce([x[..., j] <= x[..., i] for x in (inside, held_on, took)])
        needless[..., i] |= beats & ~needless[..., j]
    return ways, inside, held_on, took, needless


def _fastest(stretches: Stretches, bound: float, known: Ways, window: int) -> Cuts | None:
    k, unit = len(stretches.places), max(bound, 1) / PARTS
    ways, inside, held_on, took, needless = known
    # each row begins with impossible states: shifted by the bytes of a segment, a place's states are a part of its row
    padded = np.full((k, 2 * (PARTS + 1)), np.inf)
    time, shifted = padded[:, PARTS + 1 :], sliding_window_view(padded.reshape(-1), PARTS + 1)
    time[0, 0] = 0
    before = np.zeros((k, PARTS + 1, 3), int)
    held = np.arange(PARTS + 1)
    # rounded, so that a choice may exceed the bound by a few units, which `fastest` checks
    more = np.minimum(np.rint(held_on / unit), PARTS + 1).astype(int)
    # the segment itself has to fit in addition to what is held
    room = np.where(needless, -1, (bound - inside) // unit)
    border = 0
    for q in range(1, k):
        starts, way = np.nonzero(room[border:q, q] >= 0)
        starts += border
        if not len(starts):
            continue
        # [p and way, bytes held at q]
        added = more[starts, q, way]
        found = shifted[starts * padded.shape[1] + PARTS + 1 - added]
        found += took[starts, q, way][:, None]
        found[held > (added + room[starts, q, way])[:, None]] = np.inf
        # the first minimum, in the order of places and ways
        best = found.argmin(0)
        time[q] = found[best, held]
        before[q] = np.stack([starts[best], held - added[best], way[best]], 1)
        if q in stretches.borders:
            # all choices hold the same bytes after a border, so only the fastest one is continued
            border, h, read = q, int(np.argmin(time[q])), int(np.rint(stretches.out[0, q] / unit))
            fewest = min(read, PARTS), time[q, h], before[q, h].copy()
            time[q] = np.inf
            time[q, fewest[0]], before[q, fewest[0]] = fewest[1:]
    h = int(np.argmin(time[-1]))
    if not np.isfinite(time[-1, h]):
        return None
    segments, q = list[tuple[int, Way]](), k - 1
    while q:
        p, h, chosen = map(int, before[q, h])
        segments.append((q, ways[chosen]))
        q = p
    segments.reverse()
    while segments and segments[-1][1][0] == KEPT:
        # the rest of the step is kept anyway
        segments.pop()
    parts, p = list[Part](), 0
    for q, which in segments:
        among, end, i = stretches.levels[which[1]].keeps, int(stretches.places[q]), ways.index(which)
        inside = among[np.searchsorted(among, stretches.places[p]) : np.searchsorted(among, end)]
        share = 1 - held_on[p, q, i] / max(stretches.saved[p, q], 1)
        seconds, places = float(took[p, q, i]), tuple(inside.tolist())
        parts.append(Part(end=end, kind=which[0], keeps=places, seconds=seconds, share=max(share, 0.0)))
        p = q
    return Cuts(parts=tuple(parts), n_bytes=_most(stretches, segments, window), window=window)


def _most(stretches: Stretches, segments: list[tuple[int, Way]], window: int = 0) -> int:
    held, most, p, kept = 0.0, 0.0, 0, (KEPT, 0)
    of = {way: stretches.of_way(way, window) for way in {kept, *(way for _, way in segments)}}
    # after the last segment everything is kept, up to each border and the end
    kept_from = segments[-1][0] if segments else 0
    rest = [(q, kept) for q in (*stretches.borders, len(stretches.places) - 1) if q > kept_from]
    for q, way in segments + rest:
        inside, held_on, _ = of[way]
        most, held, p = max(most, held + inside[p, q]), held + held_on[p, q], q
        held = stretches.out[0, q] if q in stretches.borders else held
    return int(most)


def least(stretches: Stretches, *, kinds: Sequence[int] = (KEPT, AT_ONCE)) -> Cuts:
    """Return the segments with the fewest bytes, up to a share CLOSE of all."""
    low, high = 0.0, float(stretches.all_saved)
    best = Cuts(parts=(), n_bytes=stretches.all_saved)
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

    def without_gradients(self) -> "Replays":
        """Return choices that leave no room for gradients, which another technique frees as they are made."""
        return _Early(self)

    def choose(self, bound: int | None) -> Cuts | str:
        """Return the fastest choice with replays that fits a bound, else that of the fewest bytes, or why none exists.

        With None, return the fewest bytes without segments of kind ONE_BY_ONE: these take several times as long, and
        are only used for a bound.
        """
        stretches = self.stretches
        if isinstance(stretches, str):
            return stretches
        if bound is not None and bound > 0:
            # the room for gradients may be more than they take: without a choice that leaves it, a count decides
            for found in (stretches, stretches.without_gradients())[: 1 + bool(np.any(stretches.gradients))]:
                # a wider window needs fewer replays, of shorter segments
                some = [fastest(found, bound, kinds=KINDS, window=int(share * bound)) for share in WINDOWS]
                if fitting := [cuts for cuts in some if cuts and cuts.segments]:
                    return min(fitting, key=lambda cuts: cuts.seconds)
        # kept segments also add to the forward pass, which the bound does not include
        some_kinds: tuple[tuple[int, ...], ...] = ((KEPT, AT_ONCE),)
        if bound is not None:
            # the last stretch may have nothing to replay
            some_kinds = (ONE_BY_ONE,), (KEPT, ONE_BY_ONE)
        for kinds in some_kinds:
            if kinds not in self._least:
                self._least[kinds] = least(stretches, kinds=kinds)
            if self._least[kinds].segments:
                return self._least[kinds]
        return stretches.why_nothing


class _Early(Replays):
    def __init__(self, replays: Replays) -> None:
        super().__init__(lambda: replays.stretches)
        self._early = Replays(self._without)

    def _without(self) -> Stretches | str:
        found = self.stretches
        return found if isinstance(found, str) else found.without_gradients()

    def choose(self, bound: int | None) -> Cuts | str:
        cuts, stretches = self._early.choose(bound), self.stretches
        if isinstance(cuts, str) or isinstance(stretches, str):
            return cuts
        # as they are before the other technique is added
        most = cuts.n_bytes + int(np.max(stretches.gradients))
        return replace(cuts, n_bytes=min(most, stretches.all_saved))
