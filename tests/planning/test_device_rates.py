"""Claim: rates survive JSON, name their devices, and predict what was measured; a collective takes the seconds of a
ring."""

import json
from dataclasses import replace
from typing import Any, get_args

import pytest

from lightning_amp.costs.device_rates import (
    CPU_CORE,
    DEVICES,
    Kind,
    Links,
    Rates,
    collective_seconds,
    nearest_rates,
    rates_for,
)
from lightning_amp.costs.model_shape import DecoderShape
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Axes
from lightning_amp.planning.time.step_seconds import step_seconds
from lightning_amp.simulation.calibrate import calibrated


def predicted(rates: Rates, mesh: MeshShape) -> float:
    decoder = DecoderShape(
        fqn="decoder", anchors=500, dim=32, features=(500, 499), distances=(0, 1), attention=True, window=40
    )
    return step_seconds(decoder, Axes(), mesh, cells=8, rates=rates)


@pytest.mark.parametrize("rates", DEVICES.values(), ids=DEVICES)
def test_json_round_trip(rates: Rates) -> None:
    assert Rates.from_json(rates.to_json()) == rates


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("nvidia h200", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        # the size is the host's
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI250X", "MI250X"),
        ("cpu", "cpu"),
        ("CPU core", "cpu"),
    ],
)
def test_names_of_devices(name: str, known: str) -> None:
    assert rates_for(name) is DEVICES[known]


def test_tf32_is_asked_for_and_an_unknown_device_refused() -> None:
    plain, tf32 = rates_for("A100"), rates_for("A100", products="tf32")
    assert tf32 == replace(plain, matmul_flops=8 * plain.matmul_flops)
    assert rates_for("A100", products="half") == replace(plain, matmul_flops=16 * plain.matmul_flops)
    assert rates_for("cpu", products="half") is CPU_CORE
    # an unknown device is refused
    with pytest.raises(PlanError, match=r"rates of 'TPU v4'.*one of cpu, RTX 3090, .*, B200: choose the one"):
        rates_for("TPU v4")


def test_a_node_of_frontier_shares_four_adapters() -> None:
    links = rates_for("MI250X").links
    # rings of eight devices leave a node by four adapters of 25 GB/s
    assert links.bandwidth(2, inner=1) == 50e9
    assert links.bandwidth(16, inner=1) == 25e9
    assert links.bandwidth(2, inner=8) == 100e9 / 8
    assert rates_for("MI250X", products="tf32").matmul_flops == rates_for("MI250X").matmul_flops


def test_a_calibrated_prediction_is_what_was_measured() -> None:
    one, two = MeshShape(data=1, model=1), MeshShape(data=2, model=1)
    before = predicted(CPU_CORE, one)
    fitted = calibrated(CPU_CORE, before, 3 * before)
    assert predicted(fitted, one) == pytest.approx(3 * before, rel=1e-12)
    # what is sent takes as long as before
    sending = predicted(CPU_CORE, two) - before
    assert predicted(fitted, two) == pytest.approx(3 * before + sending, rel=1e-9)
    assert fitted.links == CPU_CORE.links


@pytest.mark.parametrize(
    ("name", "gib", "near"),
    [("Tesla T4", 15, "RTX 3090"), ("L40S", 45, "A100"), ("GH", 96, "GH200"), ("B300", 270, "B200")],
)
def test_an_unknown_gpu_gets_the_rates_of_the_one_whose_memory_is_nearest(name, gib, near) -> None:
    rates, note = nearest_rates(name, memory_bytes=gib * 2**30)
    assert rates is DEVICES[near]
    assert f"the rates of {name!r} are not known: times are predicted for {rates.device}, whose" in note
    assert "lightning-amp calibrate" in note


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matmul_flops": 0.0}, r"matmul_flops=0\.0.*rates are above 0"),
        ({"memory_bytes": float("inf")}, "memory_bytes=inf.*rates are above 0"),
        ({"attention_share": 1.5}, r"attention_share=1\.5.*no more than 1"),
        ({"matmul_flops": "fast"}, "matmul_flops='fast'.*rates are above 0"),
        ({"overhead_seconds": -1.0}, r"overhead_seconds=-1\.0.*0 or more"),
        ({"device": " "}, "device=' '.*whose rates they are"),
    ],
)
def test_rates_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(CPU_CORE, **changes)


