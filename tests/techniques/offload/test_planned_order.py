"""A step that saves other tensors than its count while some wait on the host is warned of once; it stays exact."""

import re
from dataclasses import replace

import pytest

from lightning_amp import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.checks.planned_order import as_text, lines_in
from tests.techniques.replay.models import difference
from tests.techniques.replay.test_planned_operators import trained


@pytest.mark.parametrize(("kind", "said"), [
    ("counter", r"number \d+, where the step saves 4096 bytes, and the count nothing more"), ("once", ""), ("", ""),
])  # fmt: skip
def test_a_step_that_saves_other_tensors_than_its_count_is_warned_of_once(
    kind: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, _ = trained(kind, "auto", monkeypatch)
    module, plan, found = trained(kind, AMPStrategy(strategies="offload"), monkeypatch)
    assert "offload" in plan.strategies
    assert len(found) == bool(said)
    assert all(re.search(said, one) for one in found)
    assert difference(plain, module) == 0.0


def test_only_batches_of_the_counted_shapes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan, _ = trained("", AMPStrategy(strategies="offload"), monkeypatch, steps=1)
    (spec,) = (one.spec for one in plan.rules if one.strategy == "offload")
    shapes, *order = lines_in(spec.saves)
    # the last number is the bytes of an element
    assert shapes == "64x16x4"
    for counted, n_said in (((64, 16, 4), 1), ((32, 32, 4), 0)):
        other = replace(spec, saves=as_text([counted], order))
        rules = tuple(replace(one, spec=other) if one.strategy == "offload" else one for one in plan.rules)
        assert len(trained("counter", AMPStrategy(plan=replace(plan, rules=rules)), monkeypatch)[2]) == n_said


def test_a_plan_of_an_earlier_version_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan, _ = trained("", AMPStrategy(strategies="offload"), monkeypatch, steps=1)
    older = re.sub(r',\s*"saves": "[^"]*"', "", plan.to_json())
    (found,) = (one.spec for one in Plan.from_json(older).rules if one.strategy == "offload")
    assert found.saves == ""
    assert trained("counter", AMPStrategy(plan=Plan.from_json(older)), monkeypatch)[2] == []
