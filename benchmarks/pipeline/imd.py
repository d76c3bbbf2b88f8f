"""Improved multi-dimensional dichotomy (IMD, Zhou et al. 2025, Algorithms 2 and 3), to compare with.

It bisects the sum D = rho_1 + rho_2, and for every D tries eta + 1 ways to share it between forward and backward. Its
result is within D / (eta - 1) + epsilon of the optimum (their Property 3).

Two things differ from the printed algorithms, both to its advantage. Layers are packed by `OrderedRuns.fill`, which
finds the end of a run by bisection and not layer by layer; and a run goes on past a place where a cut would be too
expensive, where Algorithm 3 as printed stops once both sendings there exceed the bound.
"""

from itertools import pairwise

from benchmarks.pipeline.instances import GRID
from lightning_amp.costs.ordered_runs import OrderedRuns

EPSILON = GRID // 1000
"""The paper does not say its own."""


def imd(runs: OrderedRuns, eta: int) -> int:
    """rho_1 + rho_2 of the runs that IMD ends with."""
    low = max(after - before for costs in (runs.forward, runs.backward) for before, after in pairwise(costs))
    high = runs.forward[-1] + runs.backward[-1] + sum(runs.send_forward) + sum(runs.send_backward)
    found = sum(runs.times(runs.fill(runs.no_bound, runs.no_bound)))
    while high - low >= EPSILON:
        middle = (low + high) // 2
        for i in range(eta + 1):
            share = middle * i // eta
            ends = runs.fill(share, middle - share)
            if ends[-1] == runs.layers:
                found, high = sum(runs.times(ends)), middle
                break
        else:
            low = middle
    return found
