"""Choose keep, host or again for each part of what autograd keeps: the fastest within a bound of the device's bytes.

A greedy choice begins with all parts kept, and changes the way of one part at a time, until the peak fits: the one that
frees the most bytes at the peak for each second that it adds, by the timeline. It is repeated with other weights of
seconds and bytes. Then single parts, and pairs of them, change their way as long as this takes less time.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from lightning_amp.techniques.offload.timeline import HOST, KEEP, WAYS, Link, Timeline

FREE = 1e-6
"""Share of a step's seconds below which seconds that a way adds count as none."""
POWERS = 1.0, 0.5, 2.0
"""Powers of the seconds by which bytes at the peak are divided."""
FEW = 16
"""Number of parts up to which choices also begin with each way of each part, and pairs of them change their way."""
IMPROVED = 12
"""Number of choices of which parts change their way."""


def choose_ways(timeline: Timeline, bound: float, link: Link, *, host: float = float("inf")) -> list[int]:
    """Return the way of each part; those of the least peak that was found if none fits the bound.

    Args:
        timeline: The step.
        bound: Bytes of the device.
        link: Copies.
        host: Bytes that may be on the host.
    """
    choice = _Choice(timeline, bound, link, host)
    found = list[list[int]]()
    for power in POWERS:
        for begin in choice.begins():
            ways = choice.greedy(begin, power)
            if ways not in found:
                found.append(ways)
            if choice.fits(ways) and choice.took(ways) <= timeline.seconds * (1 + FREE):
                return ways
    fitting = sorted((ways for ways in found if choice.fits(ways)), key=choice.took)
    if not fitting:
        return min(found, key=lambda ways: (timeline.peak(ways), choice.took(ways)))
    return min((choice.improved(ways) for ways in fitting[:IMPROVED]), key=choice.took)


class _Choice:
    def __init__(self, timeline: Timeline, bound: float, link: Link, host: float) -> None:
        self._timeline, self._bound, self._link, self._host = timeline, bound, link, host
        n = len(timeline.again)
        self._ways = [
            [way for way in WAYS if way in (KEEP, HOST) or timeline.again[i] < float("inf")] for i in range(n)
        ]
        self._known = dict[tuple[int, ...], float]()

    def took(self, ways: Sequence[int]) -> float:
        key = tuple(ways)
        if key not in self._known:
            self._known[key] = self._timeline.took(ways, self._link)
        return self._known[key]

    def fits(self, ways: Sequence[int]) -> bool:
        return self._timeline.peak(ways) <= self._bound and self._timeline.host_bytes(ways) <= self._host

    def begins(self) -> Iterator[list[int]]:
        """Yield where greedy choices begin: all parts are kept, or, of few parts, all but one."""
        kept = [KEEP] * len(self._ways)
        yield kept
        if len(kept) <= FEW:
            for i, way in self._changes(kept):
                yield [*kept[:i], way, *kept[i + 1 :]]

    def greedy(self, ways: Sequence[int], power: float) -> list[int]:
        """Change one part after the other until the peak fits, or nothing lowers it."""
        timeline, ways = self._timeline, [*ways]
        while True:
            live = timeline.bytes_of(ways)
            at = int(live.argmax())
            over = live[at] - self._bound
            if over <= 0:
                return ways
            before, best = self.took(ways), (0.0, 0.0, -1, KEEP)
            for i, way in self._changes(ways):
                gain = timeline.freed[way, i, at] - timeline.freed[ways[i], i, at]
                if gain <= 0:
                    continue
                after = [*ways[:i], way, *ways[i + 1 :]]
                if way == HOST and self._timeline.host_bytes(after) > self._host:
                    continue
                more = max(self.took(after) - before, FREE * timeline.seconds)
                # of those that fit at once, the one that takes least
                best = max(best, (min(gain, over) / more**power, -more, i, way))
            if best[2] < 0:
                return ways
            ways[best[2]] = best[3]

    def improved(self, ways: list[int]) -> list[int]:
        """Change parts and pairs of parts while this takes less time within the bound."""
        while True:
            after = self._better(ways)
            if after is None:
                return ways
            ways = after

    def _better(self, ways: list[int]) -> list[int] | None:
        now, some = self.took(ways), list[list[int]]()
        for i, way in self._changes(ways):
            some.append([*ways[:i], way, *ways[i + 1 :]])
        best = self._least(some, now)
        if best is None and len(ways) <= FEW:
            pairs = list[list[int]]()
            for i, j in combinations(range(len(ways)), 2):
                for one, other in product(self._ways[i], self._ways[j]):
                    if one != ways[i] and other != ways[j]:
                        pairs.append([*ways[:i], one, *ways[i + 1 : j], other, *ways[j + 1 :]])
            best = self._least(pairs, now)
        return best

    def _least(self, some: list[list[int]], now: float) -> list[int] | None:
        fitting = [ways for ways in some if self.fits(ways)]
        best = min(fitting, key=self.took, default=None)
        return best if best is not None and self.took(best) < now * (1 - FREE) else None

    def _changes(self, ways: Sequence[int]) -> Iterator[tuple[int, int]]:
        return ((i, way) for i, possible in enumerate(self._ways) for way in possible if way != ways[i])
