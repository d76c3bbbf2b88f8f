"""Streams, and fits of a small module that notes the batches it was trained with."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_amp import AMPStrategy
from tests.lightning.strategy.strategy_cases import trainer_of

ROWS, WIDTH = 6, 8


class Rows(IterableDataset[Tensor]):
    """A stream that counts its passes, shuffles with torch's and Python's numbers, and is shared by workers."""

    def __init__(self, n: int | None = 4, *, draws: bool = False) -> None:
        self.n, self.draws, self.passes = n, draws, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        k = first
        while self.n is None or k < self.n:
            noise = torch.rand(()).item() + random.random() if self.draws else 0.0
            yield torch.full((ROWS, WIDTH), 0.1 * k + noise)
            k += step


class Sized(Rows):
    def __len__(self) -> int:
        assert self.n is not None, "it ends"
        return self.n


class Batches:
    """A loader that is not torch's, with a state."""

    def __init__(self, n: int = 4) -> None:
        self.n, self.at, self.passes = n, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        while self.at < self.n:
            self.at += 1
            yield torch.full((ROWS, WIDTH), 0.1 * (self.at - 1))
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Joined(DataLoader[Any]):
    """Reads other loaders, as those of scvi-tools do."""

    def __init__(self) -> None:
        self.loaders = [DataLoader(Rows(4), batch_size=None), DataLoader(Rows(2), batch_size=None)]
        super().__init__(torch.zeros(4, 1))  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return (a + b for a, b in zip(*self.loaders, strict=False))


class Once(Batches):
    """A loader that is its own iterator."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Tensor:
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return torch.full((ROWS, WIDTH), 0.1 * self.at)


class Sees(Callback):
    """Notes the batches on the module; no part of the profiled step."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        module.seen += [round(float(part.flatten()[0]), 6) for part in parts]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4))
        self.net = nn.Sequential(*layers, nn.Dropout(0.2))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        # the first batch of a stream is the run's: a profile may not change it
        return torch.stack([self.net(part.mul_(1.0)).square().mean() for part in parts]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Validated(Net):
    """Validates too, and saves the largest value that it saw."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.log("largest", max(float(self.net(part).max()) for part in parts), batch_size=ROWS)


class ByHand(Net):
    """Steps its optimizer itself, in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def fitted(
    loader: Any, strategy: Any, val: Any = None, kind: type[Net] = Net, path: Any = None, **options: Any
) -> tuple[Net, Trainer]:
    """A module trained from seeds with a strategy, and its Trainer; `path` is of a checkpoint to go on from."""
    torch.manual_seed(1)
    random.seed(1)
    options = {"max_epochs": 2, "max_steps": -1, "callbacks": [Sees()], **options}
    module, trainer = kind(), trainer_of(strategy, **options)
    trainer.fit(module, loader, val, ckpt_path=path, weights_only=None if path is None else False)
    return module, trainer


STREAMS: dict[str, Callable[[], Any]] = {
    "without a length": lambda: DataLoader(Rows(), batch_size=None),
    "with a length": lambda: DataLoader(Sized(), batch_size=None),
    "samples": lambda: DataLoader(Rows(), batch_size=2),
    "random": lambda: DataLoader(Rows(draws=True), batch_size=None),
    "random, with a length": lambda: DataLoader(Sized(draws=True), batch_size=None),
    "workers": lambda: DataLoader(Rows(draws=True), batch_size=None, num_workers=2),
    "workers that stay": lambda: DataLoader(Rows(draws=True), batch_size=None, num_workers=1, persistent_workers=True),
    "joined": Joined,
    "not torch's": Batches,
    "its own iterator": Once,
    "two": lambda: {"a": DataLoader(Rows(), batch_size=None), "b": Batches(3)},
}

FEATURES: dict[str, dict[str, Any]] = {
    "several epochs": {"max_epochs": 3},
    "max_steps": {"max_epochs": -1, "max_steps": 3},
    "limit_train_batches": {"limit_train_batches": 1, "max_epochs": 3},
    "overfit_batches": {"overfit_batches": 1},
    "fast_dev_run": {"fast_dev_run": 2},
    "accumulate_grad_batches": {"accumulate_grad_batches": 2},
    "gradient_clip_val": {"gradient_clip_val": 0.01},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "detect_anomaly": {"detect_anomaly": True},
    "validation within an epoch": {"kind": Validated, "val_check_interval": 2, "check_val_every_n_epoch": None},
    "sanity check": {"kind": Validated, "num_sanity_val_steps": 2},
    "optimization by hand": {"kind": ByHand},
}
"""Options of a Trainer, and the kind of module; a module that validates has a loader of the same kind for it."""


def equal_with(stream: str, feature: str) -> str:
    """Return "equal" if a fit under amp saw the batches of a plain one and left the same bits, else what differs."""
    fits = []
    for strategy in ("auto", AMPStrategy()):
        options = dict(FEATURES[feature])
        val = STREAMS[stream]() if options.get("kind") is Validated else None
        fits.append(fitted(STREAMS[stream](), strategy, val, **options))
    (plain, _), (found, trainer) = fits
    strategy: Any = trainer.strategy
    if strategy.plan.uncounted:
        return f"not counted: {strategy.plan.uncounted}"
    if found.seen != plain.seen or not found.seen:
        return f"saw {found.seen} instead of {plain.seen}"
    same = all(torch.equal(a, b) for a, b in zip(found.parameters(), plain.parameters(), strict=True))
    return "equal" if same else "other parameters"
