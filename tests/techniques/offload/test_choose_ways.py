"""Ways are chosen within a bound, and take within 2 % of the time of the best of all assignments."""

from itertools import product

import numpy as np
import pytest

from lightning_amp.techniques.offload import choose_ways as chosen
from lightning_amp.techniques.offload.choose_ways import choose_ways
from lightning_amp.techniques.offload.timeline import AGAIN, HOST, KEEP, Link, Timeline, intervals


def step(n: int, seed: int, *, nested: bool = True) -> Timeline:
    """A step of n operators, each of which saves a tensor; in the backward pass some are asked for out of order."""
    random = np.random.default_rng(seed)
    n_bytes, forward = random.integers(1, 100, n), random.uniform(0.2, 3, n)
    clock = np.cumsum([*forward, *2 * forward[::-1]])
    order = np.arange(n) if nested else random.permutation(n)
    back = np.empty(n, int)
    # moment t ends at clock[t]
    back[order] = 2 * n - 1 - np.arange(n)
    saved_at = np.arange(n)
    # a later operator may still read it
    gone = np.minimum(saved_at + 1 + random.integers(0, 3, n), n)
    live = np.array([n_bytes[(saved_at <= t) & (t <= back)].sum() + random.integers(0, 60) for t in range(2 * n)])
    most, away = intervals(live, gone, back)
    host = away * n_bytes[:, None]
    # an operator that runs again reads something that is kept
    freed = np.stack([0 * host, host, np.floor(random.uniform(0.5, 1, n)[:, None] * host)])
    cannot = random.random(n) < 0.15
    return Timeline(
        live=most,
        freed=freed,
        n_bytes=n_bytes.astype(float),
        saved=clock[saved_at],
        asked=clock[back - 1],
        again=np.where(cannot, np.inf, forward * random.uniform(0.3, 1.2, n)),
        seconds=float(clock[-1]),
    )


def ratios(n: int, seeds: range, *, nested: bool = True) -> list[float]:
    """Seconds of the choice by those of the best assignment, for several rates and bounds."""
    found = list[float]()
    for seed in seeds:
        timeline, random = step(n, seed, nested=nested), np.random.default_rng(seed + 1000)
        ways = [
            w for w in product((KEEP, HOST, AGAIN), repeat=n) if np.isfinite(timeline.again[np.array(w) == AGAIN]).all()
        ]
        peaks = np.array([timeline.peak(w) for w in ways])
        for rate in (5.0, 30.0, 200.0):
            link = Link(out=rate, back=rate * random.uniform(0.5, 1.5), window=2 * timeline.n_bytes.max())
            took = np.array([timeline.took(w, link) for w in ways])
            for share in (0.2, 0.5, 0.8):
                bound = peaks.min() + share * (peaks.max() - peaks.min())
                made = choose_ways(timeline, bound, link)
                assert timeline.peak(made) <= bound
                found.append(timeline.took(made, link) / took[peaks <= bound].min())
    return found


@pytest.mark.parametrize("nested", [True, False])
def test_the_choice_takes_within_2_percent_of_the_best(nested: bool) -> None:
    found = ratios(6, range(12), nested=nested)
    assert min(found) >= 1 - 1e-9
    assert max(found) <= 1.02
