"""Claim: checkpoints hold whole tensors and fit any number of ranks, clipping is that of one device, and a run that
ends early leaves nan, never values of another step."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.errors import DataError, InstallError
from lightning_amp.lightning.checkpoints.shards import Shards, check_optimizers, restore
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter, shard_parameter
from lightning_amp.techniques.ranks.shards import Runs
from tests.ranks import CountCollectives, run_ranks
from tests.techniques.hic.features.test_s2 import fake_mesh
from tests.techniques.hic.features.test_wide_linear import HIDDEN, inputs, make, put_in
from tests.techniques.sharded_cases import differences, model_mesh

FEATURES = 7
Checkpoint = tuple[dict[str, Any], dict[str, Any]]


class Twice(nn.Module):
    """The same networks under two names, which a state dict lists twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make(FEATURES)
        self.alias = self.net
        self.norm = nn.BatchNorm1d(FEATURES).double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(self.norm(x))
        return result


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, the wide layer's in the second."""
    wide = [model.get_parameter("net.0.weight")]
    rest = [p for p in model.parameters() if p is not wide[0]]
    return torch.optim.Adam([{"params": rest}, {"params": wide, "lr": 3e-3}], lr=1e-2, amsgrad=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        (model(inputs(FEATURES, step)) - 1).square().mean().backward()
        optimizer.step()


def flat(checkpoint: Checkpoint) -> dict[str, Tensor]:
    state, optimizer = checkpoint
    return {f"module {name}": value.double() for name, value in state.items()} | {
        f"{name} of {index}": value
        for index, kept in sorted(optimizer["state"].items())
        for name, value in kept.items()
    }


def continued(rank: int, world_size: int, checkpoint: Checkpoint | None, steps: range) -> Checkpoint:
    """Load a checkpoint on ranks, train, and return the next checkpoint."""
    model = Twice()
    installed = put_in(model.net, model_mesh(world_size))
    shards = Shards(model, installed.sharded)
    optimizer = adam(model)
    if checkpoint is not None:
        # ranks share the memory of tensors that they are given when they start, and optimisers write to what they load
        checkpoint = copy.deepcopy(checkpoint)
        before = copy.deepcopy(flat(checkpoint))
        (own,) = shards.own_optimizer_states([optimizer], [checkpoint[1]])
        model.load_state_dict(shards.own_state(checkpoint[0]))
        optimizer.load_state_dict(own)
        assert all(torch.equal(a, b) for a, b in zip(flat(checkpoint).values(), before.values(), strict=True))
        kept = own["state"][len(list(model.parameters())) - 1]["exp_avg"]
        assert kept.shape == installed.sharded[0].shard.shape
        assert kept.untyped_storage().nbytes() == kept.nbytes, "no view of the whole"
    train(model, optimizer, steps)
    local = model.state_dict()
    state = shards.saved_state(local, in_parts=False)
    assert local["net.0.weight"].shape[1] < FEATURES, "the state that was given stays as it was"
    assert state._metadata == local._metadata  # type: ignore[attr-defined]
    return state, shards.saved_optimizer_state(optimizer, optimizer.state_dict(), in_parts=False)


@pytest.mark.ranks
def test_a_checkpoint_moves_from_two_ranks_to_three_to_one(tmp_path: Path) -> None:
    model = Twice()
    optimizer = adam(model)
    checkpoint = None
    for ranks, steps in ((2, range(2)), (3, range(2, 4))):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        found = run_ranks(continued, ranks, folder, checkpoint, steps)
        train(model, optimizer, steps)
        expected = flat((model.state_dict(), optimizer.state_dict()))
        for one in found:
            assert differences(flat(one), expected) == []
        checkpoint = found[0]
    alone = Twice()
    last = adam(alone)
    alone.load_state_dict(checkpoint[0])  # type: ignore[index]
    last.load_state_dict(checkpoint[1])  # type: ignore[index]
    for each, its in ((model, optimizer), (alone, last)):
        train(each, its, range(4, 6))
    assert (
        differences(flat((alone.state_dict(), last.state_dict())), flat((model.state_dict(), optimizer.state_dict())))
        == []
    )


def clips_as_one_device(rank: int, world_size: int) -> None:
    mesh = model_mesh(world_size)
    for features in (FEATURES, 3):
        for max_norm in (1e-3, 1e3):
            clipped_alike(mesh, features, max_norm)
    without_gradients(mesh)
    each_parameter_comes_back(mesh, world_size)


def clipped_alike(mesh: Any, features: int, max_norm: float) -> None:
    one, model = make(features), make(features)
    sharded = put_in(model, mesh).sharded
    shards = Shards(model, sharded)
    for module in (one, model):
        module(inputs(features)).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(one.parameters(), max_norm)
    with CountCollectives() as counted:
        norm = shards.clip(model.parameters(), max_norm)
    assert counted.counts == {"all_reduce": 1}
    assert sharded[0].shard.grad is not None
    found = {"norm": norm, "wide": sharded[0].join(sharded[0].shard.grad), "bias": model[0].bias.grad}
    wanted = {"norm": expected, "wide": one[0].weight.grad, "bias": one[0].bias.grad}
    assert differences(found | {"last": model[2].weight.grad}, wanted | {"last": one[2].weight.grad}) == []
    rest = [model[0].bias, model[2].weight]
    with CountCollectives() as counted:
        alone = shards.clip(iter(rest), max_norm)
    assert counted.total == 0, "no shard among the parameters"
    norms = torch.stack([torch.linalg.vector_norm(p.grad) for p in rest])  # type: ignore[arg-type]
    assert alone <= max(max_norm, 1e-3) * 1.01 or torch.isclose(alone, norms.norm())


def without_gradients(mesh: Any) -> None:
    model = make(FEATURES)
    assert Shards(model, put_in(model, mesh).sharded).clip(model.parameters(), 1.0) == 0


def each_parameter_comes_back(mesh: Any, world_size: int) -> None:
    """All ranks' values at the end of a complete run, also where a rank has none and along any dimension."""
    for shape, dim in (((5, 3), 0), ((3, 5), 1), ((2, 3, 4), 1), ((2,), 0), ((7,), 0)):
        whole = nn.Parameter(torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape))
        values = whole.detach().clone()
        sharded = shard_parameter(
            nn.Module(), "table", whole, parts=Runs(mesh=mesh["model"], n=whole.shape[dim], dim=dim)
        )
        sharded.offload()
        assert not sharded.trained
        with torch.no_grad():
            sharded.shard.mul_(-1)
        assert sharded.trained
        restore([sharded], complete=True)
        assert torch.equal(whole, -values)
        assert whole.is_contiguous()


