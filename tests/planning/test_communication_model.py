"""Claim: the communication model's seconds are those of its equations worked out by hand, and placement decides.

The observed times of the paper's validation (32 ranks, a GPT of 20 B parameters) are in a figure only, so that its
ranking cannot be checked here; what can be is that a ranking that knows the placement differs from one that does not.
"""

from math import prod
from typing import get_args

import pytest

from benchmarks.grid_cost import Grid, LinearLayer, layer_seconds, rank_grids, stack_seconds
from lightning_amp.errors import PlanError
from lightning_amp.planning.time.link_seconds import Kind, Links, collective_seconds

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
    assert [collective_seconds(kind, 40, 1, UNIT) for kind in KINDS] == [0, 0, 0, 0]


def test_latency_is_paid_by_the_message() -> None:
    slow = Links(intra_bandwidth=1.0, inter_bandwidth=1.0, latency=5.0, ranks_per_node=8)
    assert [collective_seconds(kind, 0, 4, slow) for kind in KINDS] == [15, 15, 30, 5]
    assert [collective_seconds(kind, 0, 1, slow) for kind in KINDS] == [0, 0, 0, 0]
    # what an all-reduce does in two steps
    whole = collective_seconds("all_reduce", 40, 4, slow)
    assert whole == collective_seconds("reduce_scatter", 40, 4, slow) + collective_seconds(
        "all_gather", 10, 4, slow
    )


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
    assert collective_seconds("all_reduce", n_bytes, ranks, NODES, inner=inner) == pytest.approx(
        seconds, rel=1e-12
    )


def test_one_layer_by_hand() -> None:
    # I [96, 10], W [10, 20]; two data groups of 48 rows
    layer, grid = LinearLayer(inputs=10, outputs=20), Grid(x=2, y=5, z=4, data=2)
    gather = 3 * (10 * 20 / 40)
    scatter = 3 / 4 * (10 * 20 / 10)
    output = 2 * 4 / 5 * (48 * 20 / (4 * 2))
    inputs = 2 * 1 / 2 * (48 * 10 / (4 * 5))
    data = 2 * 1 / 2 * (10 * 20 / 40)
    by_hand = gather + scatter + output + inputs + data
    assert (gather, scatter, output, inputs, data) == (15, 15, 192, 24, 5)
    assert layer_seconds(layer, grid, UNIT, rows=96, element_bytes=1) == pytest.approx(by_hand, rel=1e-12)
    assert layer_seconds(layer, grid, UNIT, rows=96) == pytest.approx(2 * by_hand, rel=1e-12)


def test_a_transposed_layer_swaps_x_and_y() -> None:
    layer, grid = LinearLayer(inputs=10, outputs=20), Grid(x=2, y=5, z=4, data=2)
    output = 2 * 1 / 2 * (48 * 20 / (4 * 5))
    inputs = 2 * 4 / 5 * (48 * 10 / (4 * 2))
    swapped = layer_seconds(layer, grid, UNIT, rows=96, transposed=True, element_bytes=1)
    assert swapped == pytest.approx(15 + 15 + output + inputs + 5, rel=1e-12)
    assert stack_seconds([layer] * 3, grid, UNIT, rows=96, element_bytes=1) == pytest.approx(
        2 * 251 + swapped, rel=1e-12
    )


def test_placement_of_every_axis_by_hand() -> None:
    # x 2 in the node; y 4 over nodes with 2 rings; z 2 with 8, of which 4 fit; data 2 with 16, of which 4 fit
    layer, grid = LinearLayer(inputs=16, outputs=32), Grid(x=2, y=4, z=2, data=2)
    fast, two, four = 200 * GIB, 40 * GIB, 20 * GIB
    weight, rows = 16 * 32, 64 / 2
    by_hand = weight / 16 / four + weight / 8 / 2 / four
    by_hand += 2 * 3 / 4 * rows * 32 / (2 * 2) / two
    by_hand += 2 * 1 / 2 * rows * 16 / (2 * 4) / fast
    by_hand += 2 * 1 / 2 * weight / 16 / four
    found = layer_seconds(layer, grid, NODES, rows=64, element_bytes=1)
    assert found == pytest.approx(by_hand, rel=1e-12)
    # transposed: over y (inside the node, where x was) goes dI, over x the output
    turned = weight / 16 / four + weight / 8 / 2 / four
    turned += 2 * 1 / 2 * rows * 32 / (2 * 4) / fast
    turned += 2 * 3 / 4 * rows * 16 / (2 * 2) / two
    turned += 2 * 1 / 2 * weight / 16 / four
    found = layer_seconds(layer, grid, NODES, rows=64, transposed=True, element_bytes=1)
    assert found == pytest.approx(turned, rel=1e-12)


def gpt(hidden: int, blocks: int) -> list[LinearLayer]:
    sizes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    return [LinearLayer(inputs=k, outputs=n) for k, n in sizes] * blocks


def test_grids_of_a_large_transformer() -> None:
    layers, tokens = gpt(7168, 32), 32 * 1024
    aware = rank_grids(layers, 32, NODES, rows=tokens)
    grids = [grid for grid, _ in aware]
    assert len(set(grids)) == len(grids) == 56, "8 over 3 ways to deal five factors of two to four axes"
    assert all(prod((g.x, g.y, g.z, g.data)) == 32 for g in grids)
    assert [seconds for _, seconds in aware] == sorted(seconds for _, seconds in aware)
    assert aware[0][1] == pytest.approx(stack_seconds(layers, grids[0], NODES, rows=tokens), rel=1e-12)
    everywhere_alike = Links(intra_bandwidth=GIB, inter_bandwidth=GIB, latency=0.0, ranks_per_node=32)
    flat = [grid for grid, _ in rank_grids(layers, 32, everywhere_alike, rows=tokens)]
    # the flat ranking likes four axes of equal length, whose outer ones share the links between nodes
    assert flat.index(grids[0]) >= 5
    assert not set(flat[:3]) & set(grids[:5])


def test_equal_grids_are_ranked_by_their_axes() -> None:
    square = [LinearLayer(inputs=8, outputs=8)] * 2
    ranked = [(g.x, g.y) for g, _ in rank_grids(square, 4, UNIT, rows=4) if g.z == g.data == 1]
    assert ranked.index((1, 4)) < ranked.index((4, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intra_bandwidth": 0.0}, r"intra_bandwidth=0\.0.*bandwidths are above 0"),
        ({"inter_bandwidth": -1.0}, r"inter_bandwidth=-1\.0.*bandwidths are above 0"),
        ({"latency": float("nan")}, "latency=nan.*0 seconds or more"),
        ({"ranks_per_node": 0}, "ranks_per_node=0.*whole number of 1 or more"),
    ],
)
def test_links_that_cannot_be(changes, message) -> None:
    sizes = {"intra_bandwidth": 1.0, "inter_bandwidth": 1.0, "latency": 0.0, "ranks_per_node": 1}
    with pytest.raises(PlanError, match=message):
        Links(**(sizes | changes))


def test_grids_of_nothing_are_refused() -> None:
    with pytest.raises(PlanError, match="0 ranks for 1 layers were asked for; allowed are one rank or more"):
        rank_grids([LinearLayer(inputs=1, outputs=1)], 0, UNIT, rows=1)
    with pytest.raises(PlanError, match="4 ranks for 0 layers"):
        rank_grids([], 4, UNIT, rows=1)
