"""Claim: `calibrate --links` measures the links between two processes, or between nodes of a run, and keeps them."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_amp.cli.main import main
from lightning_amp.costs.device_rates import CPU_CORE, Rates
from lightning_amp.errors import PlanError
from lightning_amp.simulation import calibrate_links as calibration
from lightning_amp.simulation.calibrate_links import (
    ALL,
    BETWEEN,
    SIZES,
    WITHIN,
    measure_links,
    measured_between,
)
from tests.ranks import run_ranks
from tests.simulation.test_calibrate import SIZES as STEP


def test_links_follow_from_messages_there_and_back() -> None:
    """Two adapters are there where all pairs at once reach twice as much as one; a node's links stay as they were
    where nothing was measured."""

    def of(seconds: float, n_bytes_per_s: float) -> list[float]:
        return [seconds + (n - SIZES[0]) / n_bytes_per_s for n in SIZES]

    found = {"node": 4, WITHIN: [of(1e-4, 8e9)], BETWEEN: [of(2e-4, 1e9)], ALL: [of(3e-4, 0.5e9)] * 4}
    links = calibration.links_of(CPU_CORE.links, found).links
    assert (links.intra_bandwidth, links.inter_bandwidth) == pytest.approx((8e9, 2e9))
    assert (links.latency, links.adapters, links.ranks_per_node) == (2e-4, 2, 4)
    alone = calibration.links_of(CPU_CORE.links, {"node": 2, WITHIN: [of(1e-4, 8e9)]})
    assert alone.links.inter_bandwidth == CPU_CORE.links.inter_bandwidth
    assert "not measured: run it under torchrun on two nodes" in alone.report()
    assert max(map(len, alone.report().splitlines())) <= 80


def on_two_nodes(rank: int, ranks: int) -> dict[str, Any]:
    with patch.dict(os.environ, {"GROUP_RANK": str(rank)}):
        return measured_between(rank, ranks, torch.device("cpu"))


@pytest.mark.ranks
def test_ranks_of_several_nodes_measure_what_lies_between_them(tmp_path: Path) -> None:
    one, other = run_ranks(on_two_nodes, 2, tmp_path)
    assert one == other
    assert set(one) == {"node", BETWEEN, ALL}
    assert one["node"] == 1
    links = calibration.links_of(CPU_CORE.links, one).links
    assert links.ranks_per_node == 1
    assert links.inter_bandwidth > 0


def test_the_command_keeps_what_it_measures(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("lightning_amp.simulation.calibrate.SIZES", {"cpu": STEP})
    monkeypatch.setattr("lightning_amp.simulation.calibrate.SHARE", 0)
    monkeypatch.setattr("lightning_amp.simulation.calibrate.APART", 1e9)
    out = tmp_path / "rates.json"
    assert main(["calibrate", "--links", "--device", "cpu", "--out", str(out), "--format", "json"]) == 0
    said, links = json.loads(capsys.readouterr().out), Rates.read(out).links
    assert said["links"]["links"]["intra_bandwidth"] == links.intra_bandwidth > 0
    assert links.latency != CPU_CORE.links.latency
    assert list(said["links"]["seconds"]) == [WITHIN]


def test_one_gpu_has_no_links(monkeypatch: Any) -> None:
    with pytest.raises(PlanError, match="torch finds 0 of them here; use --device cpu"):
        measure_links(CPU_CORE.links, "cuda")
