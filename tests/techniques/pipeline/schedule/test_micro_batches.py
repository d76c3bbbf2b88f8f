"""Claim: the time of a step is Eq. 8 for every number of micro-batches at once; no search misses a better pair."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from benchmarks.pipeline.networks import cross_search
from lightning_amp.techniques.pipeline.schedule.micro_batches import LayerSeconds, LayerTimes, gpipe_seconds, search_all
from lightning_amp.techniques.pipeline.schedule.schedules import schedule, timeline

NAMES = ("forward", "backward", "send_forward", "send_backward")
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)


def draw(seed: int, layers: int = 9) -> LayerTimes:
    """Layers whose time is some fixed part and some part that shrinks more or less with the micro-batch."""
    rng = np.random.default_rng(seed)
    p = np.array(COUNTS)[:, None]
    tables = [
        rng.uniform(50, 100, layers) / p ** rng.uniform(0.4, 1, layers) + rng.uniform(0, 9, layers) for _ in NAMES
    ]
    return LayerTimes(counts=COUNTS, **dict(zip(NAMES, tables, strict=True)))


def stages_of(times: LayerTimes, row: int, ends: tuple[int, ...], speeds: list[float] | None = None) -> Any:
    return LayerSeconds(**{name: getattr(times, name)[row] for name in NAMES}).stages(ends, speeds, 9)


def slowest(stages: Any) -> float:
    """rho_1 + rho_2."""
    there, back = (
        max(max(getattr(s, f"{way}_seconds"), getattr(s, f"send_{way}_seconds")) for s in stages)
        for way in ("forward", "backward")
    )
    return there + back


@pytest.mark.parametrize("speeds", [None, [1.0, 0.5, 2.0, 1.0]])
@pytest.mark.parametrize("ends", [(9,), (2, 9), (3, 5, 9), (1, 2, 3, 9), (4, 4, 9)])
def test_the_time_of_a_step_is_that_of_its_schedule(ends: tuple[int, ...], speeds: list[float] | None) -> None:
    times = draw(0)
    found = gpipe_seconds(times, ends, speeds=speeds)
    for row, p in enumerate(COUNTS):
        stages = stages_of(times, row, ends, speeds)
        line = timeline(schedule("gpipe", len(stages), p), stages)
        assert found[row] == pytest.approx(line.seconds)


@pytest.mark.parametrize("seed", range(10))
def test_searching_all_finds_the_best_of_all_optimal_cuts(seed: int) -> None:
    times = draw(seed)
    everything = search_all(times, 3)
    every_cut = [(*ends, 9) for n in range(3) for ends in combinations(range(1, 9), n)]
    best_of_rows = []
    for row in range(len(COUNTS)):
        # the least rho_1 + rho_2 that any cut has for this number of micro-batches
        stages = [stages_of(times, row, ends) for ends in every_cut]
        least = min(map(slowest, stages))
        best_of_rows += [
            gpipe_seconds(times, ends).min() for ends, s in zip(every_cut, stages, strict=True) if slowest(s) <= least
        ]
    assert everything.seconds == pytest.approx(min(best_of_rows))
    row = COUNTS.index(everything.micro_batches)
    assert gpipe_seconds(times, everything.ends)[row] == everything.seconds
    # Algorithm 1 may stop short of it
    assert cross_search(times, 3) >= everything.seconds
