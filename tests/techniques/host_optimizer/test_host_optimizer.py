"""Modules that train with `host_optimizer` are bit by bit those of a plain fit, at the bytes of both sides."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

import lightning_amp
from lightning_amp import AMPStrategy
from lightning_amp.costs.device_rates import rates_for
from lightning_amp.errors import AmpError, InstallError, PlanError
from lightning_amp.footprint.host_state import update_on_host
from lightning_amp.lightning.strategy import hardware, mesh_strategy
from lightning_amp.techniques.host_optimizer import updates as of_host
from lightning_amp.techniques.host_optimizer.install import install
from lightning_amp.techniques.host_optimizer.row import HostOptimizer
from lightning_amp.techniques.host_optimizer.updates import updates_of
from tests.any_module import Meter
from tests.techniques.early_update.test_early_update import OPTIMIZERS, Unfreezes, Wide, fit, made, plan_of, states
from tests.techniques.replay.models import difference


class First(Meter):
    """Counts the first step, and keeps what is on the host after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.host_bytes = 0, 0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        updates = updates_of(trainer.optimizers[0])
        self.host_bytes = 0 if updates is None else updates.n_bytes


def on_host(**options: Any) -> AMPStrategy:
    return AMPStrategy(strategies="host_optimizer", **options)


def spec_of(trainer: Any) -> Any:
    return next(rule.spec for rule in plan_of(trainer).rules if rule.strategy == "host_optimizer")


def equal_states(one: Any, other: Any) -> bool:
    pairs = zip(states(one), states(other), strict=True)
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains_as_without_at_the_predicted_bytes(optimizer: str) -> None:
    right, whole, before = fit(made(Wide, optimizer), AMPStrategy())
    after = torch.rand(3)
    first = First()
    found, metered, trainer = fit(made(Wide, optimizer), on_host(), first)
    assert torch.equal(torch.rand(3), after)
    assert difference(right, found) == 0.0
    assert equal_states(before, trainer)
    assert max(first.live.peak, metered.live.peak) == plan_of(trainer).predicted_peak_bytes < 0.95 * whole.live.peak
    assert first.host_bytes == spec_of(trainer).host_bytes
    (saved,) = (rule.saves_bytes for rule in plan_of(trainer).rules if rule.strategy == "host_optimizer")
    assert saved == whole.live.peak - metered.live.peak
    # the optimizer is a plain one again
    (again,) = trainer.optimizers
    assert again.param_groups
    assert not again._optimizer_step_pre_hooks
    assert update_on_host(again) is None
    assert "configure_optimizers" not in vars(found)


