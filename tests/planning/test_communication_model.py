"""Claim: a collective takes the seconds of a ring worked out by hand, and where its ranks are decides the bandwidth."""

from typing import get_args

import pytest

from lightning_amp.costs.device_rates import Kind, Links, collective_seconds

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


def test_latency_is_paid_by_the_message() -> None:
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
