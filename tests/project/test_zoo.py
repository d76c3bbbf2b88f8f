"""Claim: the zoo has more than 200 models, needs none of their packages until they run, and counts what it finds.

Two of its models, whose packages are those of the tests, are trained under half of their bytes.
"""

import ast
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.offload.__main__ import WAYS_OF_ZOO, ZOO, row
from benchmarks.offload.__main__ import fit as fit_on_host
from benchmarks.zoo import table
from benchmarks.zoo.__main__ import in_a_child
from benchmarks.zoo.cases import CASES, PREDICTED, QUICK
from benchmarks.zoo.offline import differing
from benchmarks.zoo.one_run import Fit, difference, fits_of
from tests.paths import ROOT

FILES = sorted((ROOT / "benchmarks" / "zoo").glob("*.py"))


def test_the_zoo_is_large() -> None:
    assert len(CASES) >= 200
    assert len({case.package for case in CASES.values()}) >= 10
    assert {*QUICK, *PREDICTED} <= CASES.keys()
    assert {CASES[name].package for name in QUICK} == {case.package for case in CASES.values()}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_package_is_imported_when_its_model_is_made(file: Path) -> None:
    packages = {case.package for case in CASES.values()} - {"torch"}
    top = [part for part in ast.parse(file.read_text()).body if isinstance(part, ast.Import | ast.ImportFrom)]
    names = {name for part in top for name in ([a.name for a in part.names] + [getattr(part, "module", None) or ""])}
    assert not {name.partition(".")[0] for name in names} & packages


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK[:2])
def test_a_model_trains_under_half_of_its_bytes(name: str) -> None:
    plain, half = fits_of(CASES[name], "SGD", torch.float64, ("plain", "50%"))
    assert plain["held"] < 0.4 * plain["measured"], "activations are most of it"
    assert table.verdict(half, {}) in ("bit by bit", "to rounding"), half
    assert half["predicted"] == pytest.approx(half["measured"], rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK[:2])
def test_a_model_trains_bit_by_bit_with_activations_on_the_host(name: str) -> None:
    plain = fit_on_host(ZOO[name], "auto")
    for techniques, bound in WAYS_OF_ZOO:
        budget = int(0.75 * plain[1].live.peak) if bound else None
        *_, predicted, measured, share, on_host, measured_there, moved, n, apart = row(
            ZOO[name], techniques, budget, plain
        )
        assert (predicted, on_host, apart) == (measured, measured_there, "0")
        assert int(share.rstrip("%")) <= 75
        assert int(n) > 0
        assert moved == on_host


def fit(**changes: Any) -> dict[str, Any]:
    found = {"budget": 100, "plan": ["replay"], "predicted": 90, "measured": 90, "step": 2.0, "planning": 1.0}
    return found | {"difference": 0.0, "draws": True} | changes


REFUSED = {"budget": 100, "refused": "DoesNotFitError: predicted to need 12 MiB; the step is large", "planning": 1.0}


@pytest.mark.parametrize(
    ("record", "by_hand", "says"),
    [
        (fit(), 120, "bit by bit"),
        (fit(difference=1e-14), 120, "to rounding"),
        (fit(difference=1e-3), 120, "wrong"),
        (fit(difference=float("nan")), 120, "wrong"),
        (fit(draws=False), 120, "wrong"),
        (fit(draws=False, run="Adam, float32", difference=1e-3), 120, "to rounding"),
        ({"equal": False, "difference": 9e-8}, 120, "wrong"),
        ({"equal": False, "difference": 9e-8, "float32": True}, 120, "to rounding"),
        ({"equal": False, "difference": 1e-4, "float32": True}, 120, "wrong"),
        (fit(measured=101), 120, "over budget"),
        (fit(measured=101, budget=None), 120, "bit by bit"),
        (REFUSED, 120, "refused with the reason"),
        (REFUSED, 100, "refused although checkpointing by hand fits"),
        ({"budget": 100, "crashed": "KeyError: 'x'"}, 120, "crashed"),
        ({"kind": table.HAND, "crashed": "KeyError: 'x'"}, 120, "does not run"),
    ],
)
def test_how_a_fit_is_counted(record: dict[str, Any], by_hand: int, says: str) -> None:
    assert table.verdict(record, {table.HAND: {"measured": by_hand}}) == says


def trained(bias: float) -> Fit:
    tensors = {"weight": torch.ones(2, dtype=torch.float64), "bias": torch.full((2,), bias, dtype=torch.float64)}
    return Fit(tensors, [1.0], [], 0, 0.0, 0.0, None)


