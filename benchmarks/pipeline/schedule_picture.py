"""The schedule of a pipeline, predicted above and measured below, drawn for the docs.

    python -m benchmarks.pipeline.schedule_picture [--schedule 1f1b] [--out docs/techniques/schedule.png]

Two gloo ranks of one thread, started by Lightning; equal blocks. Half a minute.
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.page import ROOT
from lightning_amp import AMPStrategy, StratumMemoryMonitor
from tests.any_module import QUIET

BLOCKS, WIDTH, SAMPLES = 18, 1024, 960


class Tower(pl.LightningModule):
    """Equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A mean over samples."""
        loss: Tensor = self.blocks(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        """Without state."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main() -> None:
    """Train some steps, and keep the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--out", default=str(ROOT / "docs" / "techniques" / "schedule.png"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        monitor = StratumMemoryMonitor(dirpath=folder)
        strategy = AMPStrategy(strategies="pipeline", schedule=asked.schedule, micro_batches=asked.micro_batches)
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_steps=4,
            callbacks=[monitor],
            use_distributed_sampler=False,
            **QUIET,
        )
        trainer.fit(Tower(), DataLoader([torch.randn(SAMPLES, WIDTH)] * 4, batch_size=None))
        if trainer.is_global_zero:
            shutil.copy(Path(folder) / "schedule.png", asked.out)


if __name__ == "__main__":
    main()
