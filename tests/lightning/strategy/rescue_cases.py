"""A module whose memory ends in a chosen batch, and fits of it with and without that."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.strategy.any_module_cases import trainer_of

BATCHES = [torch.randn(6, 8, generator=torch.Generator().manual_seed(k)) for k in range(5)]


class Ends(torch.autograd.Function):
    """Passes values on; memory ends in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")


class Deep(pl.LightningModule):
    """Blocks with everything that a batch changes beside parameters: buffers, metrics, logs, random streams.

    Args:
        ends: "forward", "backward" or "update" of which batch memory ends; None for a run without.
        times: How often it ends there.
    """

    def __init__(self, ends: tuple[str, int] | None = None, *, times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = [nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)]
        self.blocks = nn.ModuleList(nn.Sequential(*block, nn.Linear(8, 8)) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.mean = MeanMetric()
        self.ends, self.times, self.means = ends, times, list[float]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.norm(batch + float(np.random.rand()))
        for block in self.blocks:
            x = x + block(x)
        loss = F.mse_loss(x, batch)
        self.mean.update(loss.detach())
        self.log("epoch", loss, on_epoch=True, on_step=False)
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        if self._ends("forward", batch_idx):
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")
        return Ends.apply(loss) if self._ends("backward", batch_idx) else loss

    def on_train_epoch_end(self) -> None:
        self.means.append(float(self.mean.compute()))

    def _ends(self, where: str, batch_idx: int) -> bool:
        # not in the profile, which runs the step of a copy
        here = isinstance(self.trainer.strategy, AMPStrategy)
        if not here or self.ends != (where, batch_idx) or not self.times:
            return False
        self.times -= 1
        return True

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self._ends("update", args[1]):
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def fit(module: Deep, strategy: Any, *, rank: int = 0, ranks: int = 1, **options: Any) -> dict[str, Any]:
    """What a run of two epochs leaves."""
    torch.manual_seed(5)
    np.random.seed(5)
    options = {"precision": "64-true", "max_steps": -1, "max_epochs": 2, **options}
    trainer = trainer_of(strategy, rank=rank, ranks=ranks, **options)
    own = BATCHES if ranks == 1 else [batch.chunk(ranks)[rank] for batch in BATCHES]
    trainer.fit(module, DataLoader(own, batch_size=None))
    return {
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "logged": {name: float(value) for name, value in trainer.logged_metrics.items()},
        "means": module.means,
        "random": (torch.get_rng_state(), float(np.random.rand())),
        "progress": trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict(),
        "strategies": trainer.strategy.plan.strategies if isinstance(strategy, AMPStrategy) else (),
        "steps": trainer.global_step,
    }


def on_rank(rank: int, ranks: int, ends_on: tuple[int, ...], where: str) -> dict[str, Any]:
    """A run on ranks, on some of which memory ends."""
    module = Deep((where, 1) if rank in ends_on else None)
    strategy = AMPStrategy(rescue=True, share_batch_statistics=False)
    return fit(module, strategy, rank=rank, ranks=ranks)
