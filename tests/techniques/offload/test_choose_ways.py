"""Ways are chosen within a bound, and take within 2 % of the time of the best of all assignments."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from lightning_amp.techniques.offload.choose_ways import choose_ways
from lightning_amp.techniques.offload.look import Look
from lightning_amp.techniques.offload.row import Offload, written
from lightning_amp.techniques.offload.timeline import AGAIN, HOST, KEEP, Link, OnHost, SavedTensors, Timeline


def step(n: int, seed: int, *, nested: bool = True) -> Timeline:
    """A step of n operators, each of which saves a tensor; in the backward pass some are needed for out of order."""
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
    saved = SavedTensors(
        live=live.astype(float),
        sizes=n_bytes,
        buffers=np.zeros((0, 3), int),
        number=np.arange(n),
        n_bytes=n_bytes.astype(float),
        place=saved_at,
        clock=np.array([0, *clock]),
        saved_at=saved_at,
        gone=gone,
        back=back,
    )
    each = [[i] for i in range(n)]
    # an operator that runs again reads something that is kept
    freed = np.stack([np.floor(random.uniform(0.5, 1) * saved.away([i])) for i in range(n)])
    cannot = random.random(n) < 0.15
    return saved.timeline(each, freed, np.where(cannot, np.inf, forward * random.uniform(0.3, 1.2, n)))


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


def test_a_part_that_is_not_on_the_device_at_the_peak_stays() -> None:
    timeline = step(8, 3)
    link = Link(out=30.0, back=30.0, window=200.0)
    ways = choose_ways(timeline, timeline.peak([KEEP] * 8) - 1, link)
    at = timeline.live.argmax()
    assert any(ways)
    assert all(timeline.freed[way, i, at] > 0 for i, way in enumerate(ways) if way != KEEP)


def test_copies_beside_the_computation_take_no_time_and_others_wait() -> None:
    """Three tensors of 10 bytes: saved at 1, 2 and 3 seconds, needed for at 4, 6 and 8, the last one first."""
    n_bytes, saved, needed = np.full(3, 10.0), np.array([1.0, 2.0, 3.0]), np.array([8.0, 6.0, 4.0])
    line = Timeline(
        live=np.zeros(1),
        freed=np.zeros((3, 3, 1)),
        part=np.arange(3),
        n_bytes=n_bytes,
        taken=n_bytes,
        saved=saved,
        needed=needed,
        again=np.array([0.5, np.inf, 2.0]),
        seconds=10.0,
    )
    fast = Link(out=10.0, back=10.0, window=20.0)
    # the last two are still there when they are needed for, and the first one comes back meanwhile
    assert line.took([HOST] * 3, fast) == 10.0
    # the first one has to come back alone
    alone = Link(out=10.0, back=10.0, window=0.0)
    assert line.took([HOST, KEEP, KEEP], alone) == 12.0
    assert line.took([HOST, KEEP, AGAIN], alone) == 14.0
    assert line.took([KEEP, AGAIN, KEEP], fast) == np.inf
    # copies of 4 seconds end at 5, 9 and 13: the third tensor is saved when the first is let go, and needed for before
    # its copy has ended; the first one then comes back in time
    slow = Link(out=2.5, back=2.5, window=20.0)
    assert line.took([HOST] * 3, slow) == 10.0 + 9.0
    # without a window each is waited for at once
    assert line.took([HOST] * 3, Link(out=10.0, back=10.0, window=0.0)) == 10.0 + 3 + 3
    assert line.took([HOST] * 3, Link(out=10.0, back=5.0, window=0.0)) == 10.0 + 3 + 6
    # as `Moves` does: what was saved later does not come back ahead, if it is needed later too
    turned = replace(line, needed=np.array([6.0, 8.0, 9.5]))
    assert turned.took([HOST] * 3, Link(out=10.0, back=10.0, window=10.0)) == 10.0 + 1 + 1


def test_small_storages_are_left_out_and_the_others_numbered_again() -> None:
    sizes = np.array([5, 100, 7, 200, 300])
    saved = SavedTensors(
        live=np.array([300.0, 500.0, 400.0]),
        sizes=sizes,
        # 1 gives its memory back before 4 leaves, 4 leaves in both steps
        buffers=np.array([[4, 1, 0], [4, 0, 0], [1, 1, 1], [0, 1, 1], [1, 0, 1], [0, 0, 1], [4, 1, 1]]),
        # 3 is never away
        number=np.array([0, 1, 2, 4]),
        n_bytes=sizes[[0, 1, 2, 4]].astype(float),
        place=np.arange(4),
        gone=np.array([0, 0, 1, 1]),
        back=np.array([3, 2, 2, 3]),
        saved_at=np.zeros(4, int),
        clock=np.arange(4.0),
    )
    large = saved.at_least(10)
    assert large.number.tolist() == [0, 2]
    assert Look.on_host(large, [0, 1]) == OnHost(host_bytes=300, left_bytes=400, n_left=2)
    assert Look.on_host(large, [0]) == OnHost(host_bytes=100, left_bytes=100, n_left=1)
    assert Look.on_host(saved, [3]) == OnHost(host_bytes=300, left_bytes=300, n_left=1)
    # in page-locked memory, of which torch takes powers of two
    pinned = replace(large, pinned=True)
    assert Look.on_host(pinned, [0, 1]) == OnHost(host_bytes=512, left_bytes=400, n_left=2)
    ways = pinned.timeline([[0], [1]])
    assert [ways.host_bytes(two) for two in ([HOST, KEEP], [HOST, HOST])] == [128, 128 + 512]
    assert large.peak([]) == 500
    assert large.peak([0]) == 400
    assert large.peak([0, 1]) == 200
    assert large.away([0, 1], back=2).max() == 400


def test_numbers_are_written_as_ranges() -> None:
    for text, numbers in {"0-3,7,9-10": [0, 1, 2, 3, 7, 9, 10], "4": [4], "": []}.items():
        assert written(numbers) == text
        assert Offload(leaves=text).numbers == {*numbers}
    assert Offload().numbers is None
