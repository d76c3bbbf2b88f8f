"""Claim: a BatchNorm that shares its statistics over ranks computes what it does on the union of their batches."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.utils import parametrize

from lightning_amp.errors import InstallError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.sharding.normalise import batch_normalised
from lightning_amp.techniques.data.batch_norm import is_shared, share_batch_statistics
from tests.ranks import CountCollectives, run_ranks

ALONE: Any = SimpleNamespace(size=lambda: 1)
EXACT = {"rtol": 1e-12, "atol": 1e-13}
STEPS = 3


@dataclass(frozen=True)
class Layer:
    make: Callable[[], nn.Module]
    position: tuple[int, ...] = ()
    cells: tuple[int, int] = (5, 3)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class BothModes(nn.Module):
    """Its running statistics change between a call that reads them and the backward pass of that call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm.eval()(x)
        return read + self.norm.train(self.training)(x)


class Activated(nn.BatchNorm2d):
    """As timm's `BatchNormAct2d`: a forward of its own with dropout and an activation in place."""

    def __init__(self, channels: int, momentum: float | None = 0.1) -> None:
        super().__init__(channels, momentum=momentum)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        assert x.ndim == 4
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            momentum = momentum or 1.0 / float(self.num_batches_tracked)
        mean, var = self.running_mean, self.running_var
        x = F.batch_norm(x, mean, var, self.weight, self.bias, self.training, momentum, self.eps)
        return self.act(self.drop(x))


class Twice(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input=input)


def parametrized() -> nn.Module:
    return parametrize.register_parametrization(nn.BatchNorm1d(4), "weight", Doubled())


def not_tracked_any_more() -> nn.Module:
    layer = nn.BatchNorm1d(4)
    layer.track_running_stats = False
    return layer


LAYERS = {
    "1d": Layer(lambda: nn.BatchNorm1d(4)),
    "3d": Layer(lambda: nn.BatchNorm3d(4), position=(2, 3, 2)),
    "not_affine": Layer(lambda: nn.BatchNorm1d(4, affine=False)),
    "plain_average": Layer(lambda: nn.BatchNorm1d(4, momentum=None)),
    "untracked": Layer(lambda: nn.BatchNorm1d(4, track_running_stats=False)),
    "not_tracked_any_more": Layer(not_tracked_any_more),
    "parametrized": Layer(parametrized),
    "activated": Layer(lambda: Activated(4), position=(2, 3)),
    "activated_plain_average": Layer(lambda: Activated(4, None), position=(2, 3)),
    "twice": Layer(lambda: Twice(4)),
    "both_modes": Layer(BothModes),
    "one_cell": Layer(lambda: nn.BatchNorm1d(4), cells=(1, 2)),
    "no_cells_on_one_rank": Layer(lambda: nn.BatchNorm1d(4), cells=(0, 6)),
}


def make(name: str) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(LAYERS[name].make()).double()
    for p in model.parameters():
        nn.init.uniform_(p, 0.5, 2)
    return model


def batches(name: str, step: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(step)
    shapes = [(n, 4, *LAYERS[name].position) for n in LAYERS[name].cells]
    x = [3 + torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    w = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return x, w


def steps(model: nn.Module, name: str, pick: Callable[[list[Tensor]], Tensor]) -> dict[str, Any]:
    seen: dict[str, Any] = {"y": [], "dx": []}
    for step in range(STEPS):
        x, w = (pick(part) for part in batches(name, step))
        x.requires_grad_()
        y = model(x)
        loss = (y * w).sum()
        # the gradient of a gradient too, which is handed a constant first
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        seen["y"].append(y.detach())
        seen["dx"].append(x.grad)
    seen["grads"] = [p.grad for p in model.parameters()]
    model.eval()
    x = pick(batches(name, 0)[0])
    with torch.no_grad():
        seen["eval"] = model(x)
    seen["state"] = {key: value.clone() for key, value in model.state_dict().items()}
    return seen


def on_rank(name: str, rank: int, mesh: Any) -> dict[str, Any]:
    model = make(name)
    undo = share_batch_statistics(model, mesh)
    assert sum(map(is_shared, model.modules())) == 1
    seen = steps(model, name, lambda parts: parts[rank])
    for grad in seen["grads"]:
        dist.all_reduce(grad)
    undo()
    return seen


def shared_and_restored(mesh: Any) -> dict[str, Any]:
    layer = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"a": nn.Sequential(layer), "b": nn.Sequential(nn.ReLU(), layer), "c": nn.BatchNorm1d(4)})
    keys, tensors = list(model.state_dict()), [*model.parameters(), *model.buffers()]
    calls = []
    layer.register_forward_hook(lambda *args: calls.append("hook"))
    own = dict(vars(layer))
    undo = share_batch_statistics(model, mesh)
    found = {
        "layers stay": model["a"][0] is model["b"][1] is layer,
        "same names": list(model.state_dict()) == keys,
        "same objects": all(s is t for s, t in zip([*model.parameters(), *model.buffers()], tensors, strict=True)),
    }
    twin = copy.deepcopy(model)
    x = torch.randn(3, 4)
    found["copy computes the same"] = torch.equal(twin["a"](x), model["a"](x))
    found["copy owns its tensors"] = twin["a"][0].weight is not model["a"][0].weight
    found["hooks run"] = "hook" in calls
    with CountCollectives() as forward:
        y = model["a"](x.requires_grad_())
    with CountCollectives() as backward:
        y.sum().backward()
    model.eval()
    with CountCollectives() as evaluated:
        model["a"](x)
    found["collectives"] = [m.total for m in (forward, backward, evaluated)] == [1, 1, 0]
    running = model["a"][0].running_mean
    undo()
    undo()
    found["restored"] = [*vars(layer).items()] == [*(own | {"training": False}).items()]
    found["trained values stay"] = layer.running_mean is running and int(layer.num_batches_tracked) == 2
    return found


