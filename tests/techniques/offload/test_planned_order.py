"""A step that saves other tensors than its count while some wait on the host is told once; it stays exact."""

import re
from dataclasses import replace
from typing import Any

import pytest

from lightning_amp import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from tests.techniques.replay.models import difference
from tests.techniques.replay.test_planned_operators import trained


@pytest.mark.parametrize(("kind", "said"), [
    ("counter", r"number \d+, where the step saves 4096 bytes, and the count nothing more"), ("once", ""), ("", ""),
])  # fmt: skip
def test_a_step_that_saves_other_tensors_than_its_count_is_told_once(
    kind: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, _ = trained(kind, "auto", monkeypatch)
    module, plan, found = trained(kind, AMPStrategy(strategies="offload"), monkeypatch)
    assert "offload" in plan.strategies
    assert len(found) == bool(said)
    assert all(re.search(said, one) for one in found)
    assert difference(plain, module) == 0.0


def test_only_batches_as_large_as_the_counted_one_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan, _ = trained("", AMPStrategy(strategies="offload"), monkeypatch, steps=1)
    assert trained("", AMPStrategy(plan=plan), monkeypatch)[2] == []
    (spec,) = (one.spec for one in plan.rules if one.strategy == "offload")
    assert spec.batch_bytes == 64 * 16 * 4
    other = replace(plan, rules=tuple(_with(rule, batch_bytes=1) for rule in plan.rules))
    assert trained("counter", AMPStrategy(plan=other), monkeypatch)[2] == []


def _with(rule: Any, **changed: Any) -> Any:
    return replace(rule, spec=replace(rule.spec, **changed)) if rule.strategy == "offload" else rule


def test_a_plan_of_an_earlier_version_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan, _ = trained("", AMPStrategy(strategies="offload"), monkeypatch, steps=1)
    older = re.sub(r',\s*"saves": "[^"]*",\s*"batch_bytes": \d+', "", plan.to_json())
    (found,) = (one.spec for one in Plan.from_json(older).rules if one.strategy == "offload")
    assert (found.saves, found.batch_bytes) == ("", 0)
    assert trained("counter", AMPStrategy(plan=Plan.from_json(older)), monkeypatch)[2] == []
