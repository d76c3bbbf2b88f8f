"""Claim: `calibrate --links` measures the links between two processes, or between nodes of a run, and keeps them."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch

from lightning_amp.cli.main import main
from lightning_amp.costs.device_rates import BETWEEN, CPU_CORE, WITHIN, Kind, Rates, collective_seconds
from lightning_amp.errors import PlanError
from lightning_amp.simulation import calibrate_links as calibration
from lightning_amp.simulation.calibrate_links import ALL, COLLECTIVES, SIZES, measure_links, measured_between
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


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_plan_takes_what_was_measured_of_a_collective(kind: Kind) -> None:
    """Four ranks of a node, two nodes; other groups of the same axes by the same start and share, others as before."""
    of_axis = {WITHIN: [4, [4e-3 + n / 1e8 for n in SIZES]], BETWEEN: [2, [6e-3 + n / 1e7 for n in SIZES]]}
    found = {"node": 4, COLLECTIVES: {axis: {kind: pair} for axis, pair in of_axis.items()}}
    messages = {WITHIN: [[1e-4] * 3 + [2e-3]], BETWEEN: [[2e-4] * 3 + [3e-2]], ALL: [[3e-4] * 3 + [1e-1]]}
    links = calibration.links_of(CPU_CORE.links, found | messages).links
    for (ranks, by_size), inner in zip(of_axis.values(), (1, 4), strict=True):
        for size, seconds in zip(SIZES, by_size, strict=True):
            predicted = collective_seconds(kind, size, ranks, links, inner=inner)
            assert predicted == pytest.approx(seconds, rel=1e-3)
    others = [one for one in get_args(Kind) if one != kind]
    before = replace(links, collectives={})
    for other in others:
        assert collective_seconds(other, 1e6, 4, links) == collective_seconds(other, 1e6, 4, before)
    rates = replace(CPU_CORE, links=links)
    assert Rates.from_json(rates.to_json()) == rates


def on_two_by_two(rank: int, ranks: int) -> dict[str, Any]:
    with patch.dict(os.environ, {"GROUP_RANK": str(rank // 2)}):
        return measured_between(rank, ranks, torch.device("cpu"))


@pytest.mark.ranks
def test_every_axis_of_four_ranks_is_measured(tmp_path: Path) -> None:
    found, *others = run_ranks(on_two_by_two, 4, tmp_path)
    assert others == [found] * 3
    assert [*found[COLLECTIVES]] == [WITHIN, BETWEEN]
    assert all({*kinds} == {*get_args(Kind)} for kinds in found[COLLECTIVES].values())
    links = calibration.links_of(CPU_CORE.links, found).links
    for axis, inner in ((WITHIN, 1), (BETWEEN, 2)):
        for kind, (ranks, seconds) in found[COLLECTIVES][axis].items():
            assert ranks == 2
            predicted = collective_seconds(kind, SIZES[-1], ranks, links, inner=inner)
            assert predicted == pytest.approx(seconds[-1], rel=0.01)


@pytest.mark.full
@pytest.mark.long
def test_the_command_keeps_what_it_measures(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("lightning_amp.simulation.calibrate.SIZES", {"cpu": STEP})
    monkeypatch.setattr("lightning_amp.simulation.calibrate.SHARE", 0)
    monkeypatch.setattr("lightning_amp.simulation.calibrate.SPREAD", 1e9)
    out = tmp_path / "rates.json"
    assert main(["calibrate", "--links", "--device", "cpu", "--out", str(out), "--format", "json"]) == 0
    said, links = json.loads(capsys.readouterr().out), Rates.read(out).links
    assert said["links"]["links"]["intra_bandwidth"] == links.intra_bandwidth > 0
    assert links.latency != CPU_CORE.links.latency
    assert list(said["links"]["seconds"]) == [WITHIN, *(f"{kind} of 2 {WITHIN}" for kind in get_args(Kind))]
    assert {*links.collectives[WITHIN]} == {*get_args(Kind)}


def test_one_gpu_has_no_links(monkeypatch: Any) -> None:
    with pytest.raises(PlanError, match="torch finds 0 of them here; use --device cpu"):
        measure_links(CPU_CORE.links, "cuda")
