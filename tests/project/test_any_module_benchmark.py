"""Claim: benchmarks.any_module counts what a run holds, and reports refusals."""

from typing import Any

import pytest

from benchmarks.any_module.one_run import Wanted, run
from tests.any_module import make


def wanted(**changes: Any) -> Wanted:
    asked: dict[str, Any] = {"name": "wide_mlp", "ranks": 1, "sizes": {"cells": 4}, "strategy": "auto"}
    return Wanted(**asked | changes)


@pytest.mark.exhaustive
@pytest.mark.release
@pytest.mark.ranks
def test_one_run_is_counted_and_timed() -> None:
    one = run(wanted(steps=5))
    assert not one.refused
    # parameters, gradients and Adam's two
    assert one.peak > 4 * sum(p.nbytes for p in make("wide_mlp")[0].parameters())
    assert one.step is not None
    assert run(wanted(steps=5, by_hand=0.5)).peak > 0


@pytest.mark.ranks
def test_a_refusal_is_a_result() -> None:
    assert "S2" in run(wanted(strategy={"strategies": "S2"})).refused
