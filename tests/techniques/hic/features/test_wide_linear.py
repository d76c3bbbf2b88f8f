"""Claim: a wide layer split by its input features trains as the whole one; its owner alone has gradient and state."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrizations

from lightning_amp.costs.rule import Rule
from lightning_amp.errors import InstallError
from lightning_amp.installing.install import Installed, change_of, install
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.hic.features import share_rows
from lightning_amp.techniques.hic.rows import RowParallelLinear
from tests.ranks import CountCollectives, run_ranks
from tests.techniques.sharded_cases import differences, fake_mesh, make_plan, model_mesh

CELLS, HIDDEN = 6, 5


def make(features: int, *, bias: bool = True) -> nn.Sequential:
    """A wide layer and one that every rank has whole."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, HIDDEN, bias=bias), nn.Tanh(), nn.Linear(HIDDEN, 2)).double()


def inputs(features: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(CELLS, features, dtype=torch.float64, generator=generator)


def wide_plan(ranks: int, fqn: str = "0") -> Plan:
    rule = Rule(fqn=fqn, spec=RowParallelLinear(), strategy="S2", why="test")
    return replace(make_plan(("S2",), ranks), rules=(rule,))


def put_in(model: nn.Module, mesh: DeviceMesh) -> Installed:
    return install(model, wide_plan(mesh["model"].size()), mesh)


def train(model: nn.Module, features: int, steps: int = 3) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.5)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(inputs(features, step)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return optimizer, losses


def results(model: nn.Module, losses: list[Tensor], weight: Tensor, grad: Tensor) -> dict[str, Tensor]:
    found = {f"loss {step}": loss for step, loss in enumerate(losses)} | {"weight": weight, "grad": grad}
    for name, parameter in model.named_parameters():
        if name != "0.weight":
            found |= {name: parameter.detach(), f"gradient of {name}": parameter.grad}  # type: ignore[dict-item]
    return found


def trains_as_one_device(mesh: DeviceMesh, features: int, *, bias: bool) -> None:
    one, model = (make(features, bias=bias) for _ in range(2))
    installed = put_in(model, mesh)
    (sharded,) = installed.sharded
    assert installed.partial == []
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in one.named_parameters()]
    assert model[0].weight is sharded.shard
    _, losses = train(one, features)
    optimizer, own_losses = train(model, features)
    assert sharded.shard.grad is not None
    joined, grad = sharded.join(sharded.shard), sharded.join(sharded.shard.grad)
    expected = results(one, losses, one[0].weight.detach(), one[0].weight.grad)  # type: ignore[arg-type]
    assert differences(results(model, own_losses, joined, grad), expected) == []
    assert optimizer.state[sharded.shard]["square_avg"].shape == sharded.shard.shape
    assert sharded.shard.shape[1] <= -(-features // mesh["model"].size())
    old = sharded.whole
    sharded.restore()
    installed.undo()
    assert model[0].weight is old
    assert differences({"weight": model[0].weight}, {"weight": one[0].weight}) == []


def gives_x_its_gradient(mesh: DeviceMesh, features: int) -> None:
    one, model = make(features), make(features)
    put_in(model, mesh)
    whole = [inputs(features).view(2, CELLS // 2, features).requires_grad_() for _ in range(2)]
    for module, x in zip((one, model), whole, strict=True):
        module(x).square().sum().backward()
    assert differences({"x": whole[1].grad}, {"x": whole[0].grad}) == []  # type: ignore[dict-item]


def counts_and_memory(mesh: DeviceMesh, features: int) -> None:
    model = make(features)
    put_in(model, mesh)
    stored = []

    def pack(value: Tensor) -> Tensor:
        stored.append(value.untyped_storage().nbytes())
        return value

    x = inputs(features)
    with CountCollectives() as forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y = model[0](x)
    with CountCollectives() as backward:
        y.sum().backward()
    assert forward.counts == {"all_reduce": 1}
    assert backward.total == 0
    assert max(stored) == 8 * CELLS * -(-features // 2) < 8 * CELLS * features
    with CountCollectives() as backward:
        model[0](x.requires_grad_()).sum().backward()
    assert backward.counts == {"all_reduce": 1, "all_gather_into_tensor": 1}


def body(rank: int, world_size: int) -> None:
    mesh = model_mesh(world_size)
    for features in (9, 5, 3):
        trains_as_one_device(mesh, features, bias=features != 9)
        gives_x_its_gradient(mesh, features)
    if world_size == 2:
        counts_and_memory(mesh, 200)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_split_layer_is_the_whole_layer(world_size: int, tmp_path: Path) -> None:
    """9 features on 4 ranks are 3, 3, 3, 0 columns; 5 are 2, 2, 1, 0."""
    run_ranks(body, world_size, tmp_path)


def test_frozen_weights_stay_frozen_and_the_mode_is_kept() -> None:
    model = make(9).eval()
    model[0].weight.requires_grad_(False)
    (sharded,) = put_in(model, fake_mesh(rank=1, ranks=2)).sharded
    assert not sharded.shard.requires_grad
    assert not model[0].training
    assert "in_features=9, out_features=5, ranks=2" in repr(model)
    model[0].weight.requires_grad_(True)
    sharded.restore_own()
    assert sharded.whole.requires_grad, "unfrozen in the run"


def hooked() -> nn.Linear:
    linear = nn.Linear(9, 2)
    linear.register_forward_hook(lambda module, args, result: 2 * result)
    return linear


@pytest.mark.parametrize(
    ("layer", "message"),
    [(parametrizations.weight_norm(nn.Linear(9, 2)), "is a 'ParametrizedLinear'"), (hooked(), "has forward_hooks")],
)
def test_refuses_other_layers(layer: nn.Module, message: str) -> None:
    with pytest.raises(InstallError, match=f"S2 does not support a layer that {message}"):
        share_rows(layer, RowParallelLinear(), fake_mesh(rank=0, ranks=2))


def test_refuses_one_device_and_a_second_time() -> None:
    with pytest.raises(InstallError, match="S2 requires several devices, found no mesh"):
        change_of(nn.Linear(2, 2), RowParallelLinear(), None, strategy="S2")
    model, mesh = make(9), fake_mesh(rank=0, ranks=2)
    put_in(model, mesh)
    with pytest.raises(InstallError, match="is a 'SharedLinear'"):
        put_in(model, mesh)


def test_refuses_a_weight_that_is_used_twice() -> None:
    model = make(9)
    model.append(nn.Linear(9, HIDDEN))
    model[3].weight = model[0].weight
    before = dict(model.named_modules())
    with pytest.raises(InstallError, match="the layer's 'weight' .* uses it as '3.weight' too"):
        put_in(model, fake_mesh(rank=0, ranks=2))
    assert dict(model.named_modules()) == before
