"""Claim: a partition of strata is an optimal one of all contiguous ones, exactly, with a stratum for every rank."""

import random
from fractions import Fraction
from itertools import combinations, pairwise

from lightning_amp.costs.ordered_runs import deal
from tests.each import each


def bottleneck(costs, ends, speeds=(), passing=()) -> Fraction:
    """The exact time of the slowest rank."""
    exact, passed = [Fraction(c) for c in costs], [Fraction(p) for p in passing]
    runs = zip(pairwise((0, *ends)), speeds or [1] * len(ends), strict=True)
    return max((sum(exact[a:b]) + sum(passed[:a])) / Fraction(speed) for (a, b), speed in runs)


def best(costs, ranks, speeds=(), passing=()) -> tuple[int, ...]:
    """All partitions tried; the first of the optimal ones in the order of their ends."""
    tried = ((*ends, len(costs)) for ends in combinations(range(1, len(costs)), ranks - 1))
    return min(tried, key=lambda ends: (bottleneck(costs, ends, speeds, passing), ends))


def numbers(rng: random.Random, n: int) -> tuple[float, ...]:
    """Decimal fractions, small whole numbers with many ties, or floats over many orders of magnitude."""
    kind = rng.randrange(3)
    if kind == 0:
        return tuple(rng.randrange(1, 30) / 10 for _ in range(n))
    if kind == 1:
        return tuple(float(rng.randrange(4)) for _ in range(n))
    return tuple(10.0 ** rng.uniform(-12, 3) for _ in range(n))


def some_costs(rng: random.Random) -> tuple[int, tuple[float, ...]]:
    """A number of ranks, and the costs of at least as many strata."""
    strata = rng.randrange(1, 10)
    ranks = rng.randrange(1, min(strata, 5) + 1)
    return ranks, numbers(rng, strata)


@each(seed=range(300))
def test_it_finds_what_trying_all_partitions_finds(seed: int) -> None:
    ranks, costs = some_costs(random.Random(seed))
    assert deal(costs, ranks) == best(costs, ranks)


@each(seed=range(300))
def test_ranks_of_unequal_speed(seed: int) -> None:
    rng = random.Random(seed)
    strata = rng.randrange(4, 10)
    ranks = rng.randrange(2, 5)
    # alike enough that no rank is better left without a stratum
    costs = tuple(rng.uniform(1, 1.2) for _ in range(strata))
    speeds = tuple(rng.choice((1.0, 0.5, rng.uniform(0.7, 1))) for _ in range(ranks))
    ends = deal(costs, ranks, speeds)
    assert bottleneck(costs, ends, speeds) == bottleneck(costs, best(costs, ranks, speeds), speeds)
    assert all(a < b for a, b in pairwise((0, *ends)))


@each(seed=range(300))
def test_ranks_of_a_chain_pass_the_strata_before_their_own(seed: int) -> None:
    rng = random.Random(seed)
    ranks, costs = some_costs(rng)
    passing = tuple(c * rng.choice((0.0, rng.random(), 1.0)) for c in costs)
    assert deal(costs, ranks, (), passing) == best(costs, ranks, (), passing)


def test_rounding_does_not_decide() -> None:
    # in floats 0.1 + 0.2 exceeds 0.3, and so do the numbers that they stand for
    assert deal((0.3, 0.1, 0.2), 2) == best((0.3, 0.1, 0.2), 2) == (1, 3)
    # the small cost is lost in a float's sum
    assert deal((2.0**60, 1.0, 2.0**60), 2) == (1, 3)
    assert deal((2.0**60, 1.0, 2.0**60, 2.0), 2) == (2, 4)


def test_known_answers() -> None:
    assert deal((1, 2, 3, 4), 2) == (3, 4)
    assert deal((4, 3, 2, 1), 2) == (1, 4)
    assert deal((0, 0, 5), 3) == (1, 2, 3)
    assert deal((0, 0), 2) == (1, 2)
    assert deal((1,) * 6, 2, (1.0, 0.5)) == (4, 6)
    assert deal((4,) * 6, 2, (), (2,) * 6) == (4, 6)
    assert deal((1, 1, 1), 3, (1.0, 0.1, 1.0)) == (1, 2, 3), "a slow rank has a stratum too"