@pytest.mark.ranks
def test_norms_and_values_over_three_ranks(tmp_path: Path) -> None:
    run_ranks(clips_as_one_device, 3, tmp_path)


def shared_weight(rank: int = 0, ranks: int = 2) -> tuple[nn.Sequential, list[ShardedParameter]]:
    model = make(FEATURES)
    return model, put_in(model, fake_mesh(rank=rank, ranks=ranks)).sharded


def test_a_run_that_ends_early_leaves_nan(recwarn: pytest.WarningsRecorder) -> None:
    _, sharded = shared_weight(rank=1)
    values = sharded[0].whole.detach().clone()
    restore(sharded, complete=False)
    assert torch.equal(sharded[0].whole, values), "nothing was trained, nothing is lost"
    assert not recwarn.list
    with torch.no_grad():
        sharded[0].shard.add_(1)
    with pytest.warns(
        UserWarning, match=r"ended early, and 1 parameters, of shapes such as \[\(5, 7\)\].*Load a checkpoint"
    ):
        restore(sharded, complete=False)
    assert sharded[0].whole[:, :4].isnan().all(), "columns of the other rank"
    assert torch.equal(sharded[0].whole[:, 4:], values[:, 4:] + 1)


@pytest.mark.parametrize("change", [lambda shard: shard.data.add_(1), lambda shard: shard.add_(0)])
def test_what_autograd_does_not_see_and_what_changed_nothing_here_count_as_trained(change: Any) -> None:
    """Other ranks may have changed theirs."""
    _, sharded = shared_weight()
    with torch.no_grad():
        change(sharded[0].shard)
    assert sharded[0].trained


@pytest.mark.parametrize(
    ("value", "found"), [(torch.ones(HIDDEN, 4), r"\(5, 4\)"), (torch.ones(HIDDEN, 8), r"\(5, 8\)"), (None, "None")]
)
def test_state_of_another_size_is_refused(value: Tensor | None, found: str) -> None:
    model, sharded = shared_weight()
    state = {**model.state_dict(), "0.weight": value}
    with pytest.raises(DataError, match=rf"cannot load '0.weight' .* found {found}, .* shape \(5, 7\) is required"):
        Shards(model, sharded).own_state(state)
    del state["0.weight"]
    assert Shards(model, sharded).own_state(state) == state, "what is missing is load_state_dict's to refuse"


def test_state_of_an_optimizer_of_another_size_is_refused() -> None:
    model, sharded = shared_weight()
    optimizer = torch.optim.RMSprop(model.parameters())
    model(inputs(FEATURES)).sum().backward()
    optimizer.step()
    with pytest.raises(DataError, match=r"cannot load 'square_avg' from the checkpoint: found \(5, 4\)"):
        Shards(model, sharded).own_optimizer_states([optimizer], [optimizer.state_dict()])


def test_optimizers_that_mix_elements_are_refused() -> None:
    model, sharded = shared_weight()
    for make_optimizer in (torch.optim.LBFGS, torch.optim.Adafactor):
        with pytest.raises(InstallError, match=f"{make_optimizer.__name__!r} was given 1 parameters that S2 splits"):
            check_optimizers([make_optimizer(model.parameters())], sharded)
        check_optimizers([make_optimizer(model[2].parameters())], sharded)
    check_optimizers([torch.optim.RMSprop(model.parameters())], sharded)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(inputs(FEATURES)).sum().backward()
    optimizer.step()
    with pytest.raises(InstallError, match=r"'Adafactor' keeps 'row_var' of shape \(5, 1\) for a shard"):
        Shards(model, sharded).saved_optimizer_state(optimizer, optimizer.state_dict(), in_parts=False)
