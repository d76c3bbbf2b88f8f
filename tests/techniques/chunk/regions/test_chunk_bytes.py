"""Claim: bytes, seconds and the paper's cost of a region are what a hand counts."""

from dataclasses import replace

import pytest

from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.techniques.chunk.regions.choose_chunks import CostModel, choose_chunks
from lightning_amp.techniques.chunk.regions.chunk_bytes import chunk_bytes
from lightning_amp.techniques.chunk.regions.paper_cost import WEIGHTS, Weights, paper_cost
from lightning_amp.techniques.chunk.regions.piece_seconds import Seconds
from lightning_amp.techniques.chunk.regions.region import Region
from tests.techniques.chunk.regions.tables import Rows

RATES = replace(CPU_CORE, matmul_flops=1.0, memory_bytes=1.0, overhead_seconds=1000.0)


def feed_forward() -> tuple[Rows, dict[str, int]]:
    """[4, 6] -> 8 features -> exp -> 6, without biases."""
    new = Rows()
    x = new.given(4, 6)
    up = new.linear(x, 8)
    act = new.pointwise(up, op="exp")
    down = new.linear(act, 6)
    return new, {"x": x, "w": up - 1, "up": up, "act": act, "v": down - 1, "down": down}


def cut(at: dict[str, int], n_chunks: int) -> Region:
    dims = {at[name]: 0 for name in ("x", "up", "act", "down")}
    return Region(first=at["up"], last=at["down"], dims=dims, units=4, n_chunks=n_chunks)


def test_bytes_and_seconds_by_hand() -> None:
    new, at = feed_forward()
    table = new.table(at["down"])
    whole = chunk_bytes(table, ())
    assert whole.peak_bytes == 128 + 128
    # the output of 4 x 6 numbers, and of a piece of 2 rows two results of 2 x 8, or one and one of 2 x 6
    found = chunk_bytes(table, [cut(at, 2)])
    assert [found.forward[at[name]] for name in ("up", "act", "down")] == [96 + 64, 96 + 128, 96 + 64 + 48]
    assert found.saved_bytes == 96
    # 3 pieces of 4 rows are two of 2 rows
    assert chunk_bytes(table, [cut(at, 3)]).peak_bytes == found.peak_bytes
    assert chunk_bytes(table, [cut(at, 4)]).peak_bytes == 96 + 64
    # seconds by hand
    seconds = Seconds(table, RATES, train=False)
    up = 1000 + 2 * 4 * 6 * 8 + 96 + 192 + 128
    act = 1000 + 128 + 128
    flops_down = table.rows[at["down"]].flops
    down = 1000 + flops_down + 128 + 192 + 96
    assert seconds.whole == pytest.approx(up + act + down)
    # two more passes call all three again and read both weights again; the output is written in three pieces of 2 x 96
    again = 1000 + 192 + 1000 + 1000 + 192
    assert seconds.extra(cut(at, 4)) == pytest.approx(3 * again + 4 * 1000 + 192)
    train = Seconds(table, RATES, train=True)
    assert train.whole == pytest.approx(3 * seconds.whole)
    assert train.extra(cut(at, 4)) == pytest.approx(4 * seconds.extra(cut(at, 4)) + seconds.whole)


def test_the_papers_cost_by_hand() -> None:
    new, at = feed_forward()
    y = new.pointwise(at["down"], op="exp")
    table = new.table(y)
    flops = table.flops
    density = (flops / 3 + 1) / (flops / 4 + 1)
    # all operations and three of four rows; the outermost dim has the largest stride
    weights = Weights(2.0, 3.0, 5.0, 7.0)
    assert paper_cost(table, cut(at, 2), weights) == pytest.approx(2 * 3 / 4 + 3 * 1 + 5 / density + 7 * 1)
    assert paper_cost(table, cut(at, 2)) == paper_cost(table, cut(at, 2), WEIGHTS)
    inner = Region(first=y, last=y, dims={at["down"]: 1, y: 1}, units=6, n_chunks=6)
    assert paper_cost(table, inner, weights) == pytest.approx(2 / 4 + 5 * (flops / 4 + 1) + 7 * 4)
    # the papers weights decide which region is taken
    new, at = feed_forward()
    table = new.table(at["down"])
    plans = {
        term: choose_chunks(table, 255, costs=CostModel(policy="paper", weights=Weights(*weights)))
        for term, weights in {"nodes": (1, 0, 0, 0), "density": (0, 0, 1, 0)}.items()
    }
    ends = {term: [(r.first, r.last) for r in plan.regions] for term, plan in plans.items()}
    assert ends == {"nodes": [(at["up"], at["act"])], "density": [(at["up"], at["down"])]}