def half(rank: int, mesh: Any) -> dict[str, Any]:
    """bfloat16 activations, float32 layer, as under mixed precision."""
    model = nn.Sequential(nn.BatchNorm1d(4))
    share_batch_statistics(model, mesh)
    x = (torch.arange(24.0).view(6, 4)[2 * rank : 2 * rank + 4 - rank] / 8).bfloat16().requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    return {"y": y.detach(), "dx": x.grad, "weight": model[0].weight.grad, "x": x.detach()}


def all_cases(rank: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    seen = {name: on_rank(name, rank, mesh["data"]) for name in LAYERS}
    # the model axis has one rank: nothing is shared, although there are two
    alone = make("1d")
    share_batch_statistics(alone, mesh["model"])
    with CountCollectives() as mode:
        seen["alone"] = steps(alone, "1d", lambda parts: parts[rank])
    seen["alone"]["collectives"] = mode.total
    return {**seen, "objects": shared_and_restored(mesh["data"]), "half": half(rank, mesh["data"])}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(all_cases, 2, tmp_path_factory.mktemp("batch_norm"))


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYERS)
def test_ranks_compute_what_one_process_computes_on_the_union(ranks: list[Any], name: str) -> None:
    union = steps(make(name), name, torch.cat)
    parts = [r[name] for r in ranks]
    for step in range(STEPS):
        for key in ("y", "dx"):
            torch.testing.assert_close(torch.cat([p[key][step] for p in parts]), union[key][step], **EXACT)
    for part in parts:
        torch.testing.assert_close(part["grads"], union["grads"], **EXACT)
        torch.testing.assert_close(part["state"], union["state"], **EXACT)
    # outside of training a layer without running statistics has those of its own cells
    if name not in ("untracked", "untracked_in_eval_mode"):
        torch.testing.assert_close(torch.cat([p["eval"] for p in parts]), union["eval"], **EXACT)


@pytest.mark.ranks
def test_ranks_hold_the_same_bits(ranks: list[Any]) -> None:
    for name in LAYERS:
        states = [r[name]["state"] for r in ranks]
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0]), name


@pytest.mark.ranks
def test_objects_names_hooks_copies_and_undo(ranks: list[Any]) -> None:
    for result in ranks:
        wrong = [claim for claim, holds in result["objects"].items() if not holds]
        assert not wrong


@pytest.mark.ranks
def test_half_precision_is_normalised_in_single(ranks: list[Any]) -> None:
    layer = nn.BatchNorm1d(4)
    x = torch.cat([r["half"]["x"] for r in ranks]).float().requires_grad_()
    y = layer(x)
    y.bfloat16().float().square().sum().backward()
    for key, expected in (("y", y.detach()), ("dx", x.grad)):
        found = torch.cat([r["half"][key] for r in ranks])
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
    weight = ranks[0]["half"]["weight"] + ranks[1]["half"]["weight"]
    assert weight.dtype is torch.float32
    torch.testing.assert_close(weight, layer.weight.grad, rtol=1e-2, atol=1e-2)


class OwnForward(nn.BatchNorm1d):
    """Subtracts the mean of the rank's batch."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) - input.mean(0)


class OwnAverage(nn.BatchNorm1d):
    """Moves its running mean by the rank's batch itself."""

    def forward(self, input: Tensor) -> Tensor:
        self.running_mean.lerp_(input.mean(0), 0.1)
        return super().forward(input)


class Joined(nn.BatchNorm1d):
    """Calls torch's kernel, which nothing can replace."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.batch_norm(input, self.weight, self.bias, None, None, True, 0.1, self.eps, False)


class OwnCall(nn.BatchNorm1d):
    def __call__(self, *args: Tensor) -> Tensor:
        return 2 * super().__call__(*args)


@pytest.mark.parametrize("kind", [OwnForward, OwnAverage, Joined, OwnCall])
def test_a_layer_that_computes_something_else_is_refused_and_nothing_changes(kind: type) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), kind(2))
    with pytest.raises(InstallError, match=rf"'1' \({kind.__name__}\): BatchNorm layers with an overridden forward"):
        share_batch_statistics(model, ALONE)
    model[1] = nn.BatchNorm1d(2)
    model[1].forward = model[0].forward
    with pytest.raises(InstallError, match="share_batch_statistics cannot change how '1' runs, whose"):
        share_batch_statistics(model, ALONE)
    assert "forward" not in vars(model[0])


def test_synchronised_layers_are_left_as_they_are() -> None:
    model = nn.Sequential(nn.SyncBatchNorm(2), nn.InstanceNorm1d(2))
    share_batch_statistics(model, ALONE)
    assert not any("forward" in vars(layer) for layer in model)


def test_the_backward_pass_makes_no_tensor_as_large_as_the_input_but_its_gradient() -> None:
    x, weight = torch.randn(8, 16, 16, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    y = batch_normalised(x, weight, None, 1e-5, track=lambda *_: None)
    gradient = torch.randn_like(y)
    with LiveBytes() as meter:
        y.backward(gradient)
    assert meter.peak < 1.1 * x.nbytes