def test_a_bias_that_a_norm_takes_away_is_no_difference() -> None:
    # its gradient is 0 but for rounding, and so is what it is after a few steps
    assert difference(trained(2e-20), trained(1e-20)) < table.ROUNDING
    assert difference(trained(2e-8), trained(1e-8)) > table.ROUNDING
    assert difference(trained(1.1), trained(1.0)) == pytest.approx(0.1)
    assert difference(trained(float("nan")), trained(1.0)) == float("inf")


def test_rounding_of_a_network_that_computes_in_float32() -> None:
    runs = {"plain": {"float32": True}}
    assert table.verdict(fit(difference=1e-7), runs) == "to rounding"
    assert table.verdict(fit(difference=1e-4), runs) == table.verdict(fit(difference=1e-7), {}) == "wrong"


def test_errors_of_predictions() -> None:
    records = [fit(predicted=100, measured=100)] * 18 + [
        fit(predicted=98, measured=100),
        fit(predicted=110, measured=100),
    ]
    records[0] = fit(predicted=100, measured=101)
    found = {("a", table.MAIN): {str(k): record for k, record in enumerate(records)}}
    head, _, all_fits, *_ = table.errors(found)
    assert head.startswith("| fits | n | median | 95th percentile |")
    assert all_fits == "| all | 20 | 0.00% | 10.00% | 1 (5.0%) | 1 |"


def test_a_refusal_is_shown_with_its_way_out() -> None:
    said = (
        "predicted to run out of memory in the step: 2.25 MiB per rank of 2.17 MiB; the step requires at least 2.25 MiB"
        " with replay on 1 rank; 2 ranks with fsdp and recompute would fit"
    )
    record = {"refused": f"DoesNotFitError: {said}. Nothing was trained: AMPStrategy(on_predicted_oom='warn')"}
    assert table.reason(record) == said.replace("2.25 MiB", "N").replace("2.17 MiB", "N")


def test_a_plan_without_a_run_that_differs_from_that_of_the_fit_is_told() -> None:
    plan = {"techniques": ("recompute",), "peak": 5}
    assert differing(plan, dict(plan)) == []
    assert differing(plan, plan | {"peak": 6}) == ["peak: 5, in the fit 6"]
    assert len(differing(plan, {"error": "PlanError: no"})) == 3
    assert differing({"error": "PlanError: no"}, {"error": "PlanError: none"}) == []


def test_the_page_of_claims_has_the_counts_of_the_zoo() -> None:
    reports = ROOT / "docs" / "reports"
    found = table.latest(one for one in table.read(reports / "zoo.jsonl") if one["model"] in CASES)
    fits = [(one, runs) for (_, run), runs in found.items() if run == table.MAIN for one in table.fits(runs).values()]
    says = [table.verdict(one, runs) for one, runs in fits]
    exact, refused = sum(one in ("bit by bit", "to rounding") for one in says), sum("refused" in one for one in says)
    assert f"| {exact} of {len(says)} fits exact, {refused} refused |" in (reports / "index.md").read_text()
    models = sum(run == table.MAIN for _, run in found)
    assert f"{models} of {len(CASES)} models, of " in (reports / "zoo.md").read_text()


def test_a_later_run_of_a_model_takes_the_place_of_an_earlier_one() -> None:
    of = {"model": "a", "run": table.MAIN}
    first = [of | {"kind": kind, "n": 1} for kind in ("plain", "75%", table.END)]
    found = table.latest(first)["a", table.MAIN]
    assert list(found) == ["plain", "75%", table.END]
    found = table.latest([*first, of | {"kind": "75%", "n": 2}])["a", table.MAIN]
    assert {kind: record["n"] for kind, record in found.items()} == {"plain": 1, "75%": 2}


def a_second_of_waiting() -> Iterator[dict[str, Any]]:
    time.sleep(2)
    yield {"kind": "plain"}


def no_end_of_work() -> Iterator[dict[str, Any]]:
    yield {"kind": "plain"}
    while True:
        pass


def test_a_model_is_ended_by_its_own_seconds_and_not_those_of_other_work() -> None:
    # on a machine with other work most of a model's minutes are spent waiting for a processor
    assert list(in_a_child(a_second_of_waiting, 1)) == [{"kind": "plain"}]
    ended = {"kind": table.END, "ended": "not finished in 1 s of the processor"}
    assert list(in_a_child(no_end_of_work, 1)) == [{"kind": "plain"}, ended]
