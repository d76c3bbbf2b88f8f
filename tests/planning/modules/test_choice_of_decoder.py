"""Claim: of the decoder's plans that fit by a count, the fastest is taken, also where the closed forms are above the
count; and a step is counted again only if that can change the plan."""

from typing import Any

import pytest

from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.costs.profiled_step import TIE
from lightning_amp.lightning.profiling import make_step_plan
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.simulation.parse_shape import parse_shape
from lightning_amp.simulation.plan_of_data import plan_of_shape

DECODER = parse_shape("anchors=200,dim=32,strata=6,batch=16").decoder
AMPLE = 2**40


def planned(budget: int, strategies: str | None = None) -> Plan:
    request = {"device_memory": budget, "strategies": strategies}
    return plan_of_shape(DECODER, request, batch_size=16, rates=CPU_CORE)


@pytest.mark.parametrize("strategies", ["fused,sparse", "sdpa,sparse"])
def test_a_budget_that_is_the_peak_of_a_plan_gets_one_as_fast(strategies: str) -> None:
    """The closed forms are above these counts, so they prefer a leaner plan that is slower by 9 % or more."""
    of_these = planned(AMPLE, strategies)
    found = planned(of_these.predicted_peak_bytes)
    assert found.fits
    assert found.predicted_step_seconds is not None
    assert of_these.predicted_step_seconds is not None
    assert found.predicted_step_seconds <= TIE * of_these.predicted_step_seconds


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rules of every step that is counted."""
    found, count = list[Any](), make_step_plan.on_top_of

    def on_top_of(step: Any, rules: Any, *args: Any, **named: Any) -> Any:
        found.append(rules)
        return count(step, rules, *args, **named)

    monkeypatch.setattr(make_step_plan, "on_top_of", on_top_of)
    return found


@pytest.mark.parametrize(("budget", "counts"), [(AMPLE, 1), (2_600_000, 1), (1, 1)])
def test_no_step_is_counted_whose_peak_cannot_change_the_plan(counted: list[Any], budget: int, counts: int) -> None:
    """Nothing is faster than the first plan, the next faster one than the second is far above, the last is leanest."""
    planned(budget)
    assert len(counted) == counts
