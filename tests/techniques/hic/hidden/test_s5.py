"""Claim: S5, alone and with S3 and S4, has the losses, gradients and steps of one device, from 1/R of the channels.

What it keeps is in tests/simulation.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.installing.install import install
from lightning_amp.models.decoders.stratified import Decode
from lightning_amp.techniques.hic.hidden import HiddenDecode, ShardedLayerNorm
from lightning_amp.techniques.hic.rows import ChunkedAttention, HiddenParallel
from lightning_amp.techniques.hic.scores.s4_key_first import KeyFirst
from lightning_amp.techniques.ranks.shards import shard_channels
from tests.ranks import CountCollectives, run_ranks
from tests.techniques.sharded_cases import (
    Case,
    Model,
    assert_same,
    fake_mesh,
    make_plan,
    model_mesh,
    reference,
    sharded,
    train,
)

GATHER = {"S5": HiddenParallel(gather=True)}
UNEVEN = Case(dim=10, anchors=21)
"""Five pairs of channels: no two, three or four ranks have equal shares; the last bucket is short."""

OTHERS = [
    replace(UNEVEN, variant="paper"),
    replace(UNEVEN, window=40, anchors=9, binarized=True),
    replace(UNEVEN, window=1),
    Case(key="convolution", dim=7),
]
"""The forms that test_exactness_matrix.py does not have."""


def installed(case: Case, strategies: Sequence[str], mesh: DeviceMesh, gather: bool = False) -> Model:
    model = Model(case)
    specs = {"S5": HiddenParallel(gather=gather), "S3": ChunkedAttention(buckets=2)}
    install(model, make_plan(strategies, mesh["model"].size(), specs), mesh)
    return model


def train_all(rank: int, world_size: int) -> None:
    """All cases on this rank, compared with one device."""
    mesh = model_mesh(world_size)
    expected = reference(UNEVEN)
    retain = {"S3": ChunkedAttention(buckets=1, retain=True)}
    assert_same(sharded(UNEVEN, ("S3", "S5"), mesh, specs=retain), expected)
    assert_same(sharded(UNEVEN, ("S5",), mesh, specs=GATHER), expected)
    assert_same(sharded(UNEVEN, ("S3", "S4", "S5"), mesh, specs=GATHER), expected)
    for case in OTHERS:
        strategies = ("S3", "S4", "S5") if case.key == "attention" else ("S4", "S5")
        assert_same(sharded(case, strategies, mesh), reference(case))
    assert_same(sharded(OTHERS[0], ("S5",), mesh, specs=GATHER), reference(OTHERS[0]))
    check_layers_with_other_settings(mesh)
    check_undo_and_frozen_keys(mesh)
    check_norm_and_scatter(mesh["model"])


def check_layers_with_other_settings(mesh: DeviceMesh) -> None:
    """Biases where the reference model has none, and none where it has; and a key of another form."""

    def altered() -> Model:
        torch.manual_seed(3)
        model = Model(UNEVEN).double()
        key = model.decoder.strata[1].key
        key.prenorm = nn.LayerNorm(10, elementwise_affine=False)  # type: ignore[union-attr]
        key.postnorm = nn.LayerNorm(10, bias=False)  # type: ignore[union-attr]
        key.value = nn.Linear(10, 10)  # type: ignore[union-attr]
        key.ff = nn.Linear(10, 20)  # type: ignore[union-attr]
        return model.double()

    model = altered()
    found = train(model, 3, install(model, make_plan(("S5",), mesh["model"].size()), mesh), mesh)
    assert_same(found, train(altered(), 3))


@pytest.mark.ranks
def test_trains_as_one_device_does(tmp_path) -> None:
    run_ranks(train_all, 3, tmp_path, timeout=200)


def check_undo_and_frozen_keys(mesh: DeviceMesh) -> None:
    """What else may happen to a module with S5 installed."""
    world_size, expected = mesh["model"].size(), reference(UNEVEN, 1)
    model = Model(UNEVEN)
    types = {name: type(child) for name, child in model.named_modules()}
    change = install(model, make_plan(("S3", "S4", "S5"), world_size), mesh)
    keys = {id(p) for stratum in model.decoder.strata if stratum.key for p in stratum.key.parameters()}
    assert {id(p) for p in change.partial} == keys, "tables are not shared, their gradients are whole"
    change.undo()
    assert {name: type(child) for name, child in model.named_modules()} == types
    model.load_state_dict(Model(UNEVEN).state_dict())
    assert_same(train(model, 1), expected)

    frozen, loose = (Model(UNEVEN) for _ in range(2))
    for module in (frozen, loose):
        module.decoder.strata[1].key.requires_grad_(False)  # type: ignore[union-attr]
        module.v.requires_grad_(False)
    found = train(frozen, 2, install(frozen, make_plan(("S3", "S5"), world_size), mesh), mesh)
    assert_same(found, train(loose, 2))


def check_norm_and_scatter(mesh: DeviceMesh) -> None:
    """A LayerNorm far from zero in float32, and scores that are handed to the features' owners."""
    world_size, rank, channels = mesh.size(), mesh.get_local_rank(), shard_channels(10, mesh)
    x = 1e4 + torch.randn(50, 10, generator=torch.Generator().manual_seed(0))
    found = ShardedLayerNorm(nn.LayerNorm(10), channels)(x[:, channels.of(rank)])
    exact = nn.LayerNorm(10).double()(x.double())[:, channels.of(rank)]
    # x itself is rounded by up to 5e-4 of its deviation
    assert (found - exact).norm() < 1e-3 * exact.norm(), "sums of squares would lose all digits"
    assert ShardedLayerNorm(nn.LayerNorm(10), channels)(x[:, channels.of(rank)].bfloat16()).dtype == torch.bfloat16

    generator = torch.Generator().manual_seed(1)
    u, key = (torch.randn(n, 10, dtype=torch.float64, generator=generator) for n in (4, 9))
    for nodes in (torch.tensor([8, 0, 3, 3, 5, 7, 1]), torch.tensor([2]), torch.arange(9)):
        run = -(-len(nodes) // world_size)
        columns = slice(rank * run, (rank + 1) * run)
        upstream = torch.randn(4, len(nodes), dtype=torch.float64, generator=generator)
        for inner in (Decode(), KeyFirst()):
            parts = [t[:, channels.of(rank)].requires_grad_() for t in (u, key)]
            own = HiddenDecode(inner, mesh).scatter(*parts, nodes, run)
            expected = (u @ key.T)[:, nodes]
            torch.testing.assert_close(own, expected[:, columns], rtol=1e-12, atol=1e-12)
            grads = torch.autograd.grad(own, parts, upstream[:, columns])
            whole = [t.clone().requires_grad_() for t in (u, key)]
            expected_grads = torch.autograd.grad((whole[0] @ whole[1].T)[:, nodes], whole, upstream)
            for grad, expected_grad in zip(grads, expected_grads, strict=True):
                torch.testing.assert_close(grad, expected_grad[:, channels.of(rank)], rtol=1e-12, atol=1e-12)


CHUNKS = 3
# those of layer norms are c10d's
FORWARD = {"all_reduce": 1 + CHUNKS + 1, "reduce_scatter_tensor": 3, "_allgather_base_": 2}
BACKWARD = {"allreduce_": 2, "all_reduce": 1 + 2 * CHUNKS, "all_gather_into_tensor": 3 + 1}


@pytest.mark.parametrize(("case", "strategies", "gather", "forward", "backward"), [
    (Case(), ("S3", "S5"), False, FORWARD, BACKWARD),
    (Case(), ("S5",), False, FORWARD | {"all_reduce": 3}, BACKWARD | {"all_reduce": 2}),
    (Case(variant="paper"), ("S5",), False, FORWARD | {"all_reduce": 3, "_allgather_base_": 1},
        BACKWARD | {"allreduce_": 1, "all_reduce": 2}),
    (Case(), ("S3", "S5"), True, FORWARD | {"all_reduce": 1, "all_gather_into_tensor": 1},
        {"allreduce_": 2, "all_gather_into_tensor": 3 + 1, "reduce_scatter_tensor": 1}),
    (Case(key="convolution"), ("S5",), False, {"all_reduce": 1}, {"all_gather_into_tensor": 1}),
])  # fmt: skip
def test_counts_of_one_stratum_and_the_border(
    case: Case, strategies: tuple[str, ...], gather: bool, forward: dict[str, int], backward: dict[str, int]
) -> None:
    model = installed(replace(case, distances=(1,)), strategies, fake_mesh(rank=0, ranks=3), gather)
    with CountCollectives() as first:
        loss = model()
    with CountCollectives() as second:
        loss.backward()
    assert (dict(first.counts), dict(second.counts)) == (forward, backward)