class Strided(Wide):
    """Parameters whose elements lie in another order, or apart."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.layers[0].weight = nn.Parameter(torch.randn(96, 96).t())
        self.layers[1].weight = nn.Parameter(torch.randn(96, 192)[:, ::2])


@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor"])
def test_strides_of_parameters_are_those_of_the_state(optimizer: str) -> None:
    right, _, before = fit(made(Strided, optimizer), AMPStrategy())
    found, _, trainer = fit(made(Strided, optimizer), on_host())
    assert difference(right, found) == 0.0
    assert equal_states(before, trainer)
    strides = [[torch.as_tensor(one).stride() for one in states(of)] for of in (before, trainer)]
    assert strides[0] == strides[1]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adafactor"])
def test_gradients_are_gone_too_beside_early_update(optimizer: str) -> None:
    right, _, before = fit(made(Wide, optimizer), AMPStrategy())
    alone = plan_of(fit(made(Wide, optimizer), on_host())[2]).predicted_peak_bytes
    first = First()
    both = AMPStrategy(strategies="early_update,host_optimizer")
    found, metered, trainer = fit(made(Wide, optimizer), both, first)
    assert difference(right, found) == 0.0
    assert equal_states(before, trainer)
    assert max(first.live.peak, metered.live.peak) == plan_of(trainer).predicted_peak_bytes < 0.9 * alone
    assert first.host_bytes == spec_of(trainer).host_bytes


@pytest.mark.parametrize("names", ["host_optimizer", "early_update,host_optimizer"])
def test_a_bucket_is_on_its_way_while_another_is_updated(names: str) -> None:
    right, _, before = fit(made(), AMPStrategy())
    plan = plan_of(fit(made(), AMPStrategy(strategies=names))[2])
    rules = [
        replace(rule, spec=replace(rule.spec, slots=2)) if isinstance(rule.spec, HostOptimizer) else rule
        for rule in plan.rules
    ]
    first = First()
    found, metered, trainer = fit(made(), AMPStrategy(plan=replace(plan, rules=tuple(rules))), first)
    assert difference(right, found) == 0.0
    assert equal_states(before, trainer)
    assert max(first.live.peak, metered.live.peak) == plan_of(trainer).predicted_peak_bytes
    assert first.host_bytes == spec_of(trainer).host_bytes + spec_of(trainer).slot_bytes


class Clamps(Wide):
    """Reads gradients in hooks, and writes to parameters between steps, also in a hook of the optimizer."""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()

        def decay(optimizer: Any, *_: Any) -> None:
            with torch.no_grad():
                for p in optimizer.param_groups[0]["params"]:
                    p.mul_(0.99)

        made["optimizer"].register_step_post_hook(decay)
        return made

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())

    def on_train_batch_end(self, *args: Any) -> None:
        self.layers[0].weight.data.clamp_(-0.05, 0.05)


@pytest.mark.filterwarnings("ignore:.*accumulate_grad_batches")
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
        {"precision": "bf16-true"},
        {"precision": "bf16-mixed"},
    ],
)
def test_clipping_accumulation_and_readers_of_gradients_are_as_without(options: dict[str, Any]) -> None:
    right, _, before = fit(made(Clamps), AMPStrategy(), **options)
    found, _, trainer = fit(made(Clamps), on_host(), **options)
    assert difference(right, found) == 0.0
    assert equal_states(before, trainer)
    assert torch.equal(before.callback_metrics["norm"], trainer.callback_metrics["norm"])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scaled_loss_is_as_without() -> None:
    def scaled() -> dict[str, Any]:
        # a scale at which the first steps are skipped
        scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "precision": None}

    right, _, before = fit(made(), AMPStrategy(), **scaled())
    found, _, trainer = fit(made(), on_host(), **scaled())
    assert difference(right, found) == 0.0
    assert equal_states(before, trainer)
    with pytest.raises(InstallError, match="scales gradients itself"):
        fit(made(Wide, "AdamW fused"), on_host(), **scaled())


def test_a_checkpoint_goes_on_with_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, moved = [], list[int]()
    monkeypatch.setattr(mesh_strategy, "optimizers_to_device", lambda optimizers, device: moved.append(len(optimizers)))
    for first, second in ((AMPStrategy(), AMPStrategy()), (on_host(), AMPStrategy()), (AMPStrategy(), on_host())):
        _, _, trainer = fit(made(), first)
        trainer.save_checkpoint(path := tmp_path / "half.ckpt")
        module, _, again = fit(made(), second, max_epochs=2, resumed=path)
        assert again.global_step == 8
        found.append((module, again))
    # Lightning moves the state that it has loaded to the device
    assert moved == [1, 1, 0]
    (right, before), *others = found
    for module, trainer in others:
        assert difference(right, module) == 0.0
        assert equal_states(before, trainer)


def test_state_is_loaded_to_the_host_and_kept_by_the_parameters() -> None:
    weights, there = ([nn.Parameter(torch.ones(3, device=d)) for _ in range(2)] for d in ("cpu", "meta"))
    optimizer, other = torch.optim.AdamW(weights), torch.optim.AdamW(there, lr=1.0)
    weights[1].grad = torch.ones(3)
    optimizer.step()
    updates = of_host.HostUpdates(HostOptimizer())
    updates.of(made(), [other])
    other.load_state_dict(optimizer.state_dict())
    assert [*map(id, other.state)] == [id(there[1])]
    assert {value.device.type for value in other.state[there[1]].values()} == {"cpu"}
    assert [*map(id, other.param_groups[0]["params"])] == [*map(id, there)]
    assert other.param_groups[0]["lr"] == 1e-3
    # a plan without it
    updates.stop()
    there[1].grad = torch.ones_like(there[1])
    other.step()
    assert {name: value.device.type for name, value in other.state[there[1]].items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


@pytest.mark.filterwarnings("ignore:.*")
def test_parameters_that_are_unfrozen_later_are_updated() -> None:
    class Frozen(Wide):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    right, _, before = fit(made(Frozen), AMPStrategy(), Unfreezes(), max_epochs=3)
    found, _, trainer = fit(made(Frozen), on_host(), Unfreezes(), max_epochs=3)
    assert difference(right, found) == 0.0
    assert equal_states(before, trainer)


class Two(Wide):
    """Two optimizers in turn, called by the step itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first = {id(p) for p in self.layers.parameters()}
        own = [p for p in self.parameters() if id(p) in first]
        others = [p for p in self.parameters() if id(p) not in first]
        return torch.optim.Adam(own, lr=1e-2), torch.optim.SGD(others, lr=1e-2, momentum=0.9)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
        return torch.zeros(())


def test_manual_optimization_with_two_optimizers_is_as_without() -> None:
    right, _, _ = fit(made(Two), AMPStrategy())
    first = First()
    found, metered, trainer = fit(made(Two), on_host(), first)
    assert difference(right, found) == 0.0
    assert max(first.live.peak, metered.live.peak) == plan_of(trainer).predicted_peak_bytes
    assert first.host_bytes == spec_of(trainer).host_bytes


class Late(Two):
    """The second optimizer has not stepped when the step is counted."""

    def optimizers(self, *args: Any, **kwargs: Any) -> Any:
        return super().optimizers(*args, **kwargs)[: 1 if self.trainer.fit_loop.batch_idx < 2 else 2]


