"""What a step requires at least is counted, and the same whatever is asked for, in the message and in the table."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.planning.modules.min_memory_plan import leanest_counted
from lightning_amp.planning.modules.plan_module import plan_module
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.recompute.row import RecomputeBlock
from lightning_amp.techniques.table import PREDICTIONS, STRATEGIES
from tests.planning.modules.test_plan_of_a_module import base, profiled, seen

PREDICTED = {"recompute": 2400, "chunk": 2300, "replay": 1200}
"""Bytes with each technique by the prediction; the most of two techniques saves nothing more than the better one."""
COUNTED = {"recompute": 2500, "chunk": 2350, "replay": 4000}
"""By the count: the prediction of replay is far too low, as for layers that work in place."""

SPECS: dict[str, Spec] = {
    "recompute": RecomputeBlock(),
    "chunk": ChunkBlock(budget_bytes=9),
    "replay": STRATEGIES["replay"].specs[-1](ends="1"),
}


@pytest.fixture
def _three_techniques(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, n_bytes in PREDICTED.items():

        def add(
            step: ProfiledStep, draft: Draft, budget: int | None, name: str = name, n_bytes: int = n_bytes
        ) -> Draft:
            rule = Rule(strategy=name, fqn="blocks.0", spec=SPECS[name], why="")
            peak = min(draft.peak_bytes, n_bytes)
            return replace(draft, peak_bytes=peak, seconds=draft.seconds + 1, targets=(*draft.targets, rule))

        monkeypatch.setitem(PREDICTIONS, name, replace(PREDICTIONS[name], add=add, slow=False))


def count(rules: Any) -> ModuleProfile:
    names = [rule.strategy for rule in rules if rule.strategy in COUNTED]
    # the profile's peak is that of what is saved, and 100 bytes
    return profiled(saved=max(COUNTED[name] for name in names) - 100 if names else 4100)


def least(plan: Plan) -> str:
    return next(note for note in plan.notes if "requires at least" in note).partition(" on ")[0]


@pytest.mark.usefixtures("_three_techniques")
@pytest.mark.parametrize("named", [None, ("recompute", "chunk"), ("replay",), ("recompute",)])
def test_the_least_is_counted_and_the_same_whatever_is_asked_for(named: tuple[str, ...] | None) -> None:
    made = plan_module(base(1000), seen(), named=named, count=count)
    assert not made.fits
    assert least(made) == "the step requires at least 2.29 KiB with chunk"
    assert least(plan_module(base(1000), seen(), named=named, count=count)) == least(made)
    # the table says of each technique what was counted, not what was predicted
    assert made.diagnosis is not None
    if named in (None, ("replay",)):
        assert "replay" not in made.diagnosis.helps or "make the peak 3.9" in made.diagnosis.helps["replay"]


@pytest.mark.usefixtures("_three_techniques")
def test_more_ranks_are_named_for_techniques_that_split_something_over_them() -> None:
    # replay would fit by its prediction, on any number of ranks
    made = plan_module(base(2000), seen(), named=("replay",), count=count)
    (said,) = (note for note in made.notes if "requires at least" in note)
    assert "ranks with replay" not in said


@pytest.mark.usefixtures("_three_techniques")
def test_other_techniques_that_fit_on_these_ranks_are_named() -> None:
    made = plan_module(base(2400), seen(), named=("replay",), count=count)
    (said,) = (note for note in made.notes if "requires at least" in note)
    assert said.endswith("2.29 KiB with chunk on 1 rank, which fits: name these techniques in strategies")


def test_a_request_of_more_techniques_requires_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    # predictions of pairs with offload are far too low, and there are more of them than are counted
    def drafted(step: ProfiledStep, names: tuple[str, ...], **_: Any) -> Draft | str:
        if "offload" in names and "offload" not in step.requested:
            return "it is used by name only"
        rules = tuple(Rule(strategy=name, fqn="", spec=SPECS["recompute"], why="") for name in names)
        low = 10 if "offload" in names and len(names) == 2 else 2400 if names == ("recompute",) else 4000
        return Draft(ranks=1, peak_bytes=low, seconds=1, targets=rules)

    monkeypatch.setattr("lightning_amp.planning.modules.min_memory_plan.draft", drafted)
    step = seen()
    requests: tuple[dict[str, Spec], ...] = {}, {"offload": SPECS["recompute"]}
    for more in requests:
        found, _ = leanest_counted(
            step.requesting(more), 1, {}, lambda one: 2500 if one.strategies == ("recompute",) else 9000
        )
        assert found.peak_bytes == 2500


@pytest.mark.usefixtures("_three_techniques")
def test_the_plan_that_is_chosen_where_nothing_fits_is_the_counted_least() -> None:
    made = plan_module(base(1000), seen(), count=count)
    assert (made.strategies, made.predicted_peak_bytes) == (("chunk",), COUNTED["chunk"])
    rows = {row.strategies: (row.peak_bytes, row.verdict) for row in made.candidates}
    assert rows["chunk",] == (COUNTED["chunk"], "chosen")
    assert [verdict for _, verdict in rows.values()].count("chosen") == 1
