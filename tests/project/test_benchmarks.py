"""Claim: the side-by-side benchmark measures what it says, notices a wrong gradient, and has a case for every goal."""

from dataclasses import replace

import pytest
import torch

from benchmarks.page import empty_part
from benchmarks.side_by_side.__main__ import show
from benchmarks.side_by_side.cases import EAGER, OURS_ALONE, OURS_STRATA, SUBSAMPLE, Case, Size
from benchmarks.side_by_side.fresh_process import CaseFailed, Measured, measure_all, median_of, run_ranks
from benchmarks.side_by_side.goals import Results, goals
from benchmarks.side_by_side.pictures import draw_all
from benchmarks.side_by_side.plans import plan_of
from benchmarks.side_by_side.report import document
from benchmarks.side_by_side.simulated import Simulated, simulate_case
from benchmarks.side_by_side.suite import FULL, QUICK
from benchmarks.side_by_side.training import Training, share

MIB = 2**20
TINY = Size(anchors=200, strata=3, cells=4, dim=8, window=20)

STRATA_SENDS = 4 * TINY.anchors * TINY.dim + 4 * 4 * sum(TINY.decoder().features)
"""The gradients of the anchors' latents and of the strata's tables."""


def measured(seconds=1.0, peak_bytes=100 * MIB, along=2.0):
    return Measured(seconds=seconds, peak_bytes=peak_bytes, loss=0.5, norm=4.0, along=along, sent_bytes=1000)


def results(suite, ours=None, simulated=None):
    """Everything was found to be the same, but for what ours took."""
    found = {
        case: ours if ours and "ours" in case.method.name else measured() for case, _ in suite.measured()
    }
    simulated = simulated or Simulated(peak_bytes=2**30, decoder_bytes=10, sent_bytes=1000)
    return Results(
        suite=suite,
        measured=found,
        simulated=dict.fromkeys(suite.simulations(), simulated),
        matmul_rate={1: 1e9, 2: 2e9},
        flops={case.size: 10**9 for case in found},
    )


def test_every_goal_has_its_cases_in_a_full_run():
    assert {goal.answer for goal in goals(results(FULL))} <= {"yes", "**no**"}
    left_out = [goal.what for goal in goals(results(QUICK)) if goal.reached is None]
    assert len(left_out) == 2
    assert "really run" in left_out[0]
    assert "N 1,000,000" in left_out[1]


def test_goals_are_reached_from_their_targets_on():
    same = {goal.what for goal in goals(results(FULL)) if goal.reached}
    assert len(same) == 3, same
    better = goals(results(FULL, ours=measured(seconds=0.2, peak_bytes=100 * MIB / 12)))
    gained = {goal.what for goal in better if goal.reached} - same
    assert len(gained) == 4
    assert all("against the eager decoder" in what for what in gained)
    worse = goals(results(FULL, simulated=Simulated(peak_bytes=2**30 + 1, decoder_bytes=1, sent_bytes=1)))
    assert not worse[0].reached
    assert show(worse[0]).startswith("     no  N 113,505, K 32, B 1, one device")


def test_what_failed_is_told_and_no_goal_is_claimed(tmp_path):
    found = results(QUICK)
    failed = dict.fromkeys(found.measured, "out of luck")
    broken = replace(found, measured=failed, simulated=dict.fromkeys(found.simulated, "no memory"))
    assert {goal.reached for goal in goals(broken)} == {None}
    draw_all(tmp_path, broken)
    text = document(broken, quick=True)
    assert "failed: out of luck" in text
    assert "failed: no memory" in text


def test_document_and_pictures(tmp_path):
    draw_all(tmp_path, results(FULL))
    text = document(results(FULL), quick=False)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 4
    assert all(f"]({name})" in text for name in names)
    assert f"| {SUBSAMPLE.name} | 100 MiB | 1/1.0 | 1.00 s | 1.00 |  | not exact |" in text
    assert "| eager | 100 MiB | 1/1.0 | 1.00 s | 1.00 | 50 % | 0e+00 |" in text
    assert "\n".join(empty_part("whole_step")) in text, "what another command writes is put there"
    assert "These are the small sizes" not in text
    assert "These are the small sizes" in document(results(QUICK), quick=True)


def test_a_wrong_gradient_is_noticed_and_another_computation_is_not_compared():
    found = results(QUICK, ours=measured(along=2.0012))
    wrong = {case.method.name for case in found.wrong()}
    assert OURS_ALONE.name in wrong
    assert EAGER.name not in wrong
    other = QUICK.alone(QUICK.base, SUBSAMPLE)
    strange = replace(found, measured={**found.measured, other: measured(along=9.0)})
    assert other not in strange.wrong()
    assert "**wrong** 3e-04" in document(found, quick=True)


def test_slowest_rank_counts_and_the_median_of_rounds():
    def rank(*seconds, peak=1, loss=1.0):
        return {
            "seconds": list(seconds),
            "peak_bytes": peak,
            "loss": loss,
            "norm": 1.0,
            "along": 1.0,
            "sent_bytes": peak,
        }

    rounds = [
        [rank(1.0, 5.0, peak=3, loss=2.0), rank(2.0, 1.0, peak=4, loss=4.0)],
        [rank(3.0, 3.0, peak=8), rank(1.0, 1.0)],
    ]
    found = median_of(rounds)
    assert (found.seconds, found.peak_bytes, found.loss, found.sent_bytes) == (3.0, 6.0, 3.0, 4)


def test_simulated_case_counts_the_last_rank_too():
    found = simulate_case(Case(size=TINY, method=OURS_STRATA, ranks=2))
    alone = simulate_case(Case(size=TINY, method=OURS_ALONE))
    assert found.sent_bytes > STRATA_SENDS
    assert alone.sent_bytes == 0
    assert 0 < alone.decoder_bytes < alone.peak_bytes


@pytest.mark.exhaustive
@pytest.mark.release
def test_fresh_processes_compute_the_same_as_the_eager_decoder():
    eager = Case(size=TINY, method=EAGER, threads=1)
    training = Training(eager, plan_of(eager), None)
    training.step_before()
    _, loss = training.step()
    norm, along = training.gradient()
    ours = Case(size=TINY, method=OURS_STRATA, ranks=2, threads=1, steps=1)
    found = measure_all([(ours, 1)])[ours]
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.norm == pytest.approx(norm, rel=1e-4)
    assert found.along == pytest.approx(along, abs=1e-4 * norm)
    assert found.seconds > 0
    assert found.peak_bytes > 0
    assert found.sent_bytes > STRATA_SENDS


def test_ranks_share_the_cells():
    batch = {"x": torch.arange(10).view(5, 2), "batch": torch.arange(5)}
    shares = [share(batch, rank, 2) for rank in range(2)]
    for name, rows in batch.items():
        assert sorted(torch.cat([own[name] for own in shares]).tolist()) == rows.tolist()


@pytest.mark.exhaustive
@pytest.mark.release
@pytest.mark.ranks
def test_a_process_that_fails_says_why():
    with pytest.raises(CaseFailed, match="PlanError: the plan has schema"):
        run_ranks(Case(size=TINY, method=EAGER), "{}")
