"""Minimise the sum of the slowest forward and the slowest backward stage exactly, by branch and bound.

    minimise   f + b   over all bounds (f, b) that runs meet

Let `least` be the best sum so far. An interval [low, high] of f can hold a smaller one only with b < least - low. Of
all such bounds (high, least - 1 - low) is the loosest: where it is not met, the interval is dropped; otherwise it is
halved. Before that its lower end moves up: the bound (low, least - 1 - low) either is met, which lowers `least`, or
says at which f any device could go further (`OrderedRuns.next_forward`), and no smaller f can hold anything. Times are
whole numbers and every move ends at a time that runs really take, so the search ends with the optimum itself and no
tolerance.

How many bounds are tested depends on how closely the staircase of met bounds follows the line f + b = least:
some hundreds for 50,000 layers on 1,000 devices.
"""

from collections import deque

from lightning_amp.costs.ordered_runs import OrderedRuns

FIRST_HALVINGS = 12


def least_sum(runs: OrderedRuns) -> list[int] | None:
    """Ends of runs with the least f + b; None where the caps leave no runs."""
    search = _LeastSum(runs)
    if not search.begin():
        return None
    intervals = deque([(search.least_forward, search.most_forward)])
    while intervals:
        # the widest first: a better sum may be anywhere, and the sooner it is known, the more is dropped
        low, high = intervals.popleft()
        lowest = search.raised(low)
        if lowest is None:
            continue
        high = min(high, search.most_forward)
        if lowest <= high and search.met(high, search.least - 1 - lowest):
            middle = (lowest + min(high, search.most_forward)) // 2
            intervals += [(lowest, middle), (middle + 1, high)]
    return search.best


class _LeastSum:
    """The best runs so far, and the least times forward and backward that any runs have."""

    def __init__(self, runs: OrderedRuns) -> None:
        self.runs = runs
        self.best: list[int] = []
        self.least = self.least_forward = self.least_backward = 0

    def begin(self) -> bool:
        """Find the least of either alone; false where the caps leave no runs."""
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
        self._both()
        return True

    def _both(self) -> None:
        """Begin with a good sum, which spares most tests: as little above the least of both as meets, roughly."""
        low, high = 0, self.least - self.least_forward - self.least_backward
        for _ in range(FIRST_HALVINGS):
            above = (low + high) // 2
            if self.met(self.least_forward + above, self.least_backward + above):
                high = above
            else:
                low = above

    @property
    def most_forward(self) -> int:
        """The highest f of a sum below the best one."""
        return self.least - 1 - self.least_backward

    def met(self, f: int, b: int) -> bool:
        """Whether runs meet a bound; a sum below the best one is kept."""
        return self._try(f, b)[-1] == self.runs.layers

    def raised(self, low: int) -> int | None:
        """The least f, from this one on, that may belong to a sum below the best one."""
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
