"""Claim: a region is found if and only if the rules allow it; no plan within the budget costs less; bytes and seconds
are what a hand counts."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from math import gcd
from typing import Any

import pytest

from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.errors import PlanError
from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions import find_regions as find_regions_file
from lightning_amp.techniques.chunk.regions import walk
from lightning_amp.techniques.chunk.regions.candidates import RegionCandidate
from lightning_amp.techniques.chunk.regions.choose_chunks import CostModel, OverBudget, choose_chunks
from lightning_amp.techniques.chunk.regions.chunk_bytes import chunk_bytes
from lightning_amp.techniques.chunk.regions.costs import WEIGHTS, Seconds, Weights, paper_cost
from lightning_amp.techniques.chunk.regions.find_regions import same_region
from lightning_amp.techniques.chunk.regions.region import Region, piece_count, pieces
from lightning_amp.techniques.chunk.regions.region_search import Line
from tests.each import BEFORE_A_RELEASE, each
from tests.techniques.chunk.regions.tables import Rows, broken, find_regions, random_table


def scan(n_steps: int) -> Table:
    """A loop over time: each step reads the state and one argument."""
    new = Rows()
    state, inputs = new.given(4, 6), new.given(4, 6)
    for _ in range(n_steps):
        state = new.pointwise(new.pointwise(state, inputs), op="exp")
    return new.table(state)


def test_a_loop_over_time_is_searched_in_work_that_grows_with_its_length(monkeypatch: Any) -> None:
    """Of every stretch one end is left, so that no more rows than are allowed are in regions, and it is said."""
    passed = 0
    take = walk.Flow._take

    def counted(self: Any, i: int) -> bool:
        nonlocal passed
        passed += 1
        return take(self, i)

    monkeypatch.setattr(walk.Flow, "_take", counted)
    work = {}
    for n_steps in (20, 40, 80):
        table, passed = scan(n_steps), 0
        search = find_regions_file.RegionSearch(table, held=[0] * len(table.rows))
        found = search.around(range(len(table.rows)), most_rows=2_000)
        work[n_steps] = passed
        assert 0 < sum(region.last - region.first + 1 for region in found) <= 2_000
        assert all(not broken(table, region) for region in found)
        assert search.thinned
    assert work[80] < 3 * work[40] < 9 * work[20]


def every_region(table: Table, first: int, last: int) -> Iterator[Region]:
    """All legal regions of a run: every row is cut along any of its dims, summed or before."""
    run = [i for i in range(first, last + 1) if table.rows[i].kind == OPERATOR]
    choices = [[*range(len(table.rows[i].shape)), *(["sum"] if table.rows[i].sums else []), "before"] for i in run]
    for chosen in product(*choices):
        kinds = dict(zip(run, chosen, strict=True))
        if kinds[first] == "before" or kinds[last] == "before":
            continue
        own = {i: c for i, c in kinds.items() if c != "before"}
        for dims in reads(table, own):
            sizes = [table.rows[i].shape[d] for i, d in dims.items() if d < len(table.rows[i].shape)]
            units = gcd(*sizes)
            region = Region(
                first=first,
                last=last,
                dims=dims,
                sums=tuple(i for i, c in kinds.items() if c == "sum"),
                before=tuple(i for i, c in kinds.items() if c == "before"),
                units=units,
                n_chunks=units,
            )
            if not broken(table, region) and connected(table, region):
                yield region


def reads(table: Table, own: dict[int, int | str]) -> Iterator[dict[int, int]]:
    """The dims of rows that are cut, with those that their arguments have to be cut along."""
    groups = []
    for i, c in own.items():
        row = table.rows[i]
        found = row.sums if c == "sum" else [(row.dims or ((),) * 9)[c]]  # type: ignore[index]
        groups.append([(i, group) for group in found])
    for chosen in product(*groups):
        dims = {i: c for i, c in own.items() if c != "sum"}
        for i, group in chosen:
            for k, d in group:
                dims.setdefault(table.rows[i].inputs[k], d)
        yield dims  # type: ignore[misc]


def connected(table: Table, region: Region) -> bool:
    """Whether one flow reaches all rows, by way of rows or of inputs that are cut."""
    inside = set(region.inside(table))
    reached, waiting = set[int](), [region.last]
    while waiting:
        i = waiting.pop()
        if i in reached:
            continue
        reached.add(i)
        near = [k for k in table.rows[i].inputs if k in region.dims] if i in inside else []
        near += [j for j in inside if i in table.rows[j].inputs and i in region.dims]
        waiting += near
    return inside <= reached


def covers(found: Region, other: Region) -> bool:
    cut = {i: d for i, d in other.dims.items() if i not in other.before}
    return all(found.dims.get(i) == d for i, d in cut.items()) and set(other.sums) <= set(found.sums)


def alike(found: Region, other: Region) -> bool:
    return found.dims.get(found.last) == other.dims.get(other.last)


@pytest.mark.long
@pytest.mark.parametrize("tens", [0, *(pytest.param(n, marks=BEFORE_A_RELEASE) for n in (1, 2, 3))])
@each(seed=range(10), odd=(False, True))
def test_all_legal_regions_of_random_tables(tens: int, seed: int, odd: bool) -> None:
    """What is found is legal; what is legal is found, or a region of the same run in which more rows are cut.

    Where two rows cannot both be cut, only the regions are found in which the later one is.
    """
    table = random_table(10 * tens + seed, 6 - odd, odd=odd)
    found = find_regions(table)
    by_run: dict[tuple[int, int], list[Region]] = {}
    for region in found:
        assert broken(table, region) == []
        by_run.setdefault((region.first, region.last), []).append(region)
    rows = range(len(table.rows))
    for first in rows:
        for last in rows[first:]:
            if OPERATOR == table.rows[first].kind == table.rows[last].kind:
                for legal in every_region(table, first, last):
                    same = [r for (_, end), rs in by_run.items() if end == last for r in rs if alike(r, legal)]
                    assert any(covers(r, legal) for r in same if r.first == first) or any(
                        set(legal.before) & r.dims.keys() - set(r.before) for r in same
                    ), legal
    assert len({(r.first, r.last, tuple(sorted(r.dims.items())), r.sums) for r in found}) == len(found)


def test_an_earlier_first_row_is_left_out_where_it_does_no_good() -> None:
    """Bytes before every row: 0, 96, 96, ...; views at either end are no part of what is found."""
    new = Rows()
    a = new.given(4, 6)
    for op in ("exp", "log", "exp"):
        a = new.pointwise(a, op=op)
    table = new.table(new.op("t", [a], (6, 4), _view=True))
    held = [0, 0, 96, 96, 96]

    def found(around: list[int], dim: int = 0) -> list[tuple[int, int]]:
        regions = find_regions(table, around=around, held=held)
        return [(r.first, r.last) for r in regions if r.dims[r.last] == dim]

    assert len(find_regions(table)) == 2 * 10
    assert found([3]) == [(3, 3), (1, 3)]
    held = [96] * 5
    assert found([1, 3]) == [(1, 1), (1, 2), (3, 3), (1, 3)]
    held = [0, 0, 96, 96, 96]
    assert found([2]) == [(2, 2), (1, 2), (2, 3), (1, 3)]


def test_pieces_are_counted_without_listing_them() -> None:
    cuts = [(units, n) for units in range(1, 40) for n in range(1, units + 1)]
    assert [piece_count(*cut) for cut in cuts] == [len(pieces(*cut)) for cut in cuts]


def test_one_unit_is_not_cut_and_what_needs_its_neighbours_is_not_summed() -> None:
    new = Rows()
    x = new.pointwise(new.given(1, 6), op="exp")
    assert [(r.dims[x], r.units) for r in find_regions(new.table(x))] == [(1, 6)]
    new = Rows()
    x = new.pointwise(new.given(4, 6), op="exp", _near=((0, 1),))
    total = new.op("sum", [x], (6,), dim=[0])
    found = [(r.first, r.last, r.dims[x], r.reach) for r in find_regions(new.table(total)) if x in r.dims]
    assert sorted(found) == [(x, x, 0, 1), (x, x, 1, 0), (x, total, 1, 0), (total, total, 0, 0), (total, total, 1, 0)]
    # around
    table = random_table(3, 6)
    every = find_regions(table)
    assert find_regions(table, around=[6]) == tuple(r for r in every if r.first <= 6 <= r.last)
    assert find_regions(table, around=[]) == ()


def test_the_same_region_of_other_sizes() -> None:
    """In no more pieces than it has units; none where an argument is read whole that was cut, or nothing can be cut."""

    def added(*shapes: tuple[int, int]) -> Table:
        new = Rows()
        return new.table(new.op("add", [new.given(*shape) for shape in shapes], max(shapes)))

    region = next(r for r in find_regions(added((8, 6), (8, 6))) if r.dims[2] == 0)
    found = same_region(added((4, 6), (4, 6)), region)
    assert (found.dims, found.units, found.n_chunks) == (region.dims, 4, 4)
    for shapes in (((4, 6), (1, 6)), ((1, 6), (1, 6))):
        with pytest.raises(PlanError, match="cannot be cut in the same way"):
            same_region(added(*shapes), region)


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


@pytest.mark.long
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


RATES = replace(CPU_CORE, matmul_flops=1.0, memory_bytes=1.0, overhead_seconds=1000.0)


def feed_forward() -> tuple[Rows, dict[str, int]]:
    """[4, 6] -> 8 features -> exp -> 6, without biases."""
    new = Rows()
    x = new.given(4, 6)
    up = new.linear(x, 8)
    act = new.pointwise(up, op="exp")
    down = new.linear(act, 6)
    return new, {"x": x, "w": up - 1, "up": up, "act": act, "v": down - 1, "down": down}


def cut(at: dict[str, int], n_chunks: int) -> Region:
    dims = {at[name]: 0 for name in ("x", "up", "act", "down")}
    return Region(first=at["up"], last=at["down"], dims=dims, units=4, n_chunks=n_chunks)


def test_bytes_and_seconds_by_hand() -> None:
    new, at = feed_forward()
    table = new.table(at["down"])
    whole = chunk_bytes(table, ())
    assert whole.peak_bytes == 128 + 128
    # the output of 4 x 6 numbers, and of a piece of 2 rows two results of 2 x 8, or one and one of 2 x 6
    found = chunk_bytes(table, [cut(at, 2)])
    assert [found.forward[at[name]] for name in ("up", "act", "down")] == [96 + 64, 96 + 128, 96 + 64 + 48]
    assert found.saved_bytes == 96
    # 3 pieces of 4 rows are two of 2 rows
    assert chunk_bytes(table, [cut(at, 3)]).peak_bytes == found.peak_bytes
    assert chunk_bytes(table, [cut(at, 4)]).peak_bytes == 96 + 64
    # seconds by hand
    seconds = Seconds(table, RATES, train=False)
    up = 1000 + 2 * 4 * 6 * 8 + 96 + 192 + 128
    act = 1000 + 128 + 128
    flops_down = table.rows[at["down"]].flops
    down = 1000 + flops_down + 128 + 192 + 96
    assert seconds.whole == pytest.approx(up + act + down)
    # two more passes call all three again and read both weights again; the output is written in three pieces of 2 x 96
    again = 1000 + 192 + 1000 + 1000 + 192
    assert seconds.extra(cut(at, 4)) == pytest.approx(3 * again + 4 * 1000 + 192)
    train = Seconds(table, RATES, train=True)
    assert train.whole == pytest.approx(3 * seconds.whole)
    assert train.extra(cut(at, 4)) == pytest.approx(4 * seconds.extra(cut(at, 4)) + seconds.whole)


def test_the_papers_cost_by_hand() -> None:
    new, at = feed_forward()
    y = new.pointwise(at["down"], op="exp")
    table = new.table(y)
    flops = table.flops
    density = (flops / 3 + 1) / (flops / 4 + 1)
    # all operations and three of four rows; the outermost dim has the largest stride
    weights = Weights(2.0, 3.0, 5.0, 7.0)
    assert paper_cost(table, cut(at, 2), weights) == pytest.approx(2 * 3 / 4 + 3 * 1 + 5 / density + 7 * 1)
    assert paper_cost(table, cut(at, 2)) == paper_cost(table, cut(at, 2), WEIGHTS)
    inner = Region(first=y, last=y, dims={at["down"]: 1, y: 1}, units=6, n_chunks=6)
    assert paper_cost(table, inner, weights) == pytest.approx(2 / 4 + 5 * (flops / 4 + 1) + 7 * 4)
    # the papers weights decide which region is taken
    new, at = feed_forward()
    table = new.table(at["down"])
    plans = {
        term: choose_chunks(table, 255, costs=CostModel(policy="paper", weights=Weights(*weights)))
        for term, weights in {"nodes": (1, 0, 0, 0), "density": (0, 0, 1, 0)}.items()
    }
    ends = {term: [(r.first, r.last) for r in plan.regions] for term, plan in plans.items()}
    assert ends == {"nodes": [(at["up"], at["act"])], "density": [(at["up"], at["down"])]}
