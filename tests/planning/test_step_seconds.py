"""Claim: the work model counts a real step's operations, bytes, kernels and collectives, and adds up their seconds."""

from collections import Counter
from collections.abc import Callable
from itertools import chain, pairwise
from math import inf
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_amp.lightning.strategy.plan_run import profile_of_module
from lightning_amp.models.decoders.stratum_keys import ConvolutionKey
from lightning_amp.parallel.attention.s3_chunked import chunk_attention
from lightning_amp.parallel.describe_module import describe
from lightning_amp.parallel.scores.s4_key_first import key_first
from lightning_amp.planning.plan.axes import Axes, MeshShape
from lightning_amp.planning.plan.block_sizes import block_cells, chunk_buckets
from lightning_amp.planning.plan.model_shape import DecoderShape
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.sizes.ordered_partition import deal
from lightning_amp.planning.sizes.rank_sizes import RankSizes
from lightning_amp.planning.time.collectives import border_traffic, gradient_numbers, stratum_traffic
from lightning_amp.planning.time.device_rates import Rates
from lightning_amp.planning.time.link_seconds import Links
from lightning_amp.planning.time.operator_costs import parts, there_and_back
from lightning_amp.planning.time.step_seconds import step_seconds, stratum_seconds
from lightning_amp.simulation.fake_ranks import fake_world
from lightning_amp.simulation.models_without_values import decoder_subject
from lightning_amp.simulation.planned_rank import PlannedRank
from lightning_amp.simulation.simulate import simulate

CELLS = 6
SIZES = {
    "higlue": {},
    "ragged": {"anchors": 201, "window": 48, "features": (201, 150, 3)},
    "paper, chained": {"variant": "paper", "chained": True},
    "one bucket, three batches": {"anchors": 30, "window": 32, "n_batches": 3},
}
AXES = [
    Axes(),
    Axes(decode="key-first"),
    Axes(attention="chunked"),
    Axes(attention="chunked-retained", decode="key-first"),
]


def shape(**changes: Any) -> DecoderShape:
    sizes = {"anchors": 192, "dim": 16, "window": 32, "strata": 3, "attention": True} | changes
    strata = sizes.pop("strata")
    features = sizes.pop("features", tuple(sizes["anchors"] - k for k in range(strata)))
    return DecoderShape(fqn="decoder", features=features, distances=tuple(range(strata)), **sizes)


def planned(decoder: nn.Module, axes: Axes, window: int) -> None:
    """The decoder's leaves as the axes ask for."""
    for stratum in decoder.strata:
        if axes.decode == "key-first":
            stratum.decode = key_first(stratum.decode)
        if axes.attention != "eager" and stratum.key is not None:
            retain = axes.attention == "chunked-retained"
            chunked = chunk_attention(stratum.key.attention, buckets=chunk_buckets(window), retain=retain)
            stratum.key.attention = chunked


def step(sizes: DecoderShape, axes: Axes) -> Callable[[], None]:
    """Forward and backward pass of a decoder, without values."""
    subject = decoder_subject(sizes, batch_size=CELLS)
    decoder = subject.module.get_submodule(sizes.fqn)
    planned(decoder, axes, sizes.window)
    batch = dict(subject.batch)
    u, v = batch.pop("u").requires_grad_(), batch.pop("v").requires_grad_()
    return lambda: decoder(u, v, **batch).backward()


class Work(NamedTuple):
    """What a rank does: operations of products, bytes and calls of operators, bytes and calls of collectives."""

    flops: float
    bytes: float
    kernels: float
    sent_bytes: float
    collectives: int


def stratum_work(sizes: DecoderShape, axes: Axes, *, k: int, cells: int, ranks: int = 1) -> Work:
    s = RankSizes(decoder=sizes, axes=axes, k=k, cells=cells, ranks=ranks)
    done = [there_and_back(part, forwards=1 + s.recomputed) for part in parts(s).values()]
    flops, numbers, kernels = map(sum, zip(*done, strict=True))
    traffic = stratum_traffic(s)
    calls = sum(c.calls for c in traffic)
    return Work(flops, 4 * numbers, kernels, 4 * sum(c.numbers for c in traffic), calls)


