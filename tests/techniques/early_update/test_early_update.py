"""Modules that train with `early_update` are bit by bit those of a plain fit; what reads gradients is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.callbacks import GradientAccumulationScheduler as Accumulation
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy
from lightning_amp.errors import AmpError, InstallError, ModelError, PlanError
from lightning_amp.footprint.run.last_gradients import GradientReads
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.early_update.install import install
from lightning_amp.techniques.early_update.row import EarlyUpdate
from tests.any_module import QUIET, Meter
from tests.techniques.replay.models import difference

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True}),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
}


class Wide(LightningModule):
    """Parameters are most of a step: a tied weight, one without a gradient, a frozen one, two groups, dropout."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.table = nn.Embedding(64, 96)
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(6))
        self.norm, self.drop, self.unused = nn.BatchNorm1d(96), nn.Dropout(0.1), nn.Linear(4, 4)
        self.frozen = nn.Linear(96, 96).requires_grad_(False)
        self.head = nn.Linear(96, 64, bias=False)
        self.head.weight = self.table.weight

    def block(self, x: Tensor, layer: nn.Module) -> Tensor:
        return x + self.drop(layer(x).relu())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = self.block(x, layer)
        return self.head(self.norm(self.frozen(x)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch), batch.roll(1))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        kind, options = OPTIMIZERS[self.optimizer]
        biases = [p for p in self.parameters() if p.dim() == 1]
        weights = [p for p in self.parameters() if p.dim() > 1]
        optimizer = kind([{"params": weights}, {"params": biases, "lr": 3e-3}], lr=1e-2, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(
    module: LightningModule, strategy: Any, *callbacks: Callback, resumed: Path | None = None, **options: Any
) -> tuple[Any, Meter, Trainer]:
    data = torch.randint(0, 64, (32,), generator=torch.Generator().manual_seed(1))
    meter = Meter()
    kept: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "precision": "64-true", "max_epochs": 1, **QUIET}
    trainer = Trainer(strategy=strategy, callbacks=[meter, *callbacks], **{**kept, **options})
    torch.manual_seed(2)
    trainer.fit(module, DataLoader(data, 8), ckpt_path=resumed)
    return module, meter, trainer


def made(kind: type[Wide] = Wide, *args: Any) -> Wide:
    torch.manual_seed(0)
    return kind(*args)


def early(**options: Any) -> AMPStrategy:
    return AMPStrategy(strategies="early_update", **options)


def plan_of(trainer: Trainer) -> Any:
    return trainer.strategy.plan  # type: ignore[attr-defined]


