"""Claim: a rank takes its part of a whole checkpoint, clipping is that of one device, and a run that ends early leaves
nan, never values of another step."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.errors import DataError, InstallError
from lightning_amp.lightning.checkpoints.probe_optimizer import mixes, mixes_elements, mixes_parameters
from lightning_amp.lightning.checkpoints.shards import Shards, check_optimizers, restore
from lightning_amp.lightning.checkpoints.stage_parameters import StageParameters
from lightning_amp.lightning.checkpoints.write_checkpoint import Part
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter, shard_parameter
from lightning_amp.techniques.ranks.shards import Runs
from tests.ranks import CountCollectives, run_ranks
from tests.techniques.hic.features.test_s2 import fake_mesh
from tests.techniques.hic.features.test_wide_linear import HIDDEN, inputs, make, put_in
from tests.techniques.sharded_cases import differences, model_mesh

FEATURES = 7


class Twice(nn.Module):
    """A network under two names, which a state dict lists twice."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = self.alias = net


def test_a_rank_takes_its_part_of_a_checkpoint_which_stays_as_it_was() -> None:
    """Ranks that save and go on from each other's checkpoints are in test_resume.py."""
    whole = Twice(make(FEATURES))
    optimizer = torch.optim.Adam(whole.parameters(), amsgrad=True)
    whole.net(inputs(FEATURES)).square().mean().backward()
    optimizer.step()
    saved, states = whole.state_dict(), optimizer.state_dict()
    before = copy.deepcopy(saved), copy.deepcopy(states["state"])
    net, sharded = shared_weight()
    model = Twice(net)
    shards = Shards(model, sharded)
    (own,) = shards.own_optimizer_states([torch.optim.Adam(model.parameters(), amsgrad=True)], [states])
    state: Any = shards.own_state(saved)
    assert differences(saved, before[0]) == []
    assert all(differences(states["state"][index], values) == [] for index, values in before[1].items())
    columns = [(state[f"{name}.0.weight"], before[0]["net.0.weight"]) for name in ("net", "alias")]
    columns += [(own["state"][0][name], before[1][0][name]) for name in ("exp_avg", "max_exp_avg_sq")]
    for part, value in columns:
        assert torch.equal(part, value[:, :4]), "those of rank 0"
        assert part.untyped_storage().nbytes() == part.nbytes, "no view of the whole"
    local: Any = model.state_dict()
    state = shards.saved_state(local, "whole")
    assert local["net.0.weight"].shape[1] < FEATURES == state["net.0.weight"].shape[1]
    assert state["net.0.weight"] is state["alias.0.weight"]
    assert state._metadata == local._metadata


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


