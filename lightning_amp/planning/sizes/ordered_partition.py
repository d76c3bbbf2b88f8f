"""Dealing ordered tasks to ordered devices in contiguous runs, so that the slowest device is as fast as possible.

    minimise   max over r of   (sum of c_k over the run of r) / s_r
    such that  sum of m_k over the run of r <= limit_r       where weights and capacities are given

This is the segmentation problem that Zhou et al. 2025 (CSIMD) reduce network division to. What differs:
- They minimise rho_1 + rho_2 (Eq. 9): the slowest forward and the slowest backward stage of a pipeline, in which
  devices wait for each other after either. Strata do not wait for each other, so a task has one cost, forward and
  backward together; for that case they name the one-dimensional problem and its bisection.
- They bisect to a tolerance (Algorithm 2). Here the result is an optimum: costs are taken as the exact rational
  numbers that floats are, and only loads that some run really has are tried (in the manner of Nicol, 1994).
- Every device of theirs has a task at least; here runs may be empty. They have no limit of memory.
- A fixed cost of their runs is the time to send the last layer's output on; strata send nothing on, so there is none.
The order of the devices is given, as theirs; the best order of unequal ones is not looked for.

The test of a bound is greedy: each device in turn takes all that it can. For a device that starts at task i let j be
the first end with which the load of [i, j) is a bound that all tasks fit under. Either this load is the optimum, or
the optimum is lower but above the load of [i, j - 1); then the device takes just [i, j - 1), and the next one is asked.
O(R^2 log^2 K) for K tasks and R devices.

Legend: c_k cost and m_k weight of task k, s_r speed of device r.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import inf, isfinite, lcm
from numbers import Real

from lightning_amp.errors import PlanError


def partition(
    costs: Sequence[float],
    speeds: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    capacities: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Deal tasks to devices; of several optimal ways the one in which every border is as early as it can be.

    Args:
        costs: c_k of every task, 0 or more, in any unit.
        speeds: s_r of every device, above 0, relative to each other.
        weights: m_k of every task, such as bytes.
        capacities: Most weight of a device's run; `math.inf` for no limit.

    Returns:
        One past the last task of every device; the last is the number of tasks.

    Raises:
        PlanError: Sizes that do not belong together, numbers out of range, or no way to keep the capacities.
    """
    costs, speeds = _numbers("costs", costs), _numbers("speeds", speeds, positive=True)
    if (weights is None) != (capacities is None):
        raise PlanError(
            f"a partition was asked for with weights={weights!r} and capacities={capacities!r}; a limit needs both:"
            " give both, or neither"
        )
    weights = [0.0] * len(costs) if weights is None else _numbers("weights", weights)
    limits = [inf] * len(speeds) if capacities is None else _numbers("capacities", capacities, infinite=True)
    for name, found, whose, expected in (
        ("weights", len(weights), "tasks", len(costs)),
        ("capacities", len(limits), "devices", len(speeds)),
    ):
        if found != expected:
            raise PlanError(
                f"a partition was asked for with {found} {name} for {expected} {whose}; give one for each"
            )
    problem = _problem(costs, speeds, weights, limits)
    held = problem.greedy(None)[-1]
    if held < problem.tasks:
        raise PlanError(
            f"a partition of {problem.tasks} tasks was asked for, within capacities={limits!r} the devices hold no"
            f" more than the first {held}; the weights are {weights!r}: use more devices, or some with more memory"
        )
    # taking as much as possible from the end makes every border as early as it can be
    starts = problem.reversed().greedy(problem.optimum())
    return (*(problem.tasks - start for start in reversed(starts[:-1])), problem.tasks)


