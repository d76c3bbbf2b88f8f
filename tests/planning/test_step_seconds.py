"""Claim: the cost model's parts, collectives and seconds are those of its equations worked out by hand."""

from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from lightning_amp.costs.device_rates import Links, Rates
from lightning_amp.costs.model_shape import DecoderShape
from lightning_amp.costs.ordered_runs import deal
from lightning_amp.planning.plan.plan import Axes, MeshShape
from lightning_amp.planning.time.collectives import gradient_numbers, region_traffic
from lightning_amp.planning.time.step_seconds import step_seconds, stratum_seconds
from lightning_amp.techniques.hic.rows import block_cells
from tests.planning.work_cases import CELLS, shape, stratum_work, work

SLOW = Links(intra_bandwidth=1e3, inter_bandwidth=1e3, latency=1.0, ranks_per_node=8)
FREE = Links(intra_bandwidth=inf, inter_bandwidth=inf, latency=0.0, ranks_per_node=8)
ONE = MeshShape(data=1, model=1)


def rates(**changes: Any) -> Rates:
    free = {"matmul_flops": 1e300, "memory_bytes": 1e300, "attention_share": 1.0, "overhead_seconds": 0.0}
    return Rates(**(free | {"links": FREE} | changes))


def seconds(axes: Axes, mesh: MeshShape = ONE, sizes: DecoderShape | None = None, **changes: Any) -> float:
    return step_seconds(sizes or shape(), axes, mesh, cells=CELLS, rates=rates(**changes))


def test_seconds_are_the_sum_of_what_is_done() -> None:
    sizes = shape()
    done = work(sizes, Axes())
    assert seconds(Axes(), matmul_flops=1e6) == pytest.approx(done.flops / 1e6)
    assert seconds(Axes(), memory_bytes=1e6) == pytest.approx(done.bytes / 1e6)
    assert seconds(Axes(), overhead_seconds=1e-6) == pytest.approx(done.kernels / 1e6)
    attention = 6 * 2 * 192 * 96 * 16 * 2 / 1e6
    slower = seconds(Axes(), matmul_flops=1e6, attention_share=0.5) - seconds(Axes(), matmul_flops=1e6)
    assert slower == pytest.approx(attention)
    assert seconds(Axes()) == pytest.approx(0, abs=1e-100)


def test_seconds_of_sending() -> None:
    # S1: gradients over two ranks; those of two keys, and of four tables for every feature
    numbers = 2 * (4 * 16**2 + 4 * 16) + 4 * (3 * 192 - 3)
    two = MeshShape(data=2, model=1)
    assert seconds(Axes(), two, links=SLOW) == pytest.approx(4 * numbers / 1e3 + 2)
    # strata: the loss, what enters, and the gradients, over the model axis
    both = MeshShape(data=1, model=2)
    entered = 1 + (192 + CELLS) * 16 + 3
    expected = 4 * (entered + numbers) / 1e3 + 3 * 2
    assert seconds(Axes(placement="strata"), both, links=SLOW) == pytest.approx(expected)


