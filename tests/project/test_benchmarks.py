"""Claim: the side-by-side benchmark measures what it says, and notices a wrong gradient."""

from dataclasses import replace

import pytest
import torch

from benchmarks.processes import RunFailed, run_fresh
from benchmarks.side_by_side.__main__ import cases, measured_tables, simulated, wrong
from benchmarks.side_by_side.cases import EAGER, OURS_ALONE, OURS_STRATA, SUBSAMPLE, Case, Size, plan_of
from benchmarks.side_by_side.measure import Measured, measure_all, median_of
from benchmarks.side_by_side.training import Training, share

MIB = 2**20
TINY = Size(anchors=200, strata=3, cells=4, dim=8, window=20)

STRATA_SENDS = 4 * TINY.anchors * TINY.dim + 4 * 4 * sum(TINY.decoder().features)
"""The gradients of the anchors' latents and of the strata's tables."""
SAME = Measured(seconds=1.0, peak_bytes=100 * MIB, loss=0.5, norm=4.0, along=2.0, sent_bytes=1000)


def test_tables_say_what_was_found_and_what_failed():
    found = dict.fromkeys(cases(TINY), SAME)
    failed = Case(size=TINY, method=OURS_STRATA, ranks=2, threads=1)
    found[failed] = "out of luck"
    text = "\n".join(measured_tables(found))
    assert "| eager | 1 | 100 MiB | 1/1.0 | 1.00 s | 1.00 |  | 0e+00 |" in text
    assert f"| {SUBSAMPLE.name} | 1 | 100 MiB | 1/1.0 | 1.00 s | 1.00 |  | not exact |" in text
    assert f"| {OURS_STRATA.name} | 2 | failed: out of luck |" in text
    assert wrong(found) == []


@pytest.mark.parametrize("along", [2.0012, float("nan")])
def test_a_wrong_gradient_is_noticed_and_another_computation_is_not_compared(along):
    off = replace(SAME, along=along)
    found = {case: off if case.method in (OURS_ALONE, SUBSAMPLE) else SAME for case in cases(TINY)}
    assert set(wrong(found)) == {OURS_ALONE.name}


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
    peak, sent = simulated(Case(size=TINY, method=OURS_STRATA, ranks=2))
    assert sent > STRATA_SENDS
    assert peak > 0
    assert simulated(Case(size=TINY, method=OURS_ALONE))[1] == 0


@pytest.mark.exhaustive
@pytest.mark.release
@pytest.mark.ranks
def test_fresh_processes_compute_the_same_as_the_eager_decoder():
    eager = Case(size=TINY, method=EAGER, threads=1)
    training = Training(eager, plan_of(eager), None)
    training.step_before()
    _, loss = training.step()
    norm, along = training.gradient()
    ours = Case(size=TINY, method=OURS_STRATA, ranks=2, threads=1)
    found = measure_all([ours], rounds=1)[ours]
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


def fails(rank, ranks):
    raise ValueError("out of luck")


@pytest.mark.ranks
def test_a_process_that_fails_says_why():
    with pytest.raises(RunFailed, match="ValueError: out of luck"):
        run_fresh(fails, 1)
