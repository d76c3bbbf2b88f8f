"""Claim: the examples of other modalities than Hi-C raise their signals, are planned within a budget, and train."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_amp
from lightning_amp.diagnosis import FROM_OUTSIDE
from lightning_amp.techniques.table import STRATEGIES
from tests.paths import EXAMPLES


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Any]]:
    """Imports an example for the first time; what it registers is forgotten after the test."""

    def imported(folder: str, name: str) -> Any:
        monkeypatch.syspath_prepend(EXAMPLES / folder)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return import_module(name)

    tables: tuple[dict[str, Any], ...] = (STRATEGIES, FROM_OUTSIDE)
    before = [dict(table) for table in tables]
    yield imported
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


@pytest.mark.long
def test_peaks_are_planned_with_their_own_technique_and_train(load: Any, tmp_path: Path) -> None:
    example = load("atac", "peaks")
    trainer = example.train(tmp_path, peaks=20_000, budget="36MiB")
    plan = trainer.strategy.plan
    assert plan.strategies == ("chunk", "S7")
    assert plan.fits
    assert any("SPARSE_PEAKS" in line and "20,000 peaks, 40 x" in line for line in plan.evidence)
    assert [rule.fqn for rule in plan.rules if rule.spec == example.OpenPeaks()] == ["first"]
    assert trainer.global_step == 8
    assert trainer.callback_metrics["loss"].isfinite()
    plain, x = torch.nn.Linear(30, 4).double(), torch.eye(30, dtype=torch.float64)[::3]
    found = [
        (layer(x), *torch.autograd.grad(layer(x).square().sum(), (plain.weight, plain.bias)))
        for layer in (plain, example.install(plain, example.OpenPeaks(), None))
    ]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.long
def test_a_grid_of_spots_is_planned_though_its_modality_is_not_known(load: Any, tmp_path: Path) -> None:
    trainer = load("spatial", "grid").train(tmp_path, side=24, budget="11MiB")
    plan = trainer.strategy.plan
    assert plan.fits
    assert {*plan.strategies} & {"recompute", "chunk", "replay"}
    raised = "LARGE_GRID: 13,824 spots a sample (24 x 24 x 24) for 4 genes (from 100 for a gene)"
    assert raised in plan.evidence
    assert trainer.callback_metrics["loss"] < 0.5
    found = lightning_amp.profile(tmp_path / "data")
    assert (found.modalities, found.unread) == ((), ("spatial/spatial_raw.h5ad",))
    assert lightning_amp.diagnose(found).signals == ("LARGE_GRID",)
