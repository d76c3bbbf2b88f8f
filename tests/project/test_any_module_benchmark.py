"""Claim: benchmarks.any_module counts what a run holds, says how far parameters are apart, and reports refusals."""

from pathlib import Path

import pytest
import torch

from benchmarks import any_module


@pytest.mark.exhaustive
def test_one_run_is_counted_and_its_parameters_are_compared(tmp_path: Path) -> None:
    wanted = {"folder": tmp_path, "ranks": 1, "sizes": {"cells": 4}, "double": True}
    one = any_module.run("wide_mlp", strategy="auto", meter=True, **wanted)
    other = any_module.run("wide_mlp", strategy="auto", by_hand="recompute", **wanted)
    assert not one["refused"]
    weights = torch.load(one["parameters"])
    # parameters, gradients and Adam's two, in float64
    assert one["peak"] > 4 * sum(p.nbytes for p in weights.values())
    assert any_module.difference(one["parameters"], other["parameters"]) < 1e-12
    weights["net.0.weight"] += 1.0
    torch.save(weights, tmp_path / "moved.pt")
    assert any_module.difference(tmp_path / "moved.pt", one["parameters"]) > 0.1


@pytest.mark.long
def test_a_refusal_is_a_result(tmp_path: Path) -> None:
    wanted = {"strategies": "S2"}
    got = any_module.run("wide_mlp", strategy=wanted, folder=tmp_path, ranks=1, sizes={"cells": 4})
    assert "S2" in got["refused"]


@pytest.mark.parametrize(("by_hand", "lines"), [(None, 0), ("recompute", 3), ("fsdp2", 8), ("both", 11)])
def test_lines_that_a_person_writes_are_counted(by_hand: str | None, lines: int) -> None:
    assert any_module.lines_of(by_hand) == lines
