"""Claim: strata are compiled where that is asked for by name only, and a plan says so in all that it says."""

import pytest

from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.reports.plan_report import plan_report
from lightning_amp.techniques.hic.rows import CompileStrata, StreamStrata
from tests.planning.profiles import hic, profile, rna

DATA = profile(hic(anchors=1500, strata=6), rna())


def test_a_plan_that_has_it() -> None:
    made = plan(DATA, strategies="S4,fused,sparse,stream,compile")
    assert made.axes.kernels == "compiled"
    assert CompileStrata() in [rule.spec for rule in made.rules]
    assert [rule.spec.workers for rule in made.rules if isinstance(rule.spec, StreamStrata)] == [1]
    assert Plan.from_json(made.to_json()) == made
    text = plan_report(made)
    assert "compile strata" in text
    assert "strata that are not compiled" in text
    as_is = plan(DATA, strategies="S4,fused,sparse,stream")
    assert made.predicted_peak_bytes == as_is.predicted_peak_bytes


@pytest.mark.parametrize("other", ["S2", "S5", "nodes"])
def test_not_beside_what_sends_inside_a_stratum(other: str) -> None:
    with pytest.raises(PlanError, match=f"{other} and compile cannot be together: ranks send"):
        plan(DATA, devices=2, strategies=f"{other},compile")