def test_state_that_comes_later_is_on_the_host_too() -> None:
    right, _, _ = fit(made(Late), AMPStrategy())
    found, _, trainer = fit(made(Late), on_host())
    assert difference(right, found) == 0.0
    assert trainer.strategy.predicted_step.by_kind["optimiser state"] == 0  # type: ignore[attr-defined]


class Sparse(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 64, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.words(ids)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class OfOthers(Wide):
    def configure_optimizers(self) -> Any:
        class Own(torch.optim.Adam):
            pass

        return Own(self.parameters(), lr=0.1)


class Whole(Wide):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (OfOthers, {}, "the optimizer 'Own' may read several gradients"),
        (Whole, {}, "the optimizer 'LBFGS' may read several gradients"),
        (Sparse, {}, "copies dense gradients only"),
        (Wide, {"host_memory": "1MiB"}, "the state takes 1.20 MiB of host memory, and host_memory is 1.00 MiB"),
    ],
)
def test_what_cannot_be_is_refused_by_name(kind: Any, options: Any, why: str) -> None:
    with pytest.raises(AmpError, match=why):
        fit(made(kind), on_host(**options))


class Long(Wide):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch.repeat(32), batch_idx)


def test_the_hosts_memory_is_one_budget_beside_offload() -> None:
    right, _, _ = fit(made(Long), AMPStrategy())
    both = "offload,host_optimizer"
    first = First()
    found, metered, trainer = fit(made(Long), AMPStrategy(strategies=both, host_memory="8MiB"), first)
    assert difference(right, found) == 0.0
    assert max(first.live.peak, metered.live.peak) == plan_of(trainer).predicted_peak_bytes
    specs = {rule.strategy: rule.spec for rule in plan_of(trainer).rules if rule.strategy in both}
    assert specs["offload"].host_memory == 2**23 - specs["host_optimizer"].host_bytes
    assert 0 < specs["offload"].host_bytes < specs["offload"].host_memory
    assert "with what else waits there" in " ".join(str(plan_of(trainer)).split())
    with pytest.raises(AmpError, match="the state and what else waits there takes"):
        fit(made(Long), AMPStrategy(strategies=both, host_memory="2MiB"))


def test_more_host_memory_than_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "free_bytes", lambda node_ranks: 2**20)
    with pytest.raises(PlanError, match="takes 1.20 MiB of host memory, and a rank may take 1.00 MiB of what is free"):
        fit(made(), on_host())


def test_an_optimizer_of_graphs_is_refused() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], capturable=True)
    with pytest.raises(InstallError, match="capturable=True of the optimizer is for graphs of a GPU"):
        of_host.HostUpdates(HostOptimizer()).of(made(), [optimizer])


def test_several_ranks_are_refused_at_once() -> None:
    class Ranks:
        def size(self) -> int:
            return 2

    with pytest.raises(InstallError, match="runs on one rank, found 2"):
        install(made(), HostOptimizer(), Ranks())


@pytest.mark.parametrize(
    ("options", "fused"),
    [({"fused": None, "foreach": None}, True), ({"fused": None, "foreach": True}, None), ({"lr": 1.0}, None)],
)
def test_a_gpu_takes_fused_kernels_where_no_others_are_named(options: dict[str, Any], fused: bool | None) -> None:
    assert of_host._fused({"params": [torch.zeros(1)], **options}).get("fused") is fused


def test_the_policy_takes_it_on_one_gpu_where_nothing_else_fits() -> None:
    module, batch = made(), torch.randint(0, 64, (8,))
    options: Any = {"rates": replace(rates_for("H100"), memory=None)}
    whole = lightning_amp.plan(module, batch, **options).plan.predicted_peak_bytes
    # where the host has no room for parameters and gradients too, as fsdp would have them
    named = lightning_amp.plan(module, batch, strategies="host_optimizer", **options).plan
    room = named.rules[-1].spec.host_bytes
    for share, names in ((0.6, ("host_optimizer",)), (0.45, ("host_optimizer", "early_update"))):
        budget = int(share * whole)
        plan = lightning_amp.plan(module, batch, device_memory=budget, host_memory=room, **options).plan
        assert set(names) <= set(plan.strategies), plan.strategies
        assert plan.fits
    (spec,) = (rule.spec for rule in plan.rules if rule.strategy == "host_optimizer")
    assert spec.slots == 2
    # on a CPU it frees nothing
    with pytest.raises(AmpError, match="requires at least"):
        fit(made(), AMPStrategy(device_memory=int(0.45 * whole)))


def test_a_step_that_fits_says_what_it_would_save() -> None:
    plan = lightning_amp.plan(made(), torch.randint(0, 64, (8,)), rates="H100", device_memory="1GiB").plan
    assert plan.strategies == ()
    assert plan.diagnosis is not None
    assert {"early_update", "host_optimizer"} <= {*plan.diagnosis.helps}
