"""Memory over one measured training step of an unedited module, with its prediction, drawn for the docs.

    python -m benchmarks.memory.of_a_step [--strategies S1] [--out docs/memory_of_a_step.png]

The module is the gene transformer of examples/any_module/; the second of two steps is measured, on one CPU rank.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy, StratumMemoryMonitor


def main() -> None:
    """Train two steps, and keep the picture."""
    from tests.any_module import make
    from tests.paths import ROOT

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="S1")
    parser.add_argument("--out", default=str(ROOT / "docs" / "memory_of_a_step.png"))
    arguments = parser.parse_args()
    module, batch = make("gene_transformer")
    with tempfile.TemporaryDirectory() as folder:
        monitor = StratumMemoryMonitor(dirpath=folder)
        trainer = Trainer(
            accelerator="cpu",
            strategy=AMPStrategy(strategies=arguments.strategies),
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            callbacks=[monitor],
        )
        trainer.fit(module, DataLoader([batch, batch], batch_size=None))
        shutil.copy(Path(folder) / "memory.png", arguments.out)
    for row in monitor.modules():
        print(row)


if __name__ == "__main__":
    main()
