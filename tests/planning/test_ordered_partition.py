"""Claim: a partition is an optimal one of all contiguous ones, exactly, and among these it has the earliest borders."""

import random
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise
from math import inf

import pytest

from lightning_amp.errors import PlanError
from lightning_amp.planning.sizes.ordered_partition import partition


def bottleneck(costs, speeds, ends) -> Fraction:
    """The exact time of the slowest device."""
    exact = [Fraction(c) for c in costs]
    runs = pairwise((0, *ends))
    return max(sum(exact[a:b]) / Fraction(s) for (a, b), s in zip(runs, speeds, strict=True))


def allowed(weights, capacities, ends) -> bool:
    runs = zip(pairwise((0, *ends)), capacities, strict=True)
    return all(sum(map(Fraction, weights[a:b])) <= limit for (a, b), limit in runs)


def best(costs, speeds, weights=None, capacities=None) -> tuple[int, ...] | None:
    """All partitions tried; the first of the optimal ones in the order of their borders, None if there is none."""
    tried = (
        (*borders, len(costs))
        for borders in combinations_with_replacement(range(len(costs) + 1), len(speeds) - 1)
    )
    legal = [ends for ends in tried if weights is None or allowed(weights, capacities, ends)]
    return min(legal, key=lambda ends: (bottleneck(costs, speeds, ends), ends), default=None)


def numbers(rng: random.Random, n: int, *, least: float = 0.0) -> list[float]:
    """Decimal fractions, small whole numbers with many ties, or floats over many orders of magnitude."""
    kind = rng.randrange(3)
    if kind == 0:
        return [least + rng.randrange(1, 30) / 10 for _ in range(n)]
    if kind == 1:
        return [float(rng.randrange(least > 0, 4)) for _ in range(n)]
    return [10.0 ** rng.uniform(-12, 3) for _ in range(n)]


@pytest.mark.parametrize("seed", range(600))
def test_it_finds_what_trying_all_partitions_finds(seed: int) -> None:
    rng = random.Random(seed)
    tasks, devices = rng.randrange(1, 9), rng.randrange(1, 5)
    costs = numbers(rng, tasks)
    speeds = [1.0] * devices if seed % 3 == 0 else numbers(rng, devices, least=0.1)
    assert partition(costs, speeds) == best(costs, speeds)


@pytest.mark.parametrize("seed", range(600))
def test_within_capacities_too(seed: int) -> None:
    rng = random.Random(seed)
    tasks, devices = rng.randrange(1, 8), rng.randrange(1, 5)
    costs, speeds = numbers(rng, tasks), numbers(rng, devices, least=0.1)
    weights = numbers(rng, tasks)
    share = sum(weights) / devices
    capacities = [rng.choice([0.0, share, 1.5 * share, 2 * share, inf]) for _ in range(devices)]
    expected = best(costs, speeds, weights, capacities)
    if expected is None:
        with pytest.raises(PlanError, match="hold no more than the first"):
            partition(costs, speeds, weights=weights, capacities=capacities)
    else:
        assert partition(costs, speeds, weights=weights, capacities=capacities) == expected


def test_rounding_does_not_decide() -> None:
    # in floats 0.1 + 0.2 exceeds 0.3, and so do the numbers that they stand for
    assert partition([0.3, 0.1, 0.2], [1, 1]) == best([0.3, 0.1, 0.2], [1, 1]) == (1, 3)
    # the small cost is lost in a float's sum
    assert partition([2.0**60, 1.0, 2.0**60], [1, 1]) == (1, 3)
    assert partition([2.0**60, 1.0, 2.0**60, 2.0], [1, 1]) == (2, 4)


def test_what_it_depends_on() -> None:
    rng = random.Random(0)
    costs, speeds = [rng.random() for _ in range(40)], [rng.uniform(1, 4) for _ in range(6)]
    ends = partition(costs, speeds)
    assert ends[-1] == 40
    assert all(a <= b for a, b in pairwise((0, *ends)))
    assert partition([c * 1024 for c in costs], speeds) == partition(costs, [s / 8 for s in speeds]) == ends
    bound = bottleneck(costs, speeds, ends)
    assert bound >= sum(map(Fraction, costs)) / sum(map(Fraction, speeds))
    assert bottleneck(costs, [*speeds, 1.0], partition(costs, [*speeds, 1.0])) <= bound


def test_it_keeps_up_with_a_chromosome() -> None:
    costs = [1.0 + (k % 7) for k in range(20_000)]
    ends = partition(costs, [1.0] * 64)
    assert bottleneck(costs, [1.0] * 64, ends) <= sum(costs) / 64 + 7


def test_known_answers() -> None:
    assert partition([1, 2, 3, 4], [1, 1]) == (3, 4)
    assert partition([4, 3, 2, 1], [1, 1]) == (1, 4)
    assert partition([1, 1, 1, 1], [3, 1]) == (3, 4)
    assert partition([5], [1, 1, 1]) == (0, 0, 1)
    assert partition([0, 0], [1, 1]) == (0, 2)
    assert partition([1, 1, 1, 1], [1, 1], weights=[1, 1, 1, 1], capacities=[1, inf]) == (1, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([], [1]), r"0 costs.*one or more finite numbers of 0 or more"),
        (([1], []), r"0 speeds.*one or more finite numbers above 0"),
        (([1, -2], [1]), r"2 costs, among them \[-2\]"),
        (([float("nan")], [1]), r"1 costs, among them \[nan\]"),
        (([inf], [1]), r"1 costs, among them \[inf\]"),
        ((["1"], [1]), r"1 costs, among them \['1'\]"),
        (([1], [0]), r"1 speeds, among them \[0\]; allowed are one or more finite numbers above 0"),
        (([1], [1], [1], None), r"weights=\[1\] and capacities=None; a limit needs both"),
        (([1], [1], None, [1]), r"weights=None and capacities=\[1\]; a limit needs both"),
        (([1], [1], [1, 1], [1]), "2 weights for 1 tasks; give one for each"),
        (([1], [1], [1], [1, 1]), "2 capacities for 1 devices; give one for each"),
        (
            ([1], [1], [1], [-1]),
            r"1 capacities, among them \[-1\]; allowed are one or more numbers of 0 or more",
        ),
        (
            ([1, 1], [1], [1, 2], [2]),
            r"of 2 tasks.*capacities=\[2.0\].*first 1; the weights are \[1.0, 2.0\]: use",
        ),
    ],
)
def test_it_refuses(given, message) -> None:
    costs, speeds, *limits = given
    weights, capacities = limits or (None, None)
    with pytest.raises(PlanError, match=message):
        partition(costs, speeds, weights=weights, capacities=capacities)
