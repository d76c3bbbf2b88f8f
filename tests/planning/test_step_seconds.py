"""Claim: the cost model's parts, collectives and seconds are those of its equations worked out by hand."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from lightning_amp.costs.device_rates import CPU_CORE, Links, Rates, rates_for
from lightning_amp.costs.model_shape import DecoderShape, ModelShape, reference_shape
from lightning_amp.costs.ordered_runs import deal
from lightning_amp.planning import sizes
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Axes
from lightning_amp.planning.policies.auto import candidates
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.policies.recommend_devices import recommend_devices
from lightning_amp.planning.sizes import RankSizes, Strata, Term, same_strata
from lightning_amp.planning.time.collectives import gradient_numbers, region_traffic
from lightning_amp.planning.time.step_seconds import decoder_seconds, on_device, step_seconds, stratum_seconds
from lightning_amp.techniques.hic.rows import StreamStrata, block_cells
from tests.planning.profiles import hic, profile, rna, shape_of_decoder
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


DECODER = DecoderShape(
    fqn="decoders.hic",
    anchors=997,
    dim=16,
    features=(980, 960, 940, 920, 900),
    distances=(0, 1, 2, 3, 4),
    attention=True,
    window=33,
)


def decoder(**changes: object) -> ModelShape:
    return shape_of_decoder(replace(DECODER, **changes), batch_size=48)


def reference(**sizes: int) -> ModelShape:
    return reference_shape(profile(hic(**sizes), rna()), batch_size=64)


SHAPES = {
    "reference": reference(anchors=1500, strata=6),
    "convolution": reference(anchors=1500, strata=6, attention=False),
    "large": reference(anchors=113_505, strata=4),
    "chained": decoder(chained=True, variant="paper", n_batches=2),
    "full attention": decoder(full=True, window=1, chained=True),
    "chained convolution": decoder(chained=True, attention=False, dim=15),
    "threads": decoder(threads=4, distances=(0, 1, 0, 1, 2), unsupported=("sparse",)),
    "copies": decoder(features=(900, 700, 500, 300, 100), n_batches=3),
}
RATES = rates_for("A100")


@pytest.mark.parametrize("devices", [1, 6])
@pytest.mark.parametrize("name", SHAPES)
def test_every_plan_has_the_numbers_that_it_has_when_it_is_counted_by_itself(name, devices) -> None:
    rates = CPU_CORE if name == "threads" else RATES
    shape = on_device(SHAPES[name], rates)
    found = candidates(shape, devices=devices, budget=2**30, rates=rates, own=frozenset({"S1"}))
    for candidate in found:
        # nothing is remembered of the plans before
        same_strata.cache_clear()
        mesh = MeshShape(data=candidate.data, model=candidate.model)
        seconds = decoder_seconds(shape, Axes.of(candidate.strategies), mesh, rates)
        peak = predict(shape, candidate.strategies, model_ranks=candidate.model).peak_bytes
        assert (candidate.step_seconds, candidate.peak_bytes) == (seconds, peak), candidate.strategies


def test_a_term_sees_the_axes_that_it_names_and_no_others() -> None:
    decoder = replace(DECODER)
    strata = Strata(RankSizes, decoder, cells=4, ranks=1)
    placed = Term(lambda s: s.axes.placement, "placement")
    assert strata.column(placed, Axes(placement="nodes")) == ("nodes",) * 5
    assert strata.column(placed, Axes(placement="strata")) == ("replicated",) * 5, "a stratum is as it is alone"
    with pytest.raises(AttributeError, match="decode"):
        strata.column(Term(lambda s: s.axes.decode, "placement"), Axes())


DATA = profile(hic(anchors=600, strata=4), rna())
DEVICES = {"cpu": CPU_CORE, "H100": rates_for("H100")}


def shape_of(cells: int = 32) -> ModelShape:
    return reference_shape(DATA, batch_size=cells)


def recommended(rates: Rates) -> Any:
    return recommend_devices(DATA, shape_of, cells=32, budget=None, rates=rates).scales[0].best


def planned(rates: Rates) -> Any:
    return plan(DATA, batch_size=32, rates=rates).candidates[0]


ASKED: dict[str, Callable[[Rates], Any]] = {
    "plan": planned,
    "plan of a shape that was on the other device": lambda rates: plan(
        DATA, batch_size=32, rates=rates, shape=on_device(shape_of(), next(r for r in DEVICES.values() if r != rates))
    ).candidates[0],
    "policy paper": lambda rates: plan(DATA, batch_size=32, devices=4, policy="paper", rates=rates),
    "named strategies": lambda rates: plan(
        DATA, batch_size=32, devices=4, strategies="S1,strata,fused,sparse,stream", rates=rates
    ),
    "recommend_devices": recommended,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ASKED)
def test_every_count_is_of_the_device(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[bool] = set()

    def launched(sizes: RankSizes) -> bool:
        seen.add(sizes.decoder.launched)
        return sizes.decoder.launched

    monkeypatch.setattr(RankSizes, "launched", property(launched))
    # what was counted for others is remembered
    sizes.same_strata.cache_clear()
    ASKED[name](DEVICES[device])
    assert seen == {device != "cpu"}


def test_settings_follow_the_device() -> None:
    def cells(rates: Rates) -> list[int]:
        made = plan(DATA, batch_size=512, strategies="S1,stream", rates=rates)
        return [rule.spec.cells for rule in made.rules if isinstance(rule.spec, StreamStrata)]

    (few,), (many,) = (cells(rates) for rates in DEVICES.values())
    assert few < many
