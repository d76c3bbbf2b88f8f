"""Ordered strata in contiguous runs, one for each rank, so that the slowest rank is as fast as possible.

    minimise   max over r of   sum of c_k over the run of r

This is the segmentation problem that Zhou et al. 2025 (CSIMD) reduce network division to. What differs:
- They minimise rho_1 + rho_2 (Eq. 9): the slowest forward and the slowest backward stage of a pipeline, in which
  devices wait for each other after either. Strata do not wait for each other, so a stratum has one cost, forward and
  backward together; for that case they name the one-dimensional problem and its bisection.
- They bisect to a tolerance (Algorithm 2). Here the result is an optimum: costs are taken as the exact rational
  numbers that floats are, and only loads that some run really has are asked (in the manner of Nicol, 1994).
- A fixed cost of their runs is the time to send the last layer's output on; strata send nothing on, so there is none.

The test of a bound is greedy: each rank in turn takes all that it can. O(R^2 log^2 K) for K strata and R ranks.

Legend: c_k cost of stratum k.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import lcm


@lru_cache(maxsize=256)
def deal(costs: tuple[float, ...], ranks: int) -> tuple[int, ...]:
    """One past the last stratum of every rank, each of which has one at least; of optimal ways the earliest ends.

    Plans that differ elsewhere ask for the same, so the answers are remembered.

    Args:
        costs: c_k of every stratum, finite and 0 or more, in any unit.
        ranks: No more than there are strata.
    """
    strata = len(costs)
    assert ranks <= strata, "the caller has refused more ranks than strata"
    # costs before every stratum as whole numbers: a sum of floats would be rounded, and rounding would decide
    sums = tuple(accumulate(_whole(costs), initial=0))
    # filling ranks from the last stratum on makes every end as early as it can be
    mirrored = tuple(sums[-1] - cost for cost in reversed(sums))
    starts = [strata - end for end in _greedy(mirrored, ranks, _optimum(sums, ranks))]
    ends = (*reversed(starts[:-1]), strata)
    # a rank left without a stratum gets one from its neighbours, whose time shrinks; a single stratum never takes
    # longer than the slowest run, so this is optimal too
    return tuple(min(max(end, r + 1), strata - (ranks - 1 - r)) for r, end in enumerate(ends))


def _greedy(sums: Sequence[int], ranks: int, bound: int) -> list[int]:
    """Ends when every rank in turn takes all strata that the bound has room for."""
    ends, end = [], 0
    for _ in range(ranks):
        end = bisect_right(sums, sums[end] + bound, end) - 1
        ends.append(end)
    return ends


def _optimum(sums: Sequence[int], ranks: int) -> int:
    """The lowest bound that all strata fit under.

    For a rank that starts at stratum i let j be the first end for which the load of [i, j) is a bound that all strata
    fit under. Either this load is the optimum, or the optimum is lower but above the load of [i, j - 1); then the rank
    takes just [i, j - 1), and the next one is asked.
    """
    found: list[int] = []
    start, strata = 0, len(sums) - 1
    for _ in range(ranks):
        loads = [cost - sums[start] for cost in sums[start:]]
        place = bisect_left(loads, True, key=lambda load: _greedy(sums, ranks, load)[-1] == strata)
        if place < len(loads):
            found.append(loads[place])
        if place == 0:
            break
        start += place - 1
    return min(found)


def _whole(numbers: Sequence[float]) -> list[int]:
    """The numbers times their common denominator, without rounding."""
    exact = [n.as_integer_ratio() for n in numbers]
    scale = lcm(*(denominator for _, denominator in exact))
    return [numerator * (scale // denominator) for numerator, denominator in exact]
