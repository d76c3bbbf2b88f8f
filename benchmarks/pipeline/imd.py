"""Improved multi-dimensional dichotomy (IMD, Zhou et al. 2025, Algorithms 2 and 3), to compare with.

It bisects the sum D = rho_1 + rho_2, and for every D tries eta + 1 ways to share it between forward and backward. Its
result is within D / (eta - 1) + epsilon of the optimum (their Property 3).

Two things differ from the printed algorithms, both to its advantage. Layers are packed by `OrderedRuns.fill`, which
finds the end of a run by bisection and not layer by layer; and a run goes on past a place where a cut would be too
expensive, where Algorithm 3 as printed stops once both sendings there exceed the bound. `layer_by_layer` packs without
these. It reads one line in another way than it is printed: a run ends where either sum exceeds its share, not where
both do, since otherwise the shares (0, 1) allow a single run for any forward times.
"""

from collections.abc import Callable
from itertools import pairwise

from benchmarks.pipeline.instances import GRID
from lightning_amp.costs.ordered_runs import OrderedRuns

EPSILON = GRID // 1000
"""The paper does not say its own."""


def layer_by_layer(runs: OrderedRuns, f: int, b: int) -> list[int]:
    """The ends of runs by Algorithm 3, in O(K) steps; the last one is K where the bound is met."""
    ends, start = list[int](), 0
    for _ in runs.devices:
        end = start
        for at in range(start + 1, runs.layers + 1):
            there, back = runs.send_forward[at] > f, runs.send_backward[at] > b
            if (there and back) or runs.forward[at] - runs.forward[start] > f:
                break
            if runs.backward[at] - runs.backward[start] > b:
                break
            if not (there or back):
                end = at
        ends.append(end)
        if end in (start, runs.layers):
            break
        start = end
    return ends


def imd(runs: OrderedRuns, eta: int, pack: Callable[[OrderedRuns, int, int], list[int]] = OrderedRuns.fill) -> int:
    """rho_1 + rho_2 of the runs that IMD ends with.

    Args:
        pack: Layers into runs under a bound forward and backward.
    """
    low = max(after - before for costs in (runs.forward, runs.backward) for before, after in pairwise(costs))
    high = runs.forward[-1] + runs.backward[-1] + sum(runs.send_forward) + sum(runs.send_backward)
    found = sum(runs.times(runs.fill(runs.no_bound, runs.no_bound)))
    while high - low >= EPSILON:
        middle = (low + high) // 2
        for i in range(eta + 1):
            share = middle * i // eta
            ends = pack(runs, share, middle - share)
            if ends[-1] == runs.layers:
                found, high = sum(runs.times(ends)), middle
                break
        else:
            low = middle
    return found
