"""Claim: no plan within the budget costs less, none is above the budget, and a larger budget costs no more."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import pytest

from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.errors import PlanError
from lightning_amp.graph.table import Table
from lightning_amp.techniques.chunk.regions.candidates import RegionCandidate
from lightning_amp.techniques.chunk.regions.choose_chunks import OverBudget, choose_chunks
from lightning_amp.techniques.chunk.regions.chunk_bytes import chunk_bytes
from lightning_amp.techniques.chunk.regions.find_regions import find_regions
from lightning_amp.techniques.chunk.regions.piece_seconds import Seconds
from lightning_amp.techniques.chunk.regions.region import Region, pieces
from lightning_amp.techniques.chunk.regions.region_search import Line
from tests.each import each
from tests.techniques.chunk.regions.rules import broken
from tests.techniques.chunk.regions.tables import Rows, random_table


def every_plan(table: Table) -> Iterator[tuple[Region, ...]]:
    """All sets of regions without a row in common, in all numbers of pieces."""
    cut = [
        replace(region, n_chunks=n)
        for region in find_regions(table)
        for n in sorted({len(pieces(region.units, n)) for n in range(2, region.units + 1)})
    ]

    def behind(at: int) -> Iterator[tuple[Region, ...]]:
        yield ()
        for region in cut:
            if region.first >= at:
                for others in behind(region.last + 1):
                    yield (region, *others)

    return behind(0)


def measured(table: Table, *, train: bool) -> list[tuple[int, float]]:
    """Peak and seconds of every plan."""
    seconds = Seconds(table, CPU_CORE, train=train)
    return [(chunk_bytes(table, p, train=train).peak_bytes, seconds.of(p)) for p in every_plan(table)]


def budgets(peaks: Sequence[int], seed: int) -> list[int]:
    draw = random.Random(seed)
    found = sorted(set(peaks))
    return [*found[:3], *(draw.randint(found[0], found[-1]) for _ in range(4)), found[-1]]


def small(seed: int, *, odd: bool = False) -> bool:
    """Whether a table has few enough plans to count them all."""
    return sum(1 for _ in islice(every_plan(random_table(seed, 4, odd=odd)), MOST)) < MOST


MOST = 400


def cases() -> list[tuple[int, bool]]:
    every = [(seed, False) for seed in range(80)] + [(seed, True) for seed in range(30)]
    return [(seed, odd) for seed, odd in every if small(seed, odd=odd)]


@each(case=cases)
def test_against_all_plans_of_random_tables(case: tuple[int, bool]) -> None:
    """Also with views that are results, whose memory is apart once a region writes them."""
    seed, odd = case
    table = random_table(seed, 4, odd=odd)
    plans = measured(table, train=False)
    least = min(peak for peak, _ in plans)
    before = float("inf")
    for budget in sorted(budgets([peak for peak, _ in plans], seed)):
        plan = choose_chunks(table, budget)
        assert plan.peak_bytes <= budget
        assert all(not broken(table, region) for region in plan.regions)
        assert plan.peak_bytes == chunk_bytes(table, plan.regions).peak_bytes
        assert plan.seconds == pytest.approx(min(s for peak, s in plans if peak <= budget), rel=1e-9)
        assert plan.seconds <= before
        before = plan.seconds
    if least > 0:
        with pytest.raises(PlanError, match=f"block .Hand. requires at least {least!r} bytes"):
            choose_chunks(table, least - 1)


@each(seed=lambda: [seed for seed in range(80) if small(seed)])
def test_training_against_all_plans_of_random_tables(seed: int) -> None:
    """Gradients that share memory with others are counted apart by the search: it may miss the last few bytes."""
    table = random_table(seed, 4)
    plans = measured(table, train=True)
    least, before = min(peak for peak, _ in plans), float("inf")
    for budget in sorted(budgets([peak for peak, _ in plans], seed)):
        if budget < 1.1 * least:
            continue
        plan = choose_chunks(table, budget, train=True)
        assert plan.peak_bytes <= budget
        assert plan.peak_bytes == chunk_bytes(table, plan.regions, train=True).peak_bytes
        assert plan.seconds <= 1.05 * min(s for peak, s in plans if 1.1 * peak <= budget)
        assert plan.seconds <= before
        before = plan.seconds


@each(seed=range(30))
def test_the_bytes_of_the_search_are_those_of_chunk_bytes(seed: int) -> None:
    """In inference; else a plan would be found in a second search only."""
    table = random_table(seed, 6, odd=True)
    line, seconds = Line(table, train=False), Seconds(table, CPU_CORE, train=False)
    regions = [r for r in find_regions(table) if any(table.rows[i].storage != i for i in r.outputs(table))]
    for region in regions or find_regions(table):
        candidate = RegionCandidate(table, region, seconds.extra, line.plain, train=False)
        # a cost below zero: it is taken wherever it fits
        candidate._cost = lambda _: -1.0
        label = line.search([candidate], 10**9)
        assert label is not None
        assert label.regions != ()
        assert label.peak_bytes == chunk_bytes(table, label.regions).peak_bytes


def test_the_least_is_that_of_all_peaks() -> None:
    """A high peak and a lower one, each of which has to be cut."""
    new = Rows()
    x = new.given(4, 6)
    for wide in (64, 24):
        x = new.linear(new.pointwise(new.linear(x, wide), op="exp"), 6)
    table = new.table(x)
    with pytest.raises(OverBudget) as found:
        choose_chunks(table, 1)
    # of the second, one feature a piece: its input, its output, what a piece adds to that, and one feature
    assert found.value.least_bytes == 3 * 96 + 16