def test_blocks_of_cells_cost_gradients_of_the_key() -> None:
    sizes, cells = shape(anchors=40_000, window=64), 64
    blocks = -(-cells // block_cells(40_000, anchors=40_000))
    assert blocks == 3
    retain, stream = (
        stratum_work(sizes, Axes(activations=a, decode="key-first"), k=1, cells=cells) for a in ("retain", "stream")
    )
    assert stream.flops == retain.flops
    # keys selected twice and their gradient; the gradient of all keys made and added; sums and rows of the tables
    added = 4 * (blocks - 1) * 40_000 * (6 * 16 + 4 * 16 + 64)
    assert stream.bytes - retain.bytes == pytest.approx(added, rel=0.01)


@pytest.mark.parametrize("chained", [False, True])
def test_strata_are_dealt_by_their_cost(chained: bool) -> None:
    sizes, axes = shape(strata=9, chained=chained), Axes(placement="strata")
    costs, _ = stratum_seconds(sizes, axes, cells=CELLS, rates=rates(matmul_flops=1e6))
    assert len(costs) == 9
    assert costs[0] < costs[1] / 3, "the first stratum has no key"
    spine = 3 * 2 * 192 * 16**2 / 1e6
    ends = deal(costs, 3, passing=(0.0, *(chained * spine,) * 8))
    slowest = max(sum(costs[a:b]) + (chained * spine * max(0, a - 1)) for a, b in pairwise((0, *ends)))
    mesh = MeshShape(data=1, model=3)
    assert seconds(axes, mesh, sizes, matmul_flops=1e6) == pytest.approx(slowest)
    assert seconds(axes, mesh, sizes, matmul_flops=1e6) < sum(costs) / 2


def test_strata_side_by_side_end_with_the_last_one() -> None:
    sizes, stream = shape(strata=4), Axes(activations="stream")
    two = replace(sizes, threads=2)
    (first, *keyed), _ = stratum_seconds(two, stream, cells=CELLS, rates=rates(matmul_flops=1e6))
    assert keyed == pytest.approx([keyed[0]] * 3, rel=0.01), "alike but for a few features"
    # of the three that have a key one of the two workers has two, each at half of the rate
    later = 2 * max(first + keyed[1], keyed[0] + keyed[2])
    assert seconds(stream, sizes=two, matmul_flops=1e6) == pytest.approx(later)
    assert seconds(stream, sizes=sizes, matmul_flops=1e6) == pytest.approx(first + sum(keyed))
    # what Python does is done in one thread at a time
    one_thread = seconds(stream, sizes=sizes, overhead_seconds=1e-6)
    assert seconds(stream, sizes=two, overhead_seconds=1e-6) == pytest.approx(one_thread)
    # other plans compute one stratum after the other, each with all threads
    assert seconds(Axes(), sizes=two, matmul_flops=1e6) == seconds(Axes(), sizes=sizes, matmul_flops=1e6)


def test_what_a_stratum_sends() -> None:
    sizes, b, n, d = shape(dim=24, n_batches=2), CELLS, 192, 24
    hidden = stratum_work(sizes, Axes(placement="hidden"), k=2, cells=b, ranks=4)
    assert hidden.collectives == 15, "7 and the scores forward, 6 backward: techniques/hic/hidden.py"
    chunked = stratum_work(sizes, Axes(placement="hidden", attention="chunked"), k=2, cells=b, ranks=4)
    assert chunked.collectives == 7 + 2 + 6 + 2 + 2, "two chunks of 128 queries, and again in the backward pass"
    gathered = stratum_work(sizes, Axes(placement="hidden-gathered"), k=2, cells=b, ranks=4)
    assert gathered.collectives == 15 - 4 + 2
    assert stratum_work(sizes, Axes(placement="strata"), k=2, cells=b, ranks=4).collectives == 0
    nodes = stratum_work(sizes, Axes(placement="nodes"), k=2, cells=b, ranks=4)
    assert nodes.sent_bytes == 4 * (2 * 4 * 32 * d + 2 * b)
    assert nodes.collectives == 4
    region = region_traffic(sizes, Axes(placement="nodes"), cells=b, ranks=4)
    assert [(c.kind, c.numbers) for c in region] == [("all_reduce", 1), ("all_gather", (64 + b) * d + 3)]
    region = region_traffic(sizes, Axes(placement="strata"), cells=b, ranks=4)
    assert [(c.kind, c.numbers) for c in region] == [("all_reduce", 1), ("all_reduce", n * d + b * d + 3)]
    keys, tables = 2 * (4 * d * d + 4 * d), 4 * 2 * (3 * n - 3)
    assert gradient_numbers(sizes, Axes()) == (0, keys + tables)
    assert gradient_numbers(sizes, Axes(placement="hidden")) == (keys, tables)
    assert gradient_numbers(sizes, Axes(placement="strata")) == (keys + tables, 0)
