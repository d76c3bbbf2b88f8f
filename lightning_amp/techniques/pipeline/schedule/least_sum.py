"""Find the exact cut of layers into stages: `least_sum` if all links are equal, `least_step` if they differ.

`least_sum` minimises the sum of the slowest forward and the slowest backward stage, by branch and bound.

    minimise   f + b   over all bounds (f, b) that some runs of layers meet

Let `least` be the best sum so far. An interval [low, high] of f can contain a smaller sum only with b < least - low.
The loosest of these bounds is (high, least - 1 - low): if no runs meet it, the interval is dropped; otherwise it is
halved. Before that, the lower end is raised: if runs meet the bound (low, least - 1 - low), `least` decreases; if not,
`OrderedRuns.next_forward` gives the next f at which any device could hold more layers, and no smaller f needs to be
tested. Times are whole numbers and every step ends at a time that runs really take, so the search ends with the exact
optimum, without a tolerance.

The number of tested bounds depends on how closely the staircase of met bounds follows the line f + b = least:
some hundreds for 50,000 layers on 1,000 devices.

`least_step` minimises the time of a step, by best-first search.

    minimise   sum over stages (forward + backward) + sum over cuts of both sendings + (p - 1) (rho_1 + rho_2)     Eq. 8

With equal links a stage that takes more layers is never worse (costs/ordered_runs.py). Here it can be worse: an earlier
end may send less. So a partial cut (n stages that hold the first e layers) is extended in every way. The search always
extends the partial cut with the least bound, and the first one that holds all layers is an optimum. For the remaining
layers, the bound counts the least sum, the least maximum forward and backward, and the least maximum of both together,
each computed separately. A partial cut is dropped if another one at the same (n, e) is as good in f, b and sum.

Every stage has a layer, because an idle device would join two links. Times are whole numbers, without rounding.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from operator import add

from lightning_amp.costs.ordered_runs import Device, OrderedRuns

FIRST_HALVINGS = 12


def least_sum(runs: OrderedRuns) -> list[int] | None:
    """Return the ends of runs with the least f + b; None if the caps allow no runs."""
    search = _LeastSum(runs)
    if not search.begin():
        return None
    intervals = deque([(search.least_forward, search.most_forward)])
    while intervals:
        # breadth first, widest interval first: the sooner a better sum is found, the more intervals are dropped
        low, high = intervals.popleft()
        lowest = search.raised(low)
        if lowest is None:
            continue
        high = min(high, search.most_forward)
        if lowest <= high and search.met(high, search.least - 1 - lowest):
            # `met` may have lowered the best sum, and with it the highest forward time that can be better
            middle = (lowest + min(high, search.most_forward)) // 2
            intervals += [(lowest, middle), (middle + 1, high)]
    return search.best


class _LeastSum:
    """The best runs so far, and the least forward and backward times of any runs."""

    def __init__(self, runs: OrderedRuns) -> None:
        self.runs = runs
        self.best: list[int] = []
        self.least = self.least_forward = self.least_backward = 0

    def begin(self) -> bool:
        """Compute the least forward and the least backward time; returns false if the caps allow no runs."""
        anything = self.runs.no_bound
        fastest = self.runs.least_forward(anything)
        if fastest is None:
            return False
        self.least_forward = self.runs.times(fastest)[0]
        turned = self.runs.turned()
        backward = turned.least_forward(anything)
        assert backward is not None, "caps do not depend on the direction"
        self.least_backward = turned.times(backward)[0]
        self.best = min(fastest, backward, key=lambda ends: sum(self.runs.times(ends)))
        self.least = sum(self.runs.times(self.best))
        # a good first sum saves most tests: bisect for a sum that is close to the least of both, and can be met
        low, high = 0, self.least - self.least_forward - self.least_backward
        for _ in range(FIRST_HALVINGS):
            above = (low + high) // 2
            if self.met(self.least_forward + above, self.least_backward + above):
                high = above
            else:
                low = above
        return True

    @property
    def most_forward(self) -> int:
        """The highest f of a sum below the best one."""
        return self.least - 1 - self.least_backward

    def met(self, f: int, b: int) -> bool:
        """Whether runs meet a bound; a sum below the best one is recorded."""
        return self._try(f, b)[-1] == self.runs.layers

    def raised(self, low: int) -> int | None:
        """Return the least f, from `low` on, that may belong to a sum below the best one."""
        while low <= self.most_forward:
            b = self.least - 1 - low
            ends = self._try(low, b)
            if ends[-1] < self.runs.layers:
                return self.runs.next_forward(ends, b)
        return None

    def _try(self, f: int, b: int) -> list[int]:
        ends = self.runs.fill(f, b)
        if ends[-1] == self.runs.layers:
            total = sum(self.runs.times(ends))
            if total < self.least:
                self.best, self.least = ends, total
        return ends


Way = tuple[Sequence[int], Sequence[Sequence[int]]]
"""Cumulative costs before every layer, [K + 1]; and times of sending over the cut before each layer, [N, K + 1]: row n
is for the link that follows stage n, and 0 at either end.
"""


def least_step(forward: Way, backward: Way, devices: Sequence[Device], more: int) -> tuple[list[int], int, int] | None:
    """Return the ends of the stages of the fastest step, with rho_2 and rho_1; None if no cut fits the caps.

    Args:
        forward, backward: Costs and sending times of every layer and link.
        devices: N devices.
        more: p - 1.
    """
    (there, on), (back, returned) = forward, backward
    both: Way = (list(map(add, there, back)), [list(map(add, *sent)) for sent in zip(on, returned, strict=True)])
    least_f, least_b, least_both = (_least(way, devices, max) for way in (forward, backward, both))
    least_sum = _least(both, devices, lambda *times: sum(times))
    stages, last = len(devices), len(there) - 1
    seen = defaultdict[tuple[int, int], list[tuple[int, int, int]]](list)
    # ordered by the bound; of equal bounds, the longest partial cut first
    heap: list[tuple[int, int, tuple[int, ...], int, int, int]] = [(0, 0, (), 0, 0, 0)]
    # Best-first: the bound of a partial cut is at most the time of any cut that extends it, so the first complete
    # cut that is taken from the heap is an optimum.
    while heap:
        _, _, ends, f, b, spent = heappop(heap)
        n, start = len(ends), ends[-1] if ends else 0
        if n == stages:
            return list(ends), f, b
        others = seen[n, start]
        # any extension of this partial cut also extends the other one, and costs no more there
        if any(x <= f and y <= b and z <= spent for x, y, z in others):
            continue
        others.append((f, b, spent))
        device = devices[n]
        for end in range(start + 1, last + 1):
            # a longer run needs at least as many bytes: no later end fits either
            if not device.holds(start, end):
                break
            if least_sum[n + 1][end] == inf:
                continue
            takes_f = (there[end] - there[start]) * device.pace
            takes_b = (back[end] - back[start]) * device.pace
            # at least what the rest takes, which makes more of the partial cuts comparable
            new_f = max(f, takes_f, on[n][end], least_f[n + 1][end])
            new_b = max(b, takes_b, returned[n][end], least_b[n + 1][end])
            total = spent + takes_f + takes_b + both[1][n][end]
            # rho_1 + rho_2 is at least what any one stage or link takes both ways together, which `least_both` counts
            # for the rest: new_f and new_b may come from two stages, and their sum be less than that.
            bound = total + least_sum[n + 1][end] + more * max(new_f + new_b, least_both[n + 1][end])
            heappush(heap, (bound, -n - 1, (*ends, end), new_f, new_b, total))
    return None


def _least(way: Way, devices: Sequence[Device], join: Callable[[int, int, int], int]) -> list[list[int]]:
    """Least joined time of the stages from n on with the layers from e on, [N + 1, K + 1]; inf if there is no cut."""
    before, sends = way
    last = len(before) - 1
    nothing: list[int] = [inf] * (last + 1)  # type: ignore[list-item]
    table = [[*nothing[:-1], 0]]
    for device, sent in zip(reversed(devices), reversed(sends), strict=True):
        rest, own = table[-1], nothing.copy()
        for start in range(last):
            for end in range(start + 1, last + 1):
                # Both join functions return at least this time, which grows with `end`: the least so far
                # remains the least.
                time = (before[end] - before[start]) * device.pace
                if time >= own[start] or not device.holds(start, end):
                    break
                if rest[end] != inf:
                    own[start] = min(own[start], join(time, sent[end], rest[end]))
        table.append(own)
    return table[::-1]