def edited(**changes: Any) -> str:
    return json.dumps(json.loads(CPU_CORE.to_json()) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "here is not JSON"),
        ("[1]", r"schema 2, here has schema 'no mapping, but \[1\]'"),
        ("2", "schema 2, here has schema 'no mapping, but 2'"),
        (edited(launches="no"), "launches is true or false"),
        (edited(links=json.loads(CPU_CORE.to_json())["links"] | {"collectives": []}), "here does not read as rates"),
        (edited(schema=1), "here has schema 1; calibrate again"),
        (edited(memory=8), "here does not read as rates"),
        (edited(memory={"total_bytes": -8}), "total_bytes=-8.*whole numbers of 0 or more"),
        (edited(speed=1), "here does not read as rates: .*'speed'.*their fields are"),
        (edited(links=None), "here does not read as rates"),
        (edited(links={"latency": 1.0}), "here does not read as rates: .*intra_bandwidth"),
        (edited(memory_bytes=-1), "memory_bytes=-1.*rates are above 0"),
    ],
)
def test_json_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Rates.from_json(text, source="here")


GIB = 1e9
UNIT = Links(intra_bandwidth=1.0, inter_bandwidth=1.0, latency=0.0, ranks_per_node=10**6)
"""One byte per second, all ranks in one node: seconds are bytes."""
NODES = Links(intra_bandwidth=200 * GIB, inter_bandwidth=80 * GIB, latency=0.0, ranks_per_node=4)

KINDS = get_args(Kind)


def test_ring_collectives() -> None:
    assert collective_seconds("all_gather", 10, 4, UNIT) == 30
    assert collective_seconds("reduce_scatter", 40, 4, UNIT) == 30
    assert collective_seconds("all_reduce", 40, 4, UNIT) == 60
    assert collective_seconds("exchange", 40, 4, UNIT) == 40
    assert [collective_seconds(kind, 40, 1, UNIT) for kind in KINDS] == [0, 0, 0, 0, 0]
    # latency is paid by the message
    slow = Links(intra_bandwidth=1.0, inter_bandwidth=1.0, latency=5.0, ranks_per_node=8)
    assert [collective_seconds(kind, 0, 4, slow) for kind in KINDS] == [15, 15, 30, 5, 5]
    assert [collective_seconds(kind, 0, 1, slow) for kind in KINDS] == [0, 0, 0, 0, 0]
    # what an all-reduce does in two steps
    whole = collective_seconds("all_reduce", 40, 4, slow)
    assert whole == collective_seconds("reduce_scatter", 40, 4, slow) + collective_seconds("all_gather", 10, 4, slow)


@pytest.mark.parametrize(
    ("ranks", "inner", "expected"),
    [
        (4, 1, 200),  # the group is a node
        (2, 2, 200),  # two groups in a node
        (8, 1, 80),  # one ring over two nodes: the paper's Figure 5
        (2, 4, 20),  # four rings share the link
        (4, 2, 40),  # two rings: Figure 6
        (2, 16, 20),  # no more rings than ranks in a node
        (3, 2, 40),  # three groups of two over two nodes
    ],
)
def test_bandwidth_by_placement(ranks, inner, expected) -> None:
    assert NODES.bandwidth(ranks, inner=inner) == expected * GIB
    n_bytes = 6 * GIB
    seconds = 2 * (ranks - 1) / ranks * n_bytes / (expected * GIB)
    assert collective_seconds("all_reduce", n_bytes, ranks, NODES, inner=inner) == pytest.approx(seconds, rel=1e-12)
