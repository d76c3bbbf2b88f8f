"""Modules without a decoder under strategy amp and under a plain Trainer: what ranks run, and what both leave."""

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.any_module import QUIET, Meter, make
from tests.lightning.strategy.strategy_cases import RunningRanks


def trainer_of(strategy: Any, *, rank: int = 0, ranks: int = 1, **options: Any) -> pl.Trainer:
    """A Trainer on CPU; `strategy` "auto" is a plain one."""
    options = {"accelerator": "cpu", "devices": ranks, "max_epochs": 1, "max_steps": 3, **options}
    if strategy != "auto":
        options["plugins"] = [RunningRanks(rank, ranks)]
    return pl.Trainer(**QUIET, **options, strategy=strategy)


class Batches(Dataset[Any]):
    """Batches that are ready, of an example's shape."""

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


class Small(pl.LightningModule):
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

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


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
    """Three steps of an example in float64."""
    module, batch = make(name)
    torch.manual_seed(1)
    callbacks = [] if meter is None else [meter]
    return fitted(
        module, DataLoader(Batches(batch), batch_size=None), strategy, precision="64-true", callbacks=callbacks
    )


def example(rank: int, ranks: int, name: str, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """An example under a plain Trainer, and under amp with budgets that are shares of its peak."""
    plain_meter = Meter()
    plain = of_example(name, "auto", plain_meter)
    found = []
    for share in shares:
        meter = Meter()
        budget = int(share * plain_meter.live.peak)
        run = of_example(name, AMPStrategy(device_memory=budget, unfit="train"), meter)
        error = max(float((run["parameters"][key] - value).abs().max()) for key, value in plain["parameters"].items())
        plan = run["plan"]
        found.append(
            {
                "budget": budget,
                "measured": meter.live.peak,
                "eager": plain_meter.live.peak,
                "predicted": plan.predicted_peak_bytes,
                "strategies": plan.strategies,
                "fits": plan.fits,
                "error": error,
                "steps": run["steps"],
                "plain steps": plain["steps"],
                "json": plan.to_json(),
                "notes": plan.notes,
            }
        )
    return found


def example_on_ranks(rank: int, ranks: int, name: str, budgets: tuple[int | None, ...]) -> list[tuple[Any, int, bool]]:
    """An example on several ranks under each budget: its plan, what the meter has seen, whether it has trained."""
    found = []
    for budget in budgets:
        module, batch = make(name)
        before = [p.detach().clone() for p in module.parameters()]
        meter = Meter()
        run = fitted(
            module,
            DataLoader(Batches(batch, 8), batch_size=None),
            AMPStrategy(device_memory=budget, unfit="train"),
            rank=rank,
            ranks=ranks,
            callbacks=[meter],
        )
        trained = not all(map(torch.equal, before, module.parameters()))
        found.append((run["plan"], meter.live.peak, trained))
    return found
