"""Modules that show how a strategy averages gradients, modules without a decoder, and trainers of both on ranks.

`Case.batches(rank)` are a rank's batches, `Case.batches(None)` those of one process: the union of all ranks' cells.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.any_module import QUIET, Meter, make
from tests.optimised import Optimised

EVEN: list[tuple[int, ...]] = [(4, 4)] * 7
UNEVEN: list[tuple[int, ...]] = [(4, 4), (5, 3), (2, 6), (7, 1), (3, 3), (1, 2), (6, 2)]
"""Cells per rank, step by step; seven steps make a short last window of three."""

Batch = dict[str, dict[str, Tensor]]


class RunningRanks(ClusterEnvironment):
    """Processes that exist already, one group of them on one node."""

    creates_processes_externally = True
    main_address = "localhost"
    main_port = 0

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self._rank, self._ranks = rank, ranks

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._ranks

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


class Regression(Optimised, by=torch.optim.SGD, lr=0.2, momentum=0.9):
    """Automatic optimisation of a mean over cells; `spare` is used by no loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.spare = nn.Linear(2, 2)
        self.norms: list[float] = []
        self.double()

    def loss(self, batch: Batch) -> Tensor:
        rna = batch["rna"]
        return (self.body(rna["x"]) - rna["y"]).square().mean()

    def on_after_backward(self) -> None:
        grads = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
        self.norms.append(torch.cat(grads).norm().item())


class Normalised(Regression):
    """With batch statistics, one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(4)
        self.body = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 4), norm, nn.Linear(4, 1))
        self.double()


class Unfrozen(Regression):
    """The first layer starts to learn in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.body[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.body[0].requires_grad_(self.current_epoch > 0)


class OneRankOnly(Regression):
    """Rank 1's loss uses no parameter in every second step; the mean over the ranks is half of rank 0's."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx % 2 == 0:
            return loss
        if self.trainer.world_size == 1:
            return self.loss({"rna": {key: value[:4] for key, value in batch["rna"].items()}}) / 2
        return loss if self.trainer.global_rank == 0 else torch.zeros((), requires_grad=True)


class Adversarial(LightningModule):
    """Two optimisers in manual optimisation, the discriminator first; each step clipped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.automatic_optimization = False
        self.generator = nn.Linear(3, 3)
        self.discriminator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.norms: list[float] = []
        self.double()

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        rna = batch["rna"]
        fake = self.generator(rna["x"])
        real = self.discriminator(rna["x"] + rna["y"])
        judged = self.discriminator(fake)
        return (real - 1).square().mean() + judged.square().mean(), (judged - 1).square().mean()

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for which, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.losses(batch)[which])
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parts = (self.discriminator, self.generator)
        return [torch.optim.SGD(part.parameters(), lr=0.3, momentum=0.5) for part in parts]


class AdversarialAccumulating(Adversarial):
    """Two batches per step, with `toggle_model` doing what accumulate_grad_batches does elsewhere."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        last = batch_idx % 2 == 1
        for which, optimizer in enumerate(self.optimizers()):
            with optimizer.toggle_model(sync_grad=last):
                self.manual_backward(self.losses(batch)[which] / 2)
                if last:
                    optimizer.step()
                    optimizer.zero_grad()


class RawBackward(Adversarial):
    """`loss.backward()` where `self.manual_backward(loss)` was meant."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for which, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.losses(batch)[which].backward()
            optimizer.step()


@dataclass(frozen=True)
class Case:
    """A module to be trained, and how."""

    module: Callable[[], LightningModule]
    cells: list[tuple[int, ...]] = field(default_factory=lambda: UNEVEN)
    trainer: dict[str, Any] = field(default_factory=dict)

    def batches(self, rank: int | None) -> list[Batch]:
        generator = torch.Generator().manual_seed(5)
        out: list[Batch] = []
        for sizes in self.cells:
            x, y = (torch.randn(sum(sizes), n, generator=generator, dtype=torch.float64) for n in (3, 1))
            own = slice(None) if rank is None else slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            out.append({"rna": {"x": x[own], "y": y[own]}})
        return out


AGAINST_UNION = {
    "automatic": Case(Regression),
    "accumulated": Case(Regression, trainer={"accumulate_grad_batches": 3}),
    "clipped_by_norm": Case(Regression, trainer={"gradient_clip_val": 0.3}),
    "clipped_by_value": Case(Regression, trainer={"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    "normalised": Case(Normalised, trainer={"accumulate_grad_batches": 2}),
    "unfrozen": Case(Unfrozen),
    "one_rank_only": Case(OneRankOnly, cells=EVEN),
    "adversarial": Case(Adversarial),
    "adversarial_accumulating": Case(AdversarialAccumulating),
    "raw_backward": Case(RawBackward, cells=EVEN),
}
AGAINST_DDP = {
    "automatic": Case(Regression, cells=EVEN),
    "accumulated_clipped_mixed": Case(
        Regression,
        cells=EVEN,
        trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.3, "precision": "bf16-mixed"},
    ),
}


def trainer_of(strategy: Any, *, rank: int = 0, ranks: int = 1, **options: Any) -> pl.Trainer:
    """A Trainer on CPU that writes nothing, of three steps unless asked; `strategy` "auto" is a plain one."""
    options = QUIET | {"accelerator": "cpu", "devices": ranks, "max_epochs": 1, "max_steps": 3} | options
    plugins = [*options.pop("plugins", ())]
    if strategy != "auto" and not any(isinstance(plugin, RunningRanks) for plugin in plugins):
        plugins.append(RunningRanks(rank, ranks))
    return pl.Trainer(**options, strategy=strategy, plugins=plugins)


class Batches(Dataset[Any]):
    def __init__(self, batch: Any, n: int = 4) -> None:
        self.batches = [moved(batch, k) for k in range(n)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, k: int) -> Any:
        return self.batches[k]


def moved(batch: Any, k: int) -> Any:
    """Another batch of the same shapes: rows in another order."""
    if isinstance(batch, Tensor):
        return batch.roll(k, 0)
    if isinstance(batch, dict):
        return {name: moved(value, k) for name, value in batch.items()}
    return type(batch)(moved(value, k) for value in batch)


class Small(Optimised, by=torch.optim.Adam, lr=0.1):
    """A chain and its loss, which it shows; keeps what it has seen."""

    def __init__(self, *, width: int = 7) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 2))
        self.seen: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        self.seen.append(batch)
        return F.mse_loss(self.net(batch), batch[:, :2])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss


def fitted(module: Any, data: Any, strategy: Any, **options: Any) -> dict[str, Any]:
    """What a run leaves: parameters, batches, where the random streams are, and under amp the plan."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    trainer = trainer_of(strategy, **options)
    given = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else {"train_dataloaders": data}
    trainer.fit(module, **given)
    return {
        "parameters": {name: p.detach().clone() for name, p in module.named_parameters()},
        "seen": list(getattr(module, "seen", [])),
        "random": (torch.get_rng_state(), float(np.random.rand()), random.random()),
        "steps": trainer.global_step,
        "plan": getattr(trainer.strategy, "plan", None),
    }


def same(one: Any, other: Any) -> bool:
    """Whether two nestings hold equal tensors."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def of_example(name: str, strategy: Any, meter: Meter | None = None) -> dict[str, Any]:
    module, batch = make(name)
    torch.manual_seed(1)
    callbacks = [] if meter is None else [meter]
    return fitted(
        module, DataLoader(Batches(batch), batch_size=None), strategy, precision="64-true", callbacks=callbacks
    )
