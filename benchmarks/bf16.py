"""Training in float32 and under autocast to bfloat16 beside float64: loss curve, embedding, seconds of a step.

    python -m benchmarks.bf16 [--epochs 30] [--strategies S4,fused,sparse,stream] [--data DIR] [--write]

The reference model trains on synthetic cells, and on those of `--data`, a directory of `lightning-amp prepare`, from
the same weights and with the same cells and noise in every step; only the precision differs. Given are the largest and
the mean relative difference of the losses from those of float64, the last loss, the share of cells whose nearest
neighbours in the other modality are of the same type (where types are known), and the least time of a step. `--write`
puts the table into docs/gpu.md. Differences grow from step to step in any precision: those of float32 say how much.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.overrides import TorchFunctionMode

from benchmarks.page import ROOT, origin, paragraph, table, write_part
from lightning_amp import GLUE, AMPStrategy, SingleCellDataModule
from lightning_amp.data.neighbours import same_type_share
from lightning_amp.data.prepare.synthetic import synthesize

PRECISIONS = {"float64": "64-true", "float32": "32-true", "bfloat16": "bf16-mixed"}
SYNTHETIC: dict[str, Any] = {"cells": 400, "bins": 250, "strata": 16, "genes": 300, "seed": 1}
HEADER = [
    "cells",
    "precision",
    "steps",
    "loss differs at most",
    "in the mean",
    "last loss",
    "same type",
    "step",
]
QUIET = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class SameDraws(TorchFunctionMode):
    """Normal numbers are drawn in float32 whatever they are for: in another type they would be others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in (torch.randn, torch.randn_like):
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or (
            args[0].dtype if func is torch.randn_like else torch.get_default_dtype()
        )
        return func(*args, **kwargs | {"dtype": torch.float32}).to(dtype)


class Losses(Callback):
    """Loss and seconds of every step.

    Args:
        start: The weights to begin with; filled by the first fit, whose own they are.
    """

    def __init__(self, start: dict[str, torch.Tensor]) -> None:
        self._start = start
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Weights drawn in another type would be others."""
        if self._start:
            pl_module.load_state_dict(self._start)
        else:
            self._start.update((name, value.clone()) for name, value in pl_module.state_dict().items())

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Begin."""
        self._begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Keep both."""
        self.seconds.append(time.perf_counter() - self._begin)
        self.losses.append(float(trainer.callback_metrics["loss"]))


def train(
    data: Path,
    precision: str,
    strategies: str,
    start: dict[str, torch.Tensor],
    *,
    epochs: int,
    cells: int,
) -> tuple[Losses, float]:
    """Losses and seconds of a fit, and the share of neighbours of the same type, nan where types are not known."""
    seed_everything(0, verbose=False)
    losses = Losses(start)
    model = GLUE(hidden_depth=1, lam_graph=0.02, window=25)
    loader = SingleCellDataModule(data, batch_size=cells, val_fraction=0.0)
    trainer = Trainer(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=1,
        strategy=AMPStrategy(strategies=strategies),
        precision=PRECISIONS[precision],  # type: ignore[arg-type]
        max_epochs=epochs,
        limit_val_batches=0,
        callbacks=[losses],
        **QUIET,
    )
    with SameDraws():
        trainer.fit(model, datamodule=loader)
    return losses, accuracy(trainer.predict(model, datamodule=loader), loader)


def accuracy(batches: Any, loader: SingleCellDataModule) -> float:
    """Share of cells whose neighbours in the other modality are of their type."""
    found: dict[str, np.ndarray] = {}
    for batch in batches:
        for name, cells in batch.items():
            embedding = cells["embedding"].float()
            rows = found.setdefault(name, np.full((loader.tables[name].n_cells, embedding.shape[1]), np.nan))
            rows[cells["index"]] = embedding
    known = {name: part.read_obs() for name, part in loader.tables.items()}
    if not all("celltype" in obs for obs in known.values()):
        return float("nan")
    types = {name: obs["celltype"].astype(str).to_numpy() for name, obs in known.items()}
    shares = same_type_share(found, types)
    return float("nan") if shares is None else float(shares[0])


def rows(name: str, data: Path, strategies: str, *, epochs: int, cells: int) -> Iterator[list[str]]:
    """A row of the table of `HEADER` for every precision, float64 first."""
    exact: list[float] = []
    start: dict[str, torch.Tensor] = {}
    for precision in PRECISIONS:
        losses, share = train(data, precision, strategies, start, epochs=epochs, cells=cells)
        exact = exact or losses.losses
        apart = [abs(a - b) / abs(b) for a, b in zip(losses.losses, exact, strict=True)]
        row = [
            name,
            precision,
            str(len(apart)),
            f"{max(apart):.1e}",
            f"{mean(apart):.1e}",
            f"{losses.losses[-1]:.4f}",
            f"{share:.3f}",
            f"{1e3 * min(losses.seconds):.0f} ms",
        ]
        # a run is long: what there is stays if the rest fails
        print("; ".join(row), file=sys.stderr, flush=True)
        yield row


def main() -> None:
    """Train with every precision, and print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--cells", type=int, default=32, help="of a step")
    parser.add_argument("--strategies", default="S4,fused,sparse,stream")
    parser.add_argument("--data", type=Path, help="a data directory, beside synthetic cells")
    parser.add_argument("--write", action="store_true", help="put the table into docs/gpu.md")
    arguments = parser.parse_args()
    asked = {name: getattr(arguments, name) for name in ("epochs", "cells")}
    with tempfile.TemporaryDirectory() as folder:
        synthesize(Path(folder) / "data", **SYNTHETIC)
        found = list(rows("synthetic", Path(folder) / "data", arguments.strategies, **asked))
        if arguments.data is not None:
            found += rows(arguments.data.name, arguments.data, arguments.strategies, **asked)
    lines = list(table(HEADER, found))
    if arguments.write:
        text = origin(f"python -m benchmarks.bf16 {' '.join(sys.argv[1:])}")
        write_part(ROOT / "docs" / "gpu.md", "bf16", [*paragraph(text), *lines])
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
