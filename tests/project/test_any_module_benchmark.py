"""Claim: benchmarks.any_module counts what a run holds, says how far numbers are apart, and reports refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.any_module.budgets import differences, doubled
from benchmarks.any_module.one_run import Wanted, run


def wanted(**changes: Any) -> Wanted:
    asked: dict[str, Any] = {"name": "wide_mlp", "ranks": 1, "sizes": {"cells": 4}, "strategy": "auto"}
    return Wanted(**asked | changes)


@pytest.mark.exhaustive
@pytest.mark.release
def test_one_run_is_counted_and_its_numbers_are_compared(tmp_path: Path) -> None:
    one = run(wanted(double=True), tmp_path)
    other = run(wanted(double=True, by_hand="recompute"), tmp_path)
    assert not one.refused
    found = torch.load(one.numbers[0])
    # parameters, gradients and Adam's two, in float64
    assert one.peak > 4 * sum(p.nbytes for p in found["parameters"].values())
    assert len(found["losses"]) == 3
    assert max(differences(one.numbers, other.numbers)) < 1e-12
    for kind, place in (("gradients", 1), ("parameters", 2)):
        moved = {name: value + (name == "net.0.weight") for name, value in found[kind].items()}
        torch.save(found | {kind: moved}, tmp_path / "moved.pt")
        away = differences((tmp_path / "moved.pt",), one.numbers)
        assert [i for i, share in enumerate(away) if share > 1e-3] == [place]


@pytest.mark.ranks
def test_a_refusal_is_a_result(tmp_path: Path) -> None:
    assert "S2" in run(wanted(strategy={"strategies": "S2"}), tmp_path).refused


def test_numbers_of_ranks_are_put_together(tmp_path: Path) -> None:
    parts = [{"a": torch.ones(2)}, {"b": torch.zeros(1)}]
    for i, part in enumerate(parts):
        torch.save({"losses": [1.0 + i], "gradients": part, "parameters": part}, tmp_path / f"{i}")
    whole = {"a": torch.ones(2), "b": torch.zeros(1)}
    torch.save({"losses": [1.5], "gradients": whole, "parameters": whole}, tmp_path / "whole")
    assert differences((tmp_path / "0", tmp_path / "1"), (tmp_path / "whole",)) == (0.0, 0.0, 0.0)


def test_a_plan_for_float64_has_twice_the_bytes(tmp_path: Path) -> None:
    plan = {
        "rules": [{"spec": {"kind": "ChunkBlock", "budget_bytes": 100}}, {"spec": {"kind": "FullyShard"}}]
    }
    found = json.loads(Path(doubled(plan, tmp_path)).read_text())
    assert found["rules"][0]["spec"]["budget_bytes"] == 200
    assert plan["rules"][0]["spec"]["budget_bytes"] == 100