def states(trainer: Trainer) -> list[Tensor]:
    (optimizer,) = trainer.optimizers
    # sorted: the first update of a parameter inserts its state
    kept = sorted(optimizer.state_dict()["state"].items())
    return [value for _, state in kept for value in state.values()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains_as_without_at_the_predicted_bytes(optimizer: str) -> None:
    right, whole, before = fit(made(Wide, optimizer), AMPStrategy())
    after = torch.rand(3)
    found, metered, trainer = fit(made(Wide, optimizer), early())
    assert torch.equal(torch.rand(3), after)
    assert difference(right, found) == 0.0
    for one, other in zip(states(before), states(trainer), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert metered.live.peak == plan_of(trainer).predicted_peak_bytes < 0.95 * whole.live.peak


def test_the_policy_takes_it_where_gradients_are_the_peak() -> None:
    right, whole, _ = fit(made(), AMPStrategy())
    budget = int(0.93 * whole.live.peak)
    found, metered, trainer = fit(made(), AMPStrategy(device_memory=budget))
    assert plan_of(trainer).strategies == ("early_update",)
    assert metered.live.peak == plan_of(trainer).predicted_peak_bytes <= budget
    assert difference(right, found) == 0.0
    assert "backward" not in vars(found)
    # the hooks and the watch are gone
    assert not any(p._post_accumulate_grad_hooks for p in found.parameters())
    assert "grad" not in vars(nn.Parameter)


def test_it_is_taken_with_recompute() -> None:
    right, _, _ = fit(made(), AMPStrategy())
    found, metered, trainer = fit(made(), AMPStrategy(strategies="early_update,recompute"))
    assert plan_of(trainer).strategies == ("S1", "recompute", "early_update")
    assert metered.live.peak == plan_of(trainer).predicted_peak_bytes
    assert difference(right, found) == 0.0


def test_a_checkpoint_goes_on_with_and_without(tmp_path: Path) -> None:
    found = []
    for first, second in ((AMPStrategy(), AMPStrategy()), (early(), AMPStrategy()), (AMPStrategy(), early())):
        _, _, trainer = fit(made(), first)
        trainer.save_checkpoint(path := tmp_path / "half.ckpt")
        module, _, again = fit(made(), second, max_epochs=2, resumed=path)
        assert again.global_step == 8
        found.append(module)
    assert difference(found[0], found[1]) == difference(found[0], found[2]) == 0.0


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[0], optimizer)


@pytest.mark.filterwarnings("ignore:.*")
def test_parameters_that_are_unfrozen_later_are_updated() -> None:
    class Frozen(Wide):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    right, _, _ = fit(made(Frozen), AMPStrategy(), Unfreezes(), max_epochs=3)
    found, _, _ = fit(made(Frozen), early(), Unfreezes(), max_epochs=3)
    assert difference(right, found) == 0.0


class Clips(Wide):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(args[0], gradient_clip_val=1.0, gradient_clip_algorithm="norm")


class Norms(Wide):
    def on_train_batch_end(self, *args: Any) -> None:
        self.norm_of = [p.grad.norm() for p in self.parameters() if p.grad is not None]


class Looks(Callback):
    def on_before_optimizer_step(self, *args: Any) -> None:
        """Do nothing."""


class Mentions(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.found = sum(p.grad is not None for p in pl_module.parameters())


class Manual(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        return torch.zeros(())


class OfOthers(Wide):
    def configure_optimizers(self) -> Any:
        class Own(torch.optim.SGD):
            pass

        return Own(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("kind", "callbacks", "options", "why"),
    [
        (Clips, (), {}, "configure_gradient_clipping of the module"),
        (Norms, (), {}, "on_train_batch_end of the module reads the attribute 'grad'"),
        (Wide, (Looks(),), {}, "on_before_optimizer_step of the callback 'Looks'"),
        (Wide, (Mentions(),), {}, "on_train_batch_end of the callback 'Mentions' reads the attribute 'grad'"),
        (Wide, (Accumulation({0: 2}),), {}, "gradients are accumulated"),
        (Wide, (), {"accumulate_grad_batches": 2}, "gradients are accumulated"),
        (Wide, (), {"gradient_clip_val": 1.0}, "gradient_clip_val needs all gradients"),
        (Manual, (), {}, "manual optimization"),
        (OfOthers, (), {}, "the optimizer 'Own' may read several gradients"),
    ],
)
def test_what_reads_gradients_is_refused(kind: Any, callbacks: Any, options: Any, why: str) -> None:
    with pytest.raises(AmpError, match=why):
        fit(made(kind), early(), *callbacks, **options)


def test_a_refusal_says_what_it_costs() -> None:
    trained, _, trainer = fit(made(), AMPStrategy(), gradient_clip_val=1.0)
    diagnosis = plan_of(trainer).diagnosis
    assert diagnosis is not None
    said = diagnosis.does_not_help["early_update"]
    sizes = [parameter.nbytes for parameter in trained.parameters() if parameter.requires_grad]
    # all but those that wait for each other and the largest one
    freed = format_bytes(sum(sizes) - 2**17 - max(sizes))
    assert said.endswith(f"before the first update; otherwise up to {freed} of gradients would be freed early"), said
    # a module without so many
    _, _, trainer = fit(made(Few), AMPStrategy(), gradient_clip_val=1.0)
    assert plan_of(trainer).diagnosis.does_not_help["early_update"].endswith("before the first update")


class Few(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.layers.requires_grad_(False)


@pytest.mark.parametrize(("kind", "callbacks"), [(Norms, ()), (Wide, (Looks(),))])
def test_the_policy_leaves_it_out_then(kind: Any, callbacks: Any) -> None:
    _, whole, _ = fit(made(kind), AMPStrategy(), *callbacks)
    with pytest.raises(PlanError, match="requires at least"):
        fit(made(kind), AMPStrategy(device_memory=int(0.7 * whole.live.peak)), *callbacks)
    _, _, trainer = fit(made(), AMPStrategy(device_memory=int(0.93 * whole.live.peak)))
    assert "early_update" in plan_of(trainer).strategies


def norms(module: nn.Module) -> list[Any]:
    return [p.grad for p in module.parameters()]


class Elsewhere(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        norms(pl_module)


def test_a_read_that_no_look_at_the_code_finds_is_an_error() -> None:
    with pytest.raises(ModelError, match="the gradient of 'table.weight' is read, which early_update has used"):
        fit(made(), early(), Elsewhere())
    assert "grad" not in vars(nn.Parameter)


class Reentrant(Wide):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for _ in range(2):
            for layer in self.layers:
                x = checkpoint(self.block, x, layer, use_reentrant=True)
        return self.head(self.norm(x))


class Detached(Wide):
    """The first layers run again with detached weights, after the update that the last layers' use brought."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = checkpoint(self.apart, x, use_reentrant=False)
        for layer in self.layers:
            x = self.block(x, layer)
        return self.head(x)

    def apart(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.linear(x, layer.weight.detach()).tanh()
        return x


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Reentrant, "comes in several parts|after its update"), (Detached, "after its update, in the same backward pass")],
)
def test_a_step_that_would_be_wrong_is_refused(kind: type[Wide], why: str) -> None:
    with pytest.raises(AmpError, match=why):
        fit(made(kind), early())


def test_several_ranks_are_refused_at_once() -> None:
    class Two:
        def size(self) -> int:
            return 2

    with pytest.raises(InstallError, match="runs on one rank, found 2"):
        install(made(), EarlyUpdate(), Two())


def test_reads_of_gradients_are_watched_and_let_go() -> None:
    found, layer = list[str](), nn.Linear(2, 2)
    reads = GradientReads(layer, found.append)
    reads.start()
    _ = layer.weight.grad, nn.Linear(2, 2).weight.grad
    reads.stop()
    _ = layer.bias.grad
    assert found == ["weight"]
