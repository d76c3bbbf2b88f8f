"""Claim: the step of a decoder that the ranks of a model axis split is predicted to the byte, of the fullest rank; and
offline as in the fit, without other ranks."""

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp.lightning.profiling import step_of_ranks
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.sharding.splits import DryAxis
from tests.lightning.profiling.test_within_budget import Decoding
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.ranks import run_ranks
from tests.techniques.recompute.test_beside_decoder import Run
from tests.techniques.sharded_cases import Case, inputs

SOME = "S4,strata,stream", "nodes,S3,S4,recompute", "S2,S4,S5,sparse"
ALL = (*SOME, "S1,S2", "S3,S5", "S2,S4,offload")
UNEVEN = Case(anchors=83, dim=14, window=20, distances=(0, 1, 2), features={1: 40, 2: 3})
STEPS = 4


def by_name(rank: int, ranks: int, case: Case, names: tuple[str, ...]) -> list[tuple[Plan, int]]:
    """The plans of runs by names of strategies, and the bytes of this rank."""
    found = []
    for asked in names:
        strategy, meter = AMPStrategy(strategies=asked, model_parallel_size=ranks), Decoding()
        trainer = trainer_of(strategy, rank=rank, ranks=ranks, max_steps=STEPS, callbacks=[meter])
        trainer.fit(Run(case), DataLoader([inputs(case)[2]] * STEPS, batch_size=None))  # type: ignore[arg-type]
        assert strategy.plan is not None
        found.append((strategy.plan, meter.live.peak))
    return found


def offline(case: Case, **request: Any) -> Plan:
    ranks = {"devices": 2, "model_parallel_size": 2} | request
    found: Plan = lightning_amp.plan(Run(case), inputs(case)[2], **ranks).plan
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "names"),
    [
        (Case(), SOME),
        pytest.param(Case(), ALL[3:], marks=pytest.mark.full),
        pytest.param(UNEVEN, ALL, marks=pytest.mark.full),
    ],
)
def test_the_largest_of_the_ranks_is_predicted(tmp_path: Path, case: Case, names: tuple[str, ...]) -> None:
    for asked, first, second in zip(names, *run_ranks(by_name, 2, tmp_path, case, names, timeout=200), strict=True):
        plan, _ = first
        assert plan.predicted_peak_bytes == max(first[1], second[1]), asked
        alone = offline(case, strategies=asked)
        assert alone.rules == plan.rules
        assert alone.predicted_peak_bytes == plan.predicted_peak_bytes


def test_a_budget_is_held_to_the_byte() -> None:
    peak = offline(Case(), strategies="S1,strata").predicted_peak_bytes
    assert offline(Case(), strategies="S1,strata", device_memory=f"{peak}B").fits
    assert offline(Case(), strategies="S1,strata", device_memory=f"{peak - 1}B").fits is False


@pytest.mark.parametrize(("strategy", "unlike"), [("S5", 1), ("S2", 2), ("strata", 2), ("nodes", 2)])
def test_ranks_with_shares_of_equal_size_are_counted_once(strategy: str, unlike: int) -> None:
    rules = [rule for rule in offline(Case(), strategies=f"S1,{strategy}").rules if rule.strategy == strategy]
    found = step_of_ranks.alike_ranks(Run(Case()), rules, [DryAxis(2, rank) for rank in range(2)])
    assert len(found) == unlike


def test_what_was_not_counted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = offline(Case(), strategies="S1,S2")
    assert any("is that of rank 0 of the model axis, the largest of 2" in note for note in plan.notes)
    monkeypatch.setattr(step_of_ranks, "KEPT", 1)
    monkeypatch.setattr(step_of_ranks, "MOST", 2)
    plan = offline(Case(), devices=3, model_parallel_size=3, strategies="S1,strata")
    assert any("the 1 fullest of these ranks were counted" in note for note in plan.notes)
    assert any("of 3 ranks of the model axis 2 were compared" in note for note in plan.notes)
