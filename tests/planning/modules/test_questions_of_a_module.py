"""Claim: the largest batch that fits, the fewest devices and the leanest plan are looked for among pipelines too."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.planning.modules.candidates import as_it_is
from lightning_amp.planning.modules.min_memory_plan import fewest_ranks, leanest, missing, over_data, over_stages
from lightning_amp.planning.modules.questions import answers, largest_planned
from lightning_amp.quantities import format_bytes
from tests.planning.modules.facts import with_stages, with_units
from tests.planning.modules.test_plan_of_a_module import profiled, seen
from tests.planning.modules.test_stages import ROWS, passes, step

HELD = 40_000
"""Of the whole module: more than a device has, and it cannot be gathered in parts."""


def at(rows: int) -> ProfiledStep:
    """The step of a batch of some length, whose parameters no technique of a data axis splits."""
    plain = with_units(seen(profiled(held=HELD, batch_size=rows)), ())
    return with_stages(plain, passes=lambda part: passes(part or rows))


def drafted(rows: int, made: Draft) -> int:
    """The peak of a draft, as if a count confirmed it."""
    return made.peak_bytes


def test_a_pipeline_may_be_the_leanest() -> None:
    heavy = at(ROWS)
    assert leanest(heavy, 1).model == 1
    found = leanest(heavy, 2)
    assert (found.ranks, found.model) == (1, 2)
    assert found.peak_bytes == over_stages(heavy, 2)[0].peak_bytes < over_data(heavy, 2).peak_bytes
    # there are six blocks, of which as many stages are made as divide the ranks
    assert [(one.ranks, one.model) for one in (leanest(heavy, 8), leanest(heavy, 7))] == [(2, 4), (7, 1)]
    assert leanest(with_stages(heavy, passes=None), 2).model == 1
    # blocks that cannot be computed again are stages all the same
    kept = replace(heavy, chain=replace(heavy.chain, blocks=()))
    assert over_stages(kept, 2)[0].strategies == ("pipeline",)
    # the fewest ranks may be stages
    budget = leanest(heavy, 3).peak_bytes
    found = fewest_ranks(heavy, budget)
    assert (found.ranks, found.model) == (1, 3)
    assert found.peak_bytes <= budget < leanest(heavy, 2).peak_bytes
    assert "3 ranks with pipeline and recompute would fit" in missing(heavy, leanest(heavy, 2), budget=budget)
    assert fewest_ranks(with_stages(heavy, passes=None), budget) is None
    assert fewest_ranks(step(), 10**6) == over_data(step(), 1)


def test_a_step_requires_no_more_than_it_takes_as_it_is() -> None:
    # a count may show more than the step takes, as where its user has switched checkpoints on
    heavy = at(ROWS)
    plain = as_it_is(heavy, 1)
    counted = replace(leanest(heavy, 1), peak_bytes=plain.peak_bytes + 5000)
    assert f"requires at least {format_bytes(plain.peak_bytes)} on 1 rank" in missing(heavy, counted, budget=1)


def test_the_answers_name_a_pipeline_where_nothing_else_fits() -> None:
    budget = leanest(at(ROWS), 2).peak_bytes
    found = answers(at, drafted, at(ROWS), ranks=2, budget=budget)
    devices, batch = found.said
    assert devices.startswith("the fewest devices for this step with a batch of 8 for all of them: 2, ")
    assert devices.endswith("with pipeline and recompute")
    start, _, rest = batch.partition(": none with the step as it is, ")
    assert start.startswith("the largest batch of a rank that fits")
    n = int(rest.split(" ")[0])
    assert rest == f"{n} with pipeline and recompute, which 2 ranks share"
    assert n >= ROWS
    assert over_stages(at(n), 2)[0].peak_bytes <= budget < over_stages(at(n + 1), 2)[0].peak_bytes
    written = found.to_dict()
    assert written["fewest_devices"] == {
        "devices": 2,
        "techniques": ["pipeline", "recompute"],
        "peak_bytes": budget,
        "said": devices,
    }
    assert written["largest_batch"] == {
        "samples": n,
        "techniques": ["pipeline", "recompute"],
        "ranks_that_share_it": 2,
        "samples_without_techniques": 0,
        "said": batch,
    }
    found = answers(at, drafted, at(ROWS), ranks=1, budget=budget)
    assert "none, not even one of 1" in found.said[1]
    assert found.to_dict()["largest_batch"]["samples"] == 0
    found = answers(at, drafted, at(ROWS), ranks=1, budget=1)
    assert found.said[0].startswith("no number of devices has the memory")
    assert found.to_dict()["fewest_devices"] is None


def test_a_batch_for_each_rank_is_more_than_a_larger_one_for_both() -> None:
    def grown(rows: int) -> ProfiledStep:
        plain = with_units(seen(profiled(saved=6000 + 1000 * rows, batch_size=rows)), ())
        return with_stages(plain, passes=lambda part: passes(part or rows, saved=1000))

    assert over_stages(grown(10), 2)[0].peak_bytes < 11_000 < over_data(grown(8), 2).peak_bytes
    assert answers(grown, drafted, grown(ROWS), ranks=2, budget=11_000).said[1].endswith(" 7 with recompute")


def test_a_largest_batch_is_one_that_a_count_confirms() -> None:
    def grown(rows: int) -> ProfiledStep:
        return with_units(seen(profiled(saved=6000 + 100 * rows, batch_size=rows)), ())

    def more(rows: int, made: Draft) -> int:
        return made.peak_bytes + 50 * rows

    def largest(count: Callable[[int, Draft], int]) -> int:
        found = answers(grown, count, grown(ROWS), ranks=1, budget=11_000).largest
        assert found is not None
        return found.lean

    n = largest(more)
    assert n < largest(drafted)
    assert 0.98 * 11_000 <= more(n, over_data(grown(n), 1)) <= 11_000


@pytest.mark.parametrize(("most", "start", "found"), [(0, 8, 0), (1, 8, 1), (7, 8, 7), (100, 8, 100), (1_000, 1, 992)])
def test_the_largest_length_whose_plan_fits(most: int, start: int, found: int) -> None:
    asked = list[int]()

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= most

    assert largest_planned(fits, start) == found
    assert len(asked) == len(set(asked)) < 20