def work(sizes: DecoderShape, axes: Axes, *, ranks: int = 1) -> Work:
    strata = [stratum_work(sizes, axes, k=k, cells=CELLS, ranks=ranks) for k in range(len(sizes.features))]
    return Work(*map(sum, zip(*strata, strict=True)))


def test_operations_of_a_convolution() -> None:
    # forward: of the gradient of a depthwise weight the counter counts the channels twice
    key = ConvolutionKey(16, 2).to("meta")
    with FlopCounterMode(display=False) as counter:
        key(torch.empty(192, 16, device="meta"))
    sizes = RankSizes(decoder=shape(attention=False), axes=Axes(), k=2, cells=CELLS)
    forward, backward = parts(sizes)["convolution"]
    assert forward.flops == counter.get_total_flops() == backward.flops / 2


class Operators(TorchDispatchMode):
    """Counts operators that make or change a tensor, and the bytes that they read and write."""

    MAKING = ("empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "promote_types")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        views = all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not views and func._opname not in self.MAKING:
            tensors = [t for t in tree_leaves((args, kwargs, found)) if isinstance(t, Tensor)]
            self.kernels += 1
            self.bytes += sum(moved(t) for t in tensors)
        return found


def moved(tensor: Tensor) -> int:
    """Bytes of different numbers: what is broadcast is read once."""
    n_bytes = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        n_bytes *= size if stride else 1
    return n_bytes


@pytest.mark.long
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_one_device_does_what_is_counted(name: str, axes: Axes) -> None:
    sizes = shape(**SIZES[name])
    # one after the other: the counter of products adds copies of its own
    run, again = step(sizes, axes), step(sizes, axes)
    with FlopCounterMode(display=False) as products:
        run()
    with Operators() as operators:
        again()
    counted = work(sizes, axes)
    assert counted.flops == products.get_total_flops()
    assert counted.bytes == pytest.approx(operators.bytes, rel=0.03)
    assert counted.kernels == pytest.approx(operators.kernels, rel=0.02)
    assert counted.sent_bytes == counted.collectives == 0


def made(sizes: DecoderShape, strategies: str, ranks: int) -> Plan:
    described = describe(decoder_subject(sizes, batch_size=CELLS).module, batch_size=CELLS)
    return plan(
        profile_of_module(described),
        devices=ranks,
        strategies=strategies,
        batch_size=CELLS,
        shape=described,
    )


def sent(sizes: DecoderShape, axes: Axes, ranks: int) -> Counter[str]:
    """Bytes that the model hands to collectives, by kind."""
    found: Counter[str] = Counter()
    strata = [
        RankSizes(decoder=sizes, axes=axes, k=k, cells=CELLS, ranks=ranks) for k in range(len(sizes.features))
    ]
    for collective in chain(
        *map(stratum_traffic, strata), border_traffic(sizes, axes, cells=CELLS, ranks=ranks)
    ):
        found[collective.kind] += 4 * int(collective.numbers)
    found["all_reduce"] += 4 * gradient_numbers(sizes, axes)[0]
    return found


PAPER = {"variant": "paper", "chained": True, "n_batches": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategies", "ranks", "rank", "changes"),
    [
        ("S1,S2", 2, 0, {}),
        ("S1,S5", 2, 0, PAPER),
        ("S1,S5", 4, 0, {}),
        ("S1,S3,S4,S5", 2, 0, {}),
        ("S1,S2,S5", 4, 0, PAPER),
        ("S1,S5,recompute", 2, 0, {}),
        ("S1,nodes", 2, 0, {}),
        ("S1,nodes,S4", 3, 1, PAPER | {"anchors": 480}),
    ],
)
def test_several_devices_do_what_is_counted(
    strategies: str, ranks: int, rank: int, changes: dict[str, Any]
) -> None:
    sizes = shape(**({"anchors": 256, "dim": 32} | changes))
    prescribed = made(sizes, strategies, ranks)
    with fake_world(prescribed.mesh, rank=rank) as mesh:
        planned = PlannedRank(decoder_subject(sizes, batch_size=CELLS), prescribed, mesh)
        batch = dict(planned.batch)
        u, v = batch.pop("u").requires_grad_(), batch.pop("v").requires_grad_()
        decoder = planned.module.get_submodule(sizes.fqn)
        with FlopCounterMode(display=False) as products:
            decoder(u, v, **batch).backward()
        with Operators() as operators:
            decoder(u, v, **batch).backward()
    counted = work(sizes, prescribed.axes, ranks=ranks)
    assert counted.flops == products.get_total_flops()
    assert counted.bytes == pytest.approx(operators.bytes, rel=0.06)
    assert counted.kernels == pytest.approx(operators.kernels, rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategies", "ranks", "rank", "changes"),
    [
        ("S1,S2", 2, 0, {}),
        ("S1,S5", 2, 0, {}),
        ("S1,S5", 3, 2, PAPER),
        ("S1,S3,S5", 4, 3, {}),
        ("S1,S2,S5", 3, 2, {}),
        ("S1,S2,S3,S4,S5", 2, 1, PAPER),
        ("S1,S5,recompute", 2, 1, {}),
        ("S1,nodes", 2, 0, PAPER),
        ("S1,nodes", 3, 1, {}),
        ("S1,nodes,recompute", 3, 1, {}),
    ],
)
def test_bytes_sent_are_those_of_a_simulated_step(
    strategies: str, ranks: int, rank: int, changes: dict[str, Any]
) -> None:
    """Of a rank that has most: of uneven channels the last, of anchors one between two others."""
    sizes = shape(dim=20, **changes)
    prescribed = made(sizes, strategies, ranks)
    found = simulate(lambda: decoder_subject(sizes, batch_size=CELLS), prescribed, rank=rank)
    agreement = sum(1 for _ in decoder_subject(sizes, batch_size=CELLS).module.parameters())
    expected = sent(sizes, prescribed.axes, ranks) + Counter(all_reduce=agreement)
    names = {"exchange": "all_to_all"}
    assert found.comm_bytes == {names.get(kind, kind): n for kind, n in expected.items()}


def test_what_a_stratum_sends() -> None:
    sizes, b, n, d = shape(dim=24, n_batches=2), CELLS, 192, 24
    hidden = stratum_work(sizes, Axes(placement="hidden"), k=2, cells=b, ranks=4)
    assert hidden.collectives == 15, "7 and the scores forward, 6 backward: parallel/s5_hidden/decoder.py"
    chunked = stratum_work(sizes, Axes(placement="hidden", attention="chunked"), k=2, cells=b, ranks=4)
    assert chunked.collectives == 7 + 2 + 6 + 2 + 2, (
        "two chunks of 128 queries, and again in the backward pass"
    )
    gathered = stratum_work(sizes, Axes(placement="hidden-gathered"), k=2, cells=b, ranks=4)
    assert gathered.collectives == 15 - 4 + 2
    assert stratum_work(sizes, Axes(placement="strata"), k=2, cells=b, ranks=4).collectives == 0
    nodes = stratum_work(sizes, Axes(placement="nodes"), k=2, cells=b, ranks=4)
    assert nodes.sent_bytes == 4 * (2 * 4 * 32 * d + 2 * b)
    assert nodes.collectives == 4
    border = border_traffic(sizes, Axes(placement="nodes"), cells=b, ranks=4)
    assert [(c.kind, c.numbers) for c in border] == [
        ("all_reduce", 1),
        ("all_gather", (64 + b) * d + 3),
    ]
    border = border_traffic(sizes, Axes(placement="strata"), cells=b, ranks=4)
    assert [(c.kind, c.numbers) for c in border] == [("all_reduce", 1), ("all_reduce", n * d + b * d + 3)]
    keys, tables = 2 * (4 * d * d + 4 * d), 4 * 2 * (3 * n - 3)
    assert gradient_numbers(sizes, Axes()) == (0, keys + tables)
    assert gradient_numbers(sizes, Axes(placement="hidden")) == (keys, tables)
    assert gradient_numbers(sizes, Axes(placement="strata")) == (keys + tables, 0)


def test_domain_parallelism_divides_rows() -> None:
    # six buckets for four ranks: the first has two
    sizes = shape()
    alone, shared = (
        stratum_work(sizes, Axes(placement=placement), k=2, cells=CELLS, ranks=4)
        for placement in ("replicated", "nodes")
    )
    assert shared.flops == pytest.approx(alone.flops / 3, rel=0.01)
    assert shared.bytes > alone.bytes / 3, "the ends of a run are computed with their neighbours"


def test_fused_attention_leaves_out_what_is_masked() -> None:
    sizes = shape(anchors=201, window=48, strata=2)
    eager, fused = (
        parts(RankSizes(decoder=sizes, axes=Axes(attention=attention), k=1, cells=CELLS))["attention"]
        for attention in ("eager", "fused")
    )
    # 201 queries in 5 buckets, of which the first has no bucket before and the last, of 9, none after
    pairs = 201 * 3 * 48 - 48 * 48 - 9 * 48
    assert [p.flops for p in eager] == [2 * 2 * 240 * 144 * 16, 4 * 2 * 240 * 144 * 16]
    assert [p.flops for p in fused] == [2 * 2 * pairs * 16, 5 * 2 * pairs * 16]


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


def test_recomputing_adds_a_forward_pass() -> None:
    retain, recompute = (work(shape(), Axes(activations=a)).flops for a in ("retain", "recompute"))
    assert recompute == pytest.approx(retain * 4 / 3)
    assert work(shape(), Axes(activations="stream")).flops == retain


def test_a_streamed_chain_passes_its_spine_three_times() -> None:
    chained = shape(chained=True)
    retain, stream = (work(chained, Axes(activations=a)).flops for a in ("retain", "stream"))
    assert stream - retain == 2 * 2 * (2 * 192 * 16**2)


def test_blocks_of_cells_cost_gradients_of_the_key() -> None:
    sizes, cells = shape(anchors=40_000, window=64), 64
    blocks = -(-cells // block_cells(40_000, anchors=40_000))
    assert blocks == 3
    retain, stream = (
        stratum_work(sizes, Axes(activations=a, decode="key-first"), k=1, cells=cells)
        for a in ("retain", "stream")
    )
    assert stream.flops == retain.flops
    # keys selected twice and their gradient; the gradient of all keys made and added; sums and rows of the tables
    added = 4 * (blocks - 1) * 40_000 * (6 * 16 + 4 * 16 + 64)
    assert stream.bytes - retain.bytes == pytest.approx(added, rel=0.01)


@pytest.mark.parametrize("chained", [False, True])
def test_strata_are_dealt_by_their_cost(chained: bool) -> None:
    sizes, axes = shape(strata=9, chained=chained), Axes(placement="strata")
    costs = stratum_seconds(sizes, axes, cells=CELLS, rates=rates(matmul_flops=1e6))
    assert len(costs) == 9
    assert costs[0] < costs[1] / 3, "the first stratum has no key"
    ends = deal(costs, 3)
    spine = 3 * 2 * 192 * 16**2 / 1e6
    slowest = max(sum(costs[a:b]) + (chained * spine * max(0, a - 1)) for a, b in pairwise((0, *ends)))
    mesh = MeshShape(data=1, model=3)
    assert seconds(axes, mesh, sizes, matmul_flops=1e6) == pytest.approx(slowest)
    assert seconds(axes, mesh, sizes, matmul_flops=1e6) < sum(costs) / 2


def test_strata_send_less_than_channels() -> None:
    sizes = shape(anchors=2048, dim=64, window=160, strata=8)

    def numbers(axes: Axes) -> float:
        return sum(sent(sizes, axes, 4).values()) / 4

    # numerics.md: K (2 N 3 w + 10 N D) against N D
    hidden, strata = numbers(Axes(placement="hidden")), numbers(Axes(placement="strata"))
    assert hidden / strata > 50
