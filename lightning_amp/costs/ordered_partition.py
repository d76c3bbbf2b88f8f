"""Partition ordered strata into contiguous runs, one per rank, so that the slowest rank is as fast as possible.

    minimise   max over r of   sum of c_k over the run of r, and of p_k before it, divided by the speed of r

This is the segmentation problem that Zhou et al. 2025 (CSIMD) reduce network division to. What differs:
- They minimise rho_1 + rho_2 (Eq. 9): the slowest forward and the slowest backward stage of a pipeline, in which
  devices wait for each other after either (`pipeline/cut.py`). Strata do not wait for each other, so a stratum has one
  cost, forward and backward together; for that case they name the one-dimensional problem and its bisection.
- They bisect to a tolerance (Algorithm 2). Here the result is an optimum (`ordered_runs.py`).
- A fixed cost of their runs is the time to send the last layer's output on; strata send nothing on, so there is none.
  What a run costs on top is its way there: in a chained decoder a rank passes all strata before its own.

Legend: c_k cost of stratum k, p_k of passing it.
"""

from functools import lru_cache
from itertools import accumulate

from lightning_amp.costs.ordered_runs import Device, OrderedRuns, paces, whole


@lru_cache(maxsize=256)
def deal(
    costs: tuple[float, ...],
    ranks: int,
    speeds: tuple[float, ...] = (),
    passing: tuple[float, ...] = (),
) -> tuple[int, ...]:
    """One past the last stratum of every rank, each of which has one at least; of optimal ways the earliest ends.

    Plans that differ elsewhere ask for the same, so the answers are remembered.

    Args:
        costs: c_k of every stratum, finite and 0 or more, in any unit.
        ranks: No more than there are strata.
        speeds: What every rank does in a unit of time, above 0; none: they are equal. A rank so slow that an optimum
            would leave it without a stratum has one all the same, and may be the slowest then.
        passing: p_k of every stratum, no more than its c_k; none: nothing.
    """
    strata = len(costs)
    assert ranks <= strata, "the caller has refused more ranks than strata"
    nothing = [0] * (strata + 1)
    # in one unit
    listed, _ = whole((*costs, *(passing or (0.0,) * strata)))
    assert all(p <= c for c, p in zip(listed, listed[strata:], strict=False)), (
        "to pass a stratum is a part of it"
    )
    before = list(accumulate(listed[strata:], initial=0))
    from_last = list(accumulate(listed[:strata][::-1], initial=0))
    # filling ranks from the last stratum on makes every end as early as it can be
    mirrored = OrderedRuns(
        forward=from_last,
        # a run that ends at a place here begins there
        forward_ends=[own + more for own, more in zip(from_last, before[::-1], strict=True)],
        backward=nothing,
        send_forward=nothing,
        send_backward=nothing,
        devices=[Device(pace=pace) for pace in paces(speeds[::-1] or (1,) * ranks)[0]],
    )
    filled = mirrored.least_forward(0)
    assert filled is not None, "without a cap there is always a way"
    ends = [strata - end for end in reversed((0, *filled, *[strata] * (ranks - len(filled))))][1:]
    # a rank left without a stratum gets one from its neighbours, whose time shrinks; among equals a single stratum
    # never takes longer than the slowest run, so this is optimal too
    apart = list(accumulate(ends, lambda before, end: max(before + 1, end), initial=0))[1:]
    return tuple(min(end, strata - (ranks - 1 - r)) for r, end in enumerate(apart))


def speeds_of_model(speeds: tuple[float, ...], model: int) -> tuple[float, ...]:
    """Of the ranks of the model axis, from those of all ranks: the slowest of every place, for groups wait for it."""
    return tuple(min(speeds[m::model]) for m in range(model)) if speeds else ()
