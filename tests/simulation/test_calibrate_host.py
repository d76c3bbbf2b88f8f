"""Claim: a calibration measures the link to host memory in both directions, and plans use what its file has."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_amp.costs.device_rates import CPU_CORE, DEVICES, Rates
from lightning_amp.costs.host_link import HostLink
from lightning_amp.errors import PlanError
from lightning_amp.simulation import calibrate_host
from lightning_amp.simulation.calibrate_host import host_link_report, measure_host_link, measure_nodes, nodes_report
from lightning_amp.techniques.offload.tiers import link_of

CPU = torch.device("cpu")
LINK = HostLink(out=20e9, back=40e9, both=15e9, pageable_out=6e9, pageable_back=9e9)


def test_each_direction_is_measured_alone_and_both_at_once(monkeypatch: Any) -> None:
    seen, times = list[Any](), iter([1.0, 2.0, 0.25, 0.5, 0.125])

    def seconds(pairs: Any, place: torch.device) -> float:
        seen.append(pairs)
        return next(times)

    monkeypatch.setattr(calibrate_host, "_seconds", seconds)
    monkeypatch.setattr(calibrate_host, "_timed", lambda work, place: (work(), 0.5)[1])
    found = measure_host_link(CPU, size=100)
    assert replace(found, memory=1.0) == HostLink(
        out=400.0, back=200.0, both=200.0, pageable_out=100.0, pageable_back=50.0, memory=1.0
    )
    assert found.memory == 300 / 0.5
    (out, *_), (back, *_), *_, both = seen
    assert len(both) == 2
    # what leaves is read from one buffer of the device, what comes back is written to another
    assert out[1].data_ptr() != back[0].data_ptr()


def test_the_report_has_all_rates_of_a_gpu_and_says_what_a_cpu_has() -> None:
    lines = [line.split() for line in host_link_report(LINK, DEVICES["A100"]).splitlines()]
    assert ["to", "the", "host", "20", "GB/s", "6", "GB/s"] in lines
    assert ["to", "the", "device", "40", "GB/s", "9", "GB/s"] in lines
    assert ["each,", "both", "at", "once", "15", "GB/s"] in lines
    assert ["before", "31.5", "GB/s"] in lines
    assert ["operators", "of", "the", "host", "11.5", "GB/s"] in lines
    assert host_link_report(LINK, CPU_CORE).startswith("20 GB/s from memory to memory")


def test_a_copy_is_made_and_the_best_round_counts(monkeypatch: Any) -> None:
    target, source = torch.zeros(8), torch.arange(8.0)
    rounds = iter([9.0, 9.0, 3.0, 2.0, *[5.0] * 5])
    clock = [0.0]

    class Timed:
        def copy_(self, given: torch.Tensor) -> None:
            target.copy_(given)
            clock[0] += next(rounds)

    monkeypatch.setattr(calibrate_host.time, "perf_counter", lambda: clock[0])
    assert calibrate_host._seconds([(Timed(), source)], CPU) == 2.0  # type: ignore[list-item]
    assert torch.equal(target, source)


def test_here() -> None:
    found = measure_host_link(CPU, size=2**20)
    assert found.both <= min(found.out, found.back)


def test_the_memory_of_each_node_is_measured_from_its_cores(monkeypatch: Any, tmp_path: Path) -> None:
    ran, allowed = list[set[int]](), {1, 2, 3, 9}
    for node, cores in {"node0": "0-3\n", "node1": "8,9\n", "node2": "\n", "node10": "4-7\n"}.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores)
    monkeypatch.setattr(calibrate_host, "NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: ran.append(cores), raising=False)
    links = iter([LINK, replace(LINK, both=20e9)])
    monkeypatch.setattr(calibrate_host, "measure_host_link", lambda place, size: next(links))
    found = measure_nodes(CPU)
    assert list(found) == [0, 1]
    # in the end the process may run where it could before
    assert ran == [{1, 2, 3}, {9}, allowed]
    assert "node 1" in nodes_report(found)
    assert nodes_report(found).endswith("numactl --cpunodebind=1 --membind=1")
    allowed = {1}
    assert measure_nodes(CPU) == {}


def test_a_file_of_rates_has_the_link_or_none() -> None:
    rates = replace(DEVICES["A100"], host_link=LINK)
    assert Rates.from_json(rates.to_json()) == rates
    assert rates.host == LINK
    assert DEVICES["A100"].host == HostLink.alike(31.5e9, 51.2e9)
    before = json.loads(rates.to_json())
    del before["host_link"]
    assert Rates.from_json(json.dumps(before)) == DEVICES["A100"]
    with pytest.raises(PlanError, match="rates are above 0: calibrate again"):
        replace(LINK, back=0.0)


def test_what_leaves_takes_the_way_out_and_what_comes_the_way_back() -> None:
    seen: Any = SimpleNamespace(rates=replace(DEVICES["A100"], host_link=LINK))
    link = link_of(seen, 5)
    assert (link.out, link.back, link.window) == (20e9, 40e9, 5)
    # a copy of a CPU is made by the core that computes
    assert not link_of(SimpleNamespace(rates=CPU_CORE), 5).window  # type: ignore[arg-type]
