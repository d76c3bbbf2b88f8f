"""Claim: S2 trains what one device trains, whatever the strata, their sizes and the other strategies; it counts what
it sends, and refuses what it would not compute. What it keeps is in tests/simulation."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import ModelError
from lightning_amp.installing.install import install
from lightning_amp.techniques.hic.features import log_softmax
from tests.ranks import CountCollectives, run_ranks
from tests.techniques.sharded_cases import (
    Case,
    Model,
    Results,
    differences,
    fake_mesh,
    make_plan,
    mean_gradients,
    model_mesh,
    reference,
    sharded,
)

FEW = {0: 1, 1: 2, 2: 3}
CASES: dict[str, tuple[Case, tuple[str, ...]]] = {
    "few features": (Case(features=FEW), ("S2",)),
    "one cell": (Case(cells=1, n_batches=1), ("S2", "S3")),
    "convolution": (Case(key="convolution", features={1: 2}), ("S2", "S4")),
    "after S5": (Case(features=FEW), ("S5", "S2")),
    "binarized, S5": (Case(binarized=True), ("S2", "S5")),
    "all": (Case(chained=True, features={2: 2}), ("S2", "S3", "S4", "S5")),
}
"""The forms that test_exactness_matrix.py does not have."""
CASES_BY_RANKS = {2: ("after S5",), 3: tuple(CASES)}


def body(rank: int, world_size: int, expected: dict[str, Results]) -> dict[str, list[str]]:
    mesh = model_mesh(world_size)
    if world_size == 2:
        the_mean_has_gradients(mesh)
        what_is_not_used_has_no_gradient(mesh)
        collectives_are_counted(mesh)
    return {name: differences(sharded(*CASES[name], mesh), results) for name, results in expected.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", CASES_BY_RANKS)
def test_loss_gradients_and_steps_are_those_of_one_device(world_size: int, tmp_path: Path) -> None:
    expected = {name: reference(CASES[name][0]) for name in CASES_BY_RANKS[world_size]}
    for found in run_ranks(body, world_size, tmp_path, expected, timeout=180):
        assert found == {name: [] for name in expected}


def the_mean_has_gradients(mesh: DeviceMesh) -> None:
    for case in (Case(), Case(features=FEW, chained=True)):
        expected = mean_gradients(case)
        for strategies in (("S2",), ("S2", "S5")):
            assert differences(mean_gradients(case, strategies, mesh), expected) == []


def what_is_not_used_has_no_gradient(mesh: DeviceMesh) -> None:
    """Not one of zeros: weight decay would act on it."""
    for strategies in (("S2",), ("S2", "S5")):
        model = Model(Case(binarized=True))
        install(model, make_plan(strategies, mesh["model"].size()), mesh)
        model().backward()
        assert model.decoder.strata_weights.grad is None
        assert model.decoder.head.weight.grad is None  # type: ignore[union-attr]
        assert model.decoder.strata[0].log_theta.grad is None
        assert model.decoder.strata[0].scale.grad is not None


def collectives_are_counted(mesh: DeviceMesh) -> None:
    assert count(Case(), ("S2",), mesh) == ({"all_gather_into_tensor": 3, "all_reduce": 1}, {"all_reduce": 3 + 1})
    assert count(Case(binarized=True), ("S2",), mesh) == ({"all_reduce": 1}, {"all_reduce": 1})
    # nothing else is sent for convolution keys; gloo adds up parts by an all-to-all
    assert count(Case(key="convolution"), ("S2", "S5"), mesh) == (
        {"alltoall_base_": 3, "all_gather_into_tensor": 3, "all_reduce": 1},
        {"all_gather_into_tensor": 3 + 1, "all_reduce": 3 + 1},
    )


def count(case: Case, strategies: tuple[str, ...], mesh: DeviceMesh) -> tuple[Counter[str], Counter[str]]:
    model = Model(case)
    install(model, make_plan(strategies, mesh["model"].size()), mesh)
    with CountCollectives() as forward:
        loss = model()
    with CountCollectives() as backward:
        loss.backward()
    return forward.counts, backward.counts


def test_second_derivatives_are_refused() -> None:
    mesh = fake_mesh(rank=0, ranks=1)
    model = Model(Case(anchors=9))
    install(model, make_plan(("S2",), 1), mesh)
    x = torch.ones(2, 3, requires_grad=True)
    for value, leaf in ((model(), model.u), (log_softmax(x, mesh["model"]).square().sum(), x)):
        with pytest.raises(ModelError, match="second derivative"):
            torch.autograd.grad(value, [leaf], create_graph=True)
