"""The schedule of a pipeline, predicted above and measured below, drawn for the docs.

    python -m benchmarks.pipeline.schedule_picture [--schedule 1f1b] [--out docs/techniques/schedule.png]

Two gloo ranks of one thread, started by Lightning; the blocks are those of `unequal_devices.py`. Half a minute.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from benchmarks.page import ROOT
from benchmarks.pipeline.unequal_devices import Tower
from benchmarks.training.whole_step import QUIET
from lightning_amp import AMPStrategy, StratumMemoryMonitor


def main() -> None:
    """Train some steps, and keep the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--out", default=str(ROOT / "docs" / "techniques" / "schedule.png"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        monitor = StratumMemoryMonitor(dirpath=folder)
        strategy = AMPStrategy(
            strategies="pipeline", schedule=asked.schedule, micro_batches=asked.micro_batches
        )
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_steps=4,
            callbacks=[monitor],
            use_distributed_sampler=False,
            **QUIET,
        )
        trainer.fit(Tower(), DataLoader([Tower.batch()] * 4, batch_size=None))
        if trainer.is_global_zero:
            shutil.copy(Path(folder) / "schedule.png", asked.out)


if __name__ == "__main__":
    main()
