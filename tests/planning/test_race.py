"""Claim: a race finds the fastest of the plans that may run, in few steps, and changes nothing where none is faster."""

from collections.abc import Callable, Collection
from itertools import product
from random import Random

import pytest

from lightning_amp.planning.plan.strategies import in_order
from lightning_amp.planning.policies.race import LEVEL, TIMED, WARM_UP, Result, Strategies, race
from tests.each import each

AXES = (((), ("recompute",), ("stream",)), ((), ("fused",), ("sdpa",)), ((), ("sparse",)), ((), ("S4",)))
ALL = [in_order(frozenset(("S1",)).union(*parts)) for parts in product(*AXES)]


def run(
    first: Strategies, entered: Collection[Strategies], seconds: Callable[[Strategies], float]
) -> tuple[Result, list[Strategies]]:
    """The result, and who ran in every step."""
    steps = race(first, entered)
    ran = [next(steps)]
    while True:
        try:
            ran.append(steps.send(seconds(ran[-1])))
        except StopIteration as end:
            return end.value, ran


def costs(seed: int) -> dict[Strategies, float]:
    """Seconds of every plan, a factor for each strategy."""
    random = Random(seed)
    factors = {name: random.uniform(0.6, 1.6) for axis in AXES for choice in axis for name in choice}
    found = dict.fromkeys(ALL, 1.0)
    for plan in ALL:
        for name in plan:
            found[plan] *= factors.get(name, 1.0)
    return found


@each(seed=range(50))
def test_finds_the_fastest_where_strategies_do_not_depend_on_each_other(seed: int) -> None:
    seconds = costs(seed)
    first = ALL[seed % len(ALL)]
    result, ran = run(first, ALL, seconds.__getitem__)
    # each axis may leave what is faster by less than LEVEL
    assert seconds[result.winner] <= LEVEL ** len(AXES) * min(seconds.values())
    assert result.seconds == {plan: seconds[plan] for plan in result.seconds}
    assert len(ran) <= (1 + 2 + 4) * (WARM_UP + TIMED)


@each(seed=range(20))
def test_who_may_not_run_does_not(seed: int) -> None:
    seconds, random = costs(seed), Random(seed)
    first = ALL[-1]
    entered = {first, *random.sample(ALL, 8)}
    result, ran = run(first, entered, seconds.__getitem__)
    assert set(ran) <= entered
    assert set(result.seconds) <= entered
    assert seconds[result.winner] <= seconds[first]


def test_a_race_of_one_is_one_lap() -> None:
    result, ran = run(("S1",), [("S1",)], lambda plan: 1.0)
    assert result == Result(("S1",), {("S1",): 1.0})
    assert len(ran) == WARM_UP + TIMED


def test_what_is_level_leads_on_and_what_is_far_behind_stops_early() -> None:
    first = ("S1", "S4")
    result, ran = run(first, ALL, lambda plan: 0.995 if len(plan) == 1 else 1.0)
    assert result.winner == first
    _, ran = run(first, ALL, lambda plan: 1.0 if plan == first else 9.0)
    assert {ran.count(plan) for plan in set(ran) - {first}} == {WARM_UP + 1}


def test_the_least_of_a_lap_counts_and_its_first_steps_do_not() -> None:
    first, seen = ("S1",), list[Strategies]()

    def seconds(plan: Strategies) -> float:
        seen.append(plan)
        # slow while it warms up, and disturbed once
        disturbed = seen.count(plan) <= WARM_UP or seen.count(plan) == WARM_UP + 1
        return (1.2 if disturbed else 1.0) * (0.9 if "stream" in plan else 1.0)

    result, _ = run(first, [first, ("S1", "stream")], seconds)
    assert result.winner == ("S1", "stream")
    assert result.seconds == pytest.approx({first: 1.0, ("S1", "stream"): 0.9})
