"""Dynamic programming over layers and stages: the oracle of small instances, in O(N K^2) steps for a bound forward.

    D[n, e] = min over a < e of max( D[n - 1, a], slowest of the stage [a, e) backward )   where [a, e) forward <= f

rho_1 and rho_2 are maxima of different stages, so their sum has no such recursion of its own: one pass finds the least
rho backward for a bound f forward, and every time forward that a stage can have is tried as the bound, from the least
that is possible up to where no sum can be lower any more.
"""

import numpy as np
from numpy.typing import NDArray

from benchmarks.pipeline.instances import Instance

Stages = NDArray[np.float64]
"""Time of every stage [a, e), at [a, e]; infinite where there is none."""


def least_sum(instance: Instance, stages: int) -> float:
    """The least rho_1 + rho_2."""
    forward, backward = tables(instance)
    lowest = one_pass(forward, stages)
    floor = one_pass(backward, stages)
    best = np.inf
    for bound in np.unique(forward[(forward >= lowest) & np.isfinite(forward)]):
        if bound + floor >= best:
            break
        best = min(best, bound + one_pass(np.where(forward <= bound, backward, np.inf), stages))
    return float(best)


def tables(instance: Instance) -> tuple[Stages, Stages]:
    """Times of all stages forward and backward, sending included."""
    on, back = [*instance.send_forward[:-1], 0], [*instance.send_backward[1:], 0]
    return _table(instance.forward, on), _table(instance.backward, back)


def _table(costs: list[int], sending: list[int]) -> Stages:
    before = np.concatenate(([0], np.cumsum(costs))).astype(np.float64)
    sent = np.concatenate(([0], sending)).astype(np.float64)
    stages = np.maximum(before[None, :] - before[:, None], sent[None, :])
    stages[np.tril_indices(len(before))] = np.inf
    return stages


def one_pass(stages: Stages, most: int) -> float:
    """The least maximum over at most so many stages that cover all layers."""
    best = stages[0].copy()
    for _ in range(most - 1):
        np.minimum(best, np.maximum(best[:, None], stages).min(axis=0), out=best)
    return float(best[-1])
