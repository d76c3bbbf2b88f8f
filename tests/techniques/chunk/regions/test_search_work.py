"""The search for regions does countable work: the same plan for every order of requests, and an end at its share."""

from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions import choose_chunks as choosing
from lightning_amp.techniques.chunk.regions.choose_chunks import CPU_SECONDS, OverBudget, choose_chunks
from lightning_amp.techniques.chunk.regions.find_regions import RegionSearch
from lightning_amp.techniques.chunk.regions.region_search import Line
from tests.techniques.chunk.regions.tables import random_table

TABLES = [random_table(seed, 14) for seed in range(8)]


def test_a_walk_that_goes_on_finds_what_a_new_one_finds() -> None:
    for table in TABLES:
        held, n = Line(table, train=True).held(), len(table.rows)
        search, some = RegionSearch(table, held=held), range(n // 2, n, 3)
        first = search.around(some)
        every = search.around(range(n))
        assert first == RegionSearch(table, held=held).around(some)
        assert every == RegionSearch(table, held=held).around(range(n))
        # the same objects, by which candidates are known
        assert all(any(one is other for other in search.around(some)) for one in first)


def plan(table: Table, budget: int) -> object:
    try:
        return choose_chunks(table, budget, train=True)
    except OverBudget as error:
        return error.least_bytes, error.least


def test_a_plan_and_its_work_do_not_depend_on_what_was_asked_before() -> None:
    for table in TABLES:
        whole = Line(table, train=True).plain.peak_bytes
        budgets = [whole // 2, whole // 4 * 3, 1, whole]
        choosing._search.cache_clear()
        found = {budget: plan(table, budget) for budget in budgets}
        choosing._search.cache_clear()
        assert {budget: plan(table, budget) for budget in reversed(budgets)} == found


def test_a_piece_between_the_shortest_and_the_longest_takes_what_is_counted() -> None:
    compared = 0
    for table in TABLES:
        line = Line(table, train=True)
        search = choosing._PlanSearch(table, CPU_SECONDS, train=True)
        for region in RegionSearch(table, held=line.held()).around(range(len(table.rows))):
            candidate, n_rows = search._new(region), sum(row.kind == OPERATOR for row in table.rows)
            for length in candidate._lengths[1:-1]:
                guess, counted = candidate._between(length), candidate._counted(length)
                assert all(a >= b - n_rows for a, b in zip(guess, counted, strict=True))
                assert all(a <= 1.1 * b + n_rows for a, b in zip(guess, counted, strict=True))
                compared += 1
    assert compared > 100
