"""Claim: the work model counts a real step's operations, bytes, kernels and collectives."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.count_operators import OperatorCounter
from lightning_amp.costs.model_shape import DecoderShape, profile_of_module
from lightning_amp.installing.describe_module import describe
from lightning_amp.models.decoders.stratum_keys import ConvolutionKey
from lightning_amp.planning.plan.plan import Axes, Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.sizes import RankSizes
from lightning_amp.planning.time.operator_costs import parts
from lightning_amp.simulation.measured_step import PlannedRank
from lightning_amp.simulation.models_without_values import decoder_subject
from lightning_amp.simulation.simulate import fake_world, simulate
from lightning_amp.techniques.hic.attention.install import chunk_attention, fuse_attention
from lightning_amp.techniques.hic.rows import StreamStrata, chunk_buckets
from lightning_amp.techniques.hic.scores.s4_key_first import key_first
from lightning_amp.techniques.hic.scores.sparse_likelihood import sparse_likelihood
from lightning_amp.techniques.hic.strata.stream import stream_strata
from tests.planning.work_cases import CELLS, sent, shape, work

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
    Axes(likelihood="sparse"),
    Axes(activations="stream"),
    Axes(decode="key-first", likelihood="sparse", activations="stream"),
    Axes(attention="fused", decode="key-first"),
    Axes(attention="sdpa", likelihood="sparse"),
]


ADDING = {torch.ops.aten.baddbmm_: lambda total, left, right, out_shape, **_: 2 * left.numel() * right[-1]}


def planned(decoder: nn.Module, axes: Axes, window: int) -> None:
    """The decoder's leaves as the axes ask for."""
    for stratum in decoder.strata:
        if axes.decode == "key-first":
            stratum.decode = key_first(stratum.decode)
        if axes.attention in ("fused", "sdpa") and stratum.key is not None:
            kernel = "products" if axes.attention == "fused" else "sdpa"
            stratum.key.attention = fuse_attention(stratum.key.attention, kernel=kernel)
        elif axes.attention != "eager" and stratum.key is not None:
            retain = axes.attention == "chunked-retained"
            chunked = chunk_attention(stratum.key.attention, buckets=chunk_buckets(window), retain=retain)
            stratum.key.attention = chunked
        if axes.likelihood == "sparse":
            stratum.likelihood = sparse_likelihood(stratum.likelihood)
    if axes.activations == "stream":
        spec = StreamStrata(cells=CELLS)
        for name, module in stream_strata(decoder, spec, None).swaps.items():
            decoder.set_submodule(name, module)


def step(sizes: DecoderShape, axes: Axes) -> Callable[[], None]:
    """Forward and backward pass of a decoder, without values."""
    subject = decoder_subject(sizes, batch_size=CELLS)
    decoder = subject.module.get_submodule(sizes.fqn)
    planned(decoder, axes, sizes.window)
    batch = dict(subject.batch)
    u, v = batch.pop("u").requires_grad_(), batch.pop("v").requires_grad_()
    return lambda: decoder(u, v, **batch).backward()


def test_operations_of_a_convolution() -> None:
    # forward: of the gradient of a depthwise weight the counter counts the channels twice
    key = ConvolutionKey(16, 2).to("meta")
    with FlopCounterMode(display=False) as counter:
        key(torch.empty(192, 16, device="meta"))
    sizes = RankSizes(decoder=shape(attention=False), axes=Axes(), k=2, cells=CELLS)
    forward, backward = parts(sizes)["convolution"]
    assert forward.flops == counter.get_total_flops() == backward.flops / 2


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize(
    ("axes", "name"),
    # each with two of the four sizes, in turn
    [row for i, row in enumerate(product(AXES, SIZES)) if (i // 4 + i) % 2],
    ids=str,
)
def test_one_device_does_what_is_counted(name: str, axes: Axes) -> None:
    sizes = shape(**SIZES[name])
    # one after the other: the counter of products adds copies of its own; nor do its hooks know the backward pass of
    # a streamed stratum, which computes the same products
    run, again = step(sizes, replace(axes, activations="retain")), step(sizes, axes)
    with FlopCounterMode(display=False, custom_mapping=ADDING) as products:
        run()
    with OperatorCounter() as operators:
        again()
    counted = work(sizes, axes)
    spine = (
        sum(
            parts(RankSizes(decoder=sizes, axes=axes, k=k, cells=CELLS))["spine"][0].flops
            for k in range(len(sizes.features))
        )
        if axes.activations == "stream"
        else 0
    )
    if axes.attention != "sdpa":  # a kernel on the meta device tells no products
        assert counted.flops == products.get_total_flops() + spine
    # of a sparse likelihood numbers stand for the time that they take in a cache
    if axes.attention not in ("fused", "sdpa"):  # of which the numbers that stay in the cache are not counted
        assert counted.bytes == pytest.approx(operators.bytes, rel=0.06 if axes.likelihood == "sparse" else 0.03)
    assert counted.kernels == pytest.approx(operators.kernels, rel=0.02)
    assert counted.sent_bytes == counted.collectives == 0


def made(sizes: DecoderShape, strategies: str, ranks: int) -> Plan:
    described = describe(decoder_subject(sizes, batch_size=CELLS).module, batch_size=CELLS)
    return plan(profile_of_module(described), devices=ranks, strategies=strategies, batch_size=CELLS, shape=described)


PAPER = {"variant": "paper", "chained": True, "n_batches": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategies", "ranks", "rank", "changes"),
    [
        ("S1,S2", 2, 0, {}),
        ("S1,S5", 2, 0, PAPER),
        ("S1,S2,S5", 4, 0, PAPER),
        ("S1,S5,recompute", 2, 0, {}),
        ("S1,nodes", 2, 0, {}),
        ("S1,nodes,S4", 3, 1, PAPER | {"anchors": 480}),
    ],
)
def test_several_devices_do_what_is_counted(strategies: str, ranks: int, rank: int, changes: dict[str, Any]) -> None:
    sizes = shape(**({"anchors": 256, "dim": 32} | changes))
    prescribed = made(sizes, strategies, ranks)
    with fake_world(prescribed.mesh, rank=rank) as mesh:
        planned = PlannedRank(decoder_subject(sizes, batch_size=CELLS), prescribed, mesh)
        batch = dict(planned.batch)
        u, v = batch.pop("u").requires_grad_(), batch.pop("v").requires_grad_()
        decoder = planned.module.get_submodule(sizes.fqn)
        with FlopCounterMode(display=False) as products:
            decoder(u, v, **batch).backward()
        with OperatorCounter() as operators:
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
        ("S1,S5", 3, 2, PAPER),
        ("S1,S2,S5", 3, 2, {}),
        ("S1,S2,S3,S4,S5", 2, 1, PAPER),
        ("S1,S5,recompute", 2, 1, {}),
        ("S1,nodes", 2, 0, PAPER),
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