def test_state_may_be_nested_and_a_count_of_one_element_is_of_the_parameter() -> None:
    model, sharded = shared_weight()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    shard = sharded[0].shard
    one, whole = torch.ones_like(shard), torch.arange(5.0 * FEATURES).view(5, FEATURES)
    optimizer.state[shard] = {"step": torch.ones(1), "m": one, "none": None, "past": [one, 1.0], "of": {0.9: (one,)}}
    shards = Shards(model, sharded)
    saved = shards.saved_optimizer_state(optimizer, optimizer.state_dict(), "in parts")
    (values,) = saved["state"].values()
    assert isinstance(values["step"], Tensor)
    assert all(isinstance(part, Part) for part in (values["m"], values["past"][0], values["of"][0.9][0]))
    values |= {"m": whole, "past": [whole, 1.0], "of": {0.9: (whole,)}}
    (own,) = shards.own_optimizer_states([optimizer], [saved])
    optimizer.load_state_dict(own)
    found = optimizer.state[shard]
    assert all(torch.equal(part, whole[:, :4]) for part in (found["m"], found["past"][0], found["of"][0.9][0]))
    assert (found["step"].shape, found["none"], found["past"][1]) == ((1,), None, 1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_agree_which_state_of_one_element_is_of_the_elements(rank: int) -> None:
    """Rank 1 has one element of three."""
    model = nn.Module()
    weight, model.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
    one = shard_parameter(model, "weight", weight, parts=Runs(mesh=fake_mesh(rank=rank, ranks=2)["model"], n=3, dim=0))
    optimizer = torch.optim.SGD(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"m": torch.ones_like(parameter), "scale": torch.ones(1)}
    shards = Shards(model, [one])
    saved = shards.saved_optimizer_state(optimizer, optimizer.state_dict(), "in parts")
    values = next(v for p, v in zip(model.parameters(), saved["state"].values(), strict=True) if p is one.shard)
    assert (type(values["m"]), type(values["scale"])) == (Part, Tensor)
    values["m"] = torch.arange(3.0)
    (own,) = shards.own_optimizer_states([optimizer], [saved])
    optimizer.load_state_dict(own)
    assert optimizer.state[one.shard]["m"].tolist() == [[0.0, 1.0], [2.0]][rank]
    assert optimizer.state[one.shard]["scale"].shape == (1,)


def test_a_state_for_other_groups_is_refused_by_torch() -> None:
    model, sharded = shared_weight()
    one, two = (torch.optim.SGD([{"params": [p]} for p in list(model.parameters())[:n]]) for n in (1, 2))
    (own,) = Shards(model, sharded).own_optimizer_states([two], [one.state_dict()])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        two.load_state_dict(own)


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
        Shards(model, sharded).saved_optimizer_state(optimizer, optimizer.state_dict(), "whole")


class ByNorm(torch.optim.Optimizer):
    """As LAMB: the step of a parameter is as long as the parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad * p.norm() / p.grad.norm())


class ByNormLater(ByNorm):
    """A schedule begins at zero, and elements are mixed in the second group only."""

    def __init__(self, parameters: Any) -> None:
        super().__init__([{"params": parameters, "lr": 0.0}, {"params": [nn.Parameter(torch.randn(2))], "mixed": 1}])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad * (p.norm() / p.grad.norm() if group.get("mixed") else 1))


class Wraps(torch.optim.AdamW):
    """Its step would be that of the run's optimiser."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.inner = torch.optim.SGD(parameters, 0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Plain(torch.optim.AdamW):
    pass


class Counts(Plain):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.kept, self.steps, self.past = list(parameters), torch.zeros(()), list[int]()

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.past.append(int(self.steps))
        super().step()


class Fails(Plain):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("only as it was made")


class ByNormOfAll(Plain):
    """As one that clips by itself, or that finds its learning rate from all parameters."""

    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        for grad in grads:
            grad /= nn.utils.get_total_norm(grads).clone()
        super().step()


def test_an_optimiser_that_mixes_elements_or_parameters_is_known() -> None:
    cases: list[tuple[Any, bool | None, bool | None]] = [
        (ByNorm, True, False), (ByNormLater, True, False), (ByNormOfAll, True, True), (Plain, False, False),
        (Fails, None, None), (Wraps, None, None), (Counts, False, False),
    ]  # fmt: skip
    for kind, right, of_parameters in cases:
        optimizer: Any = kind([nn.Parameter(torch.randn(3))])
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        before = torch.random.get_rng_state()
        assert [mixes_elements(optimizer, flat=flat) for flat in (True, False)] == [right, right], kind
        assert mixes_parameters(optimizer) is of_parameters, kind
        assert torch.equal(torch.random.get_rng_state(), before)
        assert not optimizer.state
        assert not getattr(optimizer, "steps", 0)
        assert not getattr(optimizer, "past", [])


def test_a_class_with_the_name_of_one_of_torch_is_tried() -> None:
    named = type("Muon", (Plain,), {})
    assert not mixes(named([nn.Parameter(torch.randn(3))]), ("Muon",), mixes_parameters, "parameter", "pipeline")


def test_an_optimiser_that_cannot_be_tried_is_warned_of_in_one_form() -> None:
    model, sharded = shared_weight()
    staged = StageParameters(model, [(model[0], 0), (model[2], 1)], fake_mesh(rank=0, ranks=2))
    optimizer = Fails(model.parameters())
    asked = "It could not be tried whether the optimizer 'Fails' updates each {} separately.*one device. Leave {} out"
    with pytest.warns(UserWarning, match=asked.format("element", "S2")):
        check_optimizers([optimizer], sharded)
    with pytest.warns(UserWarning, match=asked.format("parameter", "pipeline")):
        staged._check_optimizers([optimizer])
