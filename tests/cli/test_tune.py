"""Claim: `tune` trains under the plans that fit and are predicted to be fastest, and writes the one that is fastest."""

import argparse
from math import inf
from pathlib import Path
from typing import Any

import pytest

from lightning_amp.cli.commands import tune
from lightning_amp.cli.main import main
from lightning_amp.planning.plan.plan import Plan
from tests.cli.test_plan_configuration import IGNORED, written_for_processes

pytestmark = IGNORED


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    config = written_for_processes(tmp_path, monkeypatch, "deep_to_tune")
    return ["tune", "--config", config, "--devices", "1", "--out", str(tmp_path / "plan.json")]


def test_the_fastest_plan_is_found_by_training(words: list[str], capsys: Any, monkeypatch: Any) -> None:
    measured = {(): 3.0, ("recompute",): 1.0}
    tried = list[Plan]()

    def run(made: Plan, arguments: argparse.Namespace) -> tuple[float, str]:
        tried.append(made)
        seconds = measured.get(_names(made))
        return (inf, "fails: out of memory") if seconds is None else (seconds, "")

    monkeypatch.setattr(tune, "_measured", run)
    assert main([*words, "--plans", "9"]) == 0
    text = capsys.readouterr().out
    assert {("recompute",), ()} < {*map(_names, tried)}
    assert "none on 1 x 1 " in text
    assert "fails: out of memory" in text
    assert _names(Plan.read(words[-1])) == ("recompute",)
    # a budget leaves out what does not fit, and one plan is tried: the fastest that does
    tried.clear()
    assert main([*words, "--overwrite", "--plans", "1", "--device-memory", "2800KiB"]) == 0
    assert [plan.fits for plan in tried] == [True]
    measured.clear()
    assert main([*words, "--overwrite"]) == 2
    assert "no plan could be trained with" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--plans", "0"]) == 2
    assert "leaves nothing to compare" in capsys.readouterr().err


def _names(plan: Plan) -> tuple[str, ...]:
    # requested techniques always contain S1
    return tuple(name for name in plan.strategies if name != "S1")


@pytest.mark.long
def test_steps_are_trained(words: list[str], capsys: Any) -> None:
    assert main([*words, "--plans", "1", "--steps", "3"]) == 0
    assert " ms" in capsys.readouterr().out
    assert Plan.read(words[-1]).mesh.ranks == 1
