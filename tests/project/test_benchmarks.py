"""Claim: the side-by-side benchmark measures what it says, and notices a wrong gradient."""

from dataclasses import replace

import pytest

from benchmarks.side_by_side.__main__ import cases, wrong
from benchmarks.side_by_side.cases import EAGER, OURS_ALONE, OURS_STRATA, SUBSAMPLE, Case, Size, plan_of
from benchmarks.side_by_side.measure import Measured, measure_all
from benchmarks.side_by_side.training import Training

MIB = 2**20
TINY = Size(anchors=200, strata=3, cells=4, dim=8, window=20)

STRATA_SENDS = 4 * TINY.anchors * TINY.dim + 4 * 4 * sum(TINY.decoder().features)
"""The gradients of the anchors' latents and of the strata's tables."""
SAME = Measured(seconds=1.0, peak_bytes=100 * MIB, loss=0.5, norm=4.0, along=2.0, sent_bytes=1000)


@pytest.mark.parametrize("along", [2.0012, float("nan")])
def test_a_wrong_gradient_is_noticed_and_another_computation_is_not_compared(along):
    off = replace(SAME, along=along)
    found = {case: off if case.method in (OURS_ALONE, SUBSAMPLE) else SAME for case in cases(TINY)}
    assert set(wrong(found)) == {OURS_ALONE.name}


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
