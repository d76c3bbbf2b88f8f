"""Claim: a region is found if and only if the rules of `region.py` allow it; every rule is needed."""

from collections.abc import Iterator
from itertools import product
from math import gcd
from typing import Any

import pytest

from lightning_amp.errors import PlanError
from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions import find_regions as find_regions_file
from lightning_amp.techniques.chunk.regions.find_regions import find_regions, same_region
from lightning_amp.techniques.chunk.regions.region import Region
from tests.each import each
from tests.techniques.chunk.regions.rules import broken
from tests.techniques.chunk.regions.tables import Rows, random_table


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
    take = find_regions_file._Flow._take

    def counted(self: Any, i: int) -> bool:
        nonlocal passed
        passed += 1
        return take(self, i)

    monkeypatch.setattr(find_regions_file._Flow, "_take", counted)
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


@each(seed=range(40), odd=(False, True))
def test_all_legal_regions_of_random_tables(seed: int, odd: bool) -> None:
    """What is found is legal; what is legal is found, or a region of the same run in which more rows are cut.

    Where two rows cannot both be cut, only the regions are found in which the later one is.
    """
    table = random_table(seed, 6 - odd, odd=odd)
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