@lru_cache(maxsize=256)
def deal(costs: tuple[float, ...], ranks: int) -> tuple[int, ...]:
    """Deal tasks to equal ranks, at least one to each: one past the last task of every rank.

    Where `partition` leaves a rank without a task, it gets one from its neighbours, whose time shrinks; a single task
    never takes longer than the slowest run, so this is optimal too. Plans that differ elsewhere ask for the same.

    Args:
        costs: c_k of every task.
        ranks: No more than there are tasks.
    """
    assert ranks <= len(costs), "the caller has refused more ranks than tasks"
    ends = partition(costs, [1.0] * ranks)
    return tuple(min(max(end, r + 1), len(costs) - (ranks - 1 - r)) for r, end in enumerate(ends))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    """Whole numbers: sums of costs and weights before every task, speeds, and limits (None for no limit)."""

    costs: tuple[int, ...]
    weights: tuple[int, ...]
    speeds: tuple[int, ...]
    limits: tuple[int | None, ...]

    @property
    def tasks(self) -> int:
        return len(self.costs) - 1

    def reversed(self) -> "_Problem":
        return _Problem(
            costs=tuple(self.costs[-1] - c for c in reversed(self.costs)),
            weights=tuple(self.weights[-1] - m for m in reversed(self.weights)),
            speeds=self.speeds[::-1],
            limits=self.limits[::-1],
        )

    def room(self, device: int, start: int) -> int:
        """The last end of a run from `start` that the device's limit allows."""
        limit = self.limits[device]
        if limit is None:
            return self.tasks
        return bisect_right(self.weights, self.weights[start] + limit) - 1

    def load(self, device: int, start: int, end: int) -> Fraction:
        return Fraction(self.costs[end] - self.costs[start], self.speeds[device])

    def greedy(self, bound: Fraction | None) -> list[int]:
        """Ends when every device in turn takes all it can; without a bound only the limits count."""
        ends: list[int] = []
        costs, end = self.costs, 0
        for device, speed in enumerate(self.speeds):
            last = self.room(device, end)
            if bound is not None:
                most = costs[end] + bound.numerator * speed // bound.denominator
                last = min(last, bisect_right(costs, most, end) - 1)
            end = last
            ends.append(end)
            if end == len(costs) - 1:
                break
        return ends + [end] * (len(self.speeds) - len(ends))

    def fits(self, bound: Fraction | None) -> bool:
        return self.greedy(bound)[-1] == self.tasks

    def optimum(self) -> Fraction:
        """The lowest bound that all tasks fit under."""
        found: list[Fraction] = []
        start = 0
        for device in range(len(self.speeds)):
            last = self.room(device, start)
            ends = range(start, last + 1)
            place = bisect_left(ends, True, key=lambda end: self.fits(self.load(device, start, end)))
            if place < len(ends):
                found.append(self.load(device, start, ends[place]))
            if place == 0:
                break
            start = ends[place - 1]
        return min(found)


def _problem(
    costs: Sequence[float], speeds: Sequence[float], weights: Sequence[float], limits: Sequence[float]
) -> _Problem:
    finite = [n for n in limits if n != inf]
    by_weight = iter(_whole([*weights, *finite]))
    sums = tuple(accumulate((next(by_weight) for _ in weights), initial=0))
    return _Problem(
        costs=tuple(accumulate(_whole(costs), initial=0)),
        weights=sums,
        speeds=tuple(_whole(speeds)),
        limits=tuple(None if n == inf else next(by_weight) for n in limits),
    )


def _whole(numbers: Sequence[float]) -> list[int]:
    """The numbers times their common denominator, without rounding."""
    exact = [n.as_integer_ratio() for n in numbers]
    scale = lcm(*(denominator for _, denominator in exact))
    return [numerator * (scale // denominator) for numerator, denominator in exact]


def _numbers(
    name: str, given: Sequence[float], *, positive: bool = False, infinite: bool = False
) -> list[float]:
    wrong = [
        n
        for n in given
        if not isinstance(n, Real)
        or not (isfinite(n) or (infinite and n == inf))
        or n < 0
        or (positive and n == 0)
    ]
    if wrong or not len(given):
        finite = "" if infinite else "finite "
        raise PlanError(
            f"a partition was asked for with {len(given)} {name}, among them {wrong!r}; allowed are one or more"
            f" {finite}numbers {'above 0' if positive else 'of 0 or more'}"
        )
    return [float(n) for n in given]
