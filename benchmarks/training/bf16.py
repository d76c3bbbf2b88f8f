"""Training in float32 and under autocast to bfloat16 beside float64: loss curve, embedding, seconds of a step.

    python -m benchmarks.training.bf16 [--epochs 30] [--strategies S4,fused,sparse,stream] [--data DIR] [--write]

The reference model trains on synthetic cells, and on those of `--data`, a directory of `lightning-amp prepare`, from
the same weights and with the same cells and noise in every step; only the precision differs. Given are the largest and
the mean relative difference of the losses from those of float64, the last loss, and how often a logistic regression
tells a cell's type from its Hi-C embedding (5 folds). Differences grow from step to step in any precision: those of
float32 say how much.

Then the decoder alone, N 5,400, w 640, D 128, B 8: a step in both precisions, in turns, beside a product of matrices in
both; a processor without instructions for bfloat16 takes minutes for the product. `--write` puts the tables into
docs/reports/gpu.md. About ten minutes, with --quick (one epoch of few cells, N 600) half a minute.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.overrides import TorchFunctionMode

from benchmarks.decoders import Size
from benchmarks.page import ROOT, origin, paragraph, read_part, table, write_part
from benchmarks.side_by_side.cases import OURS, Case, Method
from benchmarks.side_by_side.plans import plan_of
from benchmarks.side_by_side.training import Training
from benchmarks.training.whole_step import QUIET
from examples.cortex import accuracy
from lightning_amp import GLUE, AMPStrategy, SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize

PAGE, PART = ROOT / "docs" / "reports" / "gpu.md", "training.bf16"
PRECISIONS = {"float64": "64-true", "float32": "32-true", "bfloat16": "bf16-mixed"}
RATES, CORTEX_RATE = {"synthetic": 2e-3}, 1e-2
"""Learning rates; of a directory that of configs/cortex.yaml."""
SYNTHETIC: dict[str, int] = {"cells": 400, "bins": 250, "strata": 16, "genes": 300, "seed": 1}
FEW: dict[str, int] = {"cells": 64, "bins": 60, "strata": 4, "genes": 40, "seed": 1}
HEADER = ["cells", "precision", "steps", "loss differs at most", "in the mean", "last loss", "accuracy"]
DECODER, PRODUCT = Size(anchors=5400, strata=4, cells=8, dim=128, window=640), 2048
PLANS: dict[str, tuple[str, ...]] = {
    "eager": (),
    ",".join(OURS): OURS,
    "S4,sdpa,sparse,stream": ("S4", "sdpa", "sparse", "stream"),
}


class SameDraws(TorchFunctionMode):
    """Normal numbers are drawn in float32 whatever they are for: in another type they would be others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Draw, or call."""
        kwargs = dict(kwargs or {})
        if func not in (torch.randn, torch.randn_like):
            return func(*args, **kwargs)
        like = args[0].dtype if func is torch.randn_like else torch.get_default_dtype()
        dtype = kwargs.get("dtype") or like
        return func(*args, **kwargs | {"dtype": torch.float32}).to(dtype)


class Losses(Callback):
    """Loss of every step; `start` has the weights to begin with, and is filled by the first fit, whose own they are."""

    def __init__(self, start: dict[str, torch.Tensor]) -> None:
        self._start, self.losses = start, list[float]()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Weights drawn in another type would be others."""
        if self._start:
            pl_module.load_state_dict(self._start)
        else:
            self._start.update((name, value.clone()) for name, value in pl_module.state_dict().items())

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Keep it."""
        self.losses.append(float(trainer.callback_metrics["loss"]))


def train(
    data: Path, precision: str, strategies: str, start: dict[str, torch.Tensor], epochs: int, cells: int
) -> tuple[list[float], float]:
    """Losses of a fit, and the accuracy of its embedding."""
    seed_everything(0, verbose=False)
    losses = Losses(start)
    model = GLUE(hidden_depth=1, lam_graph=0.02, window=25, lr=RATES.get(data.name, CORTEX_RATE))
    loader = SingleCellDataModule(data, batch_size=cells, val_fraction=0.0)
    trainer = Trainer(
        **QUIET,
        accelerator="auto",
        devices=1,
        strategy=AMPStrategy(strategies=strategies),
        precision=PRECISIONS[precision],  # type: ignore[arg-type]
        max_epochs=epochs,
        callbacks=[losses],
    )
    with SameDraws():
        trainer.fit(model, datamodule=loader)
    return losses.losses, told_types(trainer.predict(model, datamodule=loader), loader)


def told_types(batches: Any, loader: SingleCellDataModule) -> float:
    """How often a logistic regression tells a cell's type from its Hi-C embedding."""
    types = loader.tables["hic"].read_obs()["celltype"].astype(str).to_numpy()
    of_hic = [batch["hic"] for batch in batches if "hic" in batch]
    rows = np.concatenate([cells["index"] for cells in of_hic])
    embedding = np.concatenate([cells["embedding"].float() for cells in of_hic])
    rows, first = np.unique(rows, return_index=True)
    return accuracy(embedding[first], types[rows])


def fit_rows(data: Path, strategies: str, epochs: int, cells: int) -> Iterator[list[str]]:
    """A row for every precision, float64 first."""
    exact, start = list[float](), dict[str, torch.Tensor]()
    for precision in PRECISIONS:
        losses, share = train(data, precision, strategies, start, epochs, cells)
        exact = exact or losses
        apart = [abs(a - b) / abs(b) for a, b in zip(losses, exact, strict=True)]
        yield [data.name, precision, str(len(apart)), f"{max(apart):.1e}", f"{mean(apart):.1e}", f"{losses[-1]:.4f}",
               f"{share:.3f}"]  # fmt: skip


def step_rows(size: Size, rounds: int, rows: int) -> Iterator[list[str]]:
    """Medians of a decoder's step by plan, and of a product of matrices, in both precisions."""
    runs, factor = dict[str, Any](), torch.randn(rows, rows)
    for name, strategies in PLANS.items():
        case = Case(size=size, method=Method(name="", strategies=strategies), threads=1)
        runs[name] = Training(case, plan_of(case), None).step

    def product() -> tuple[float]:
        begin = time.perf_counter()
        factor @ factor
        return (time.perf_counter() - begin,)

    runs[f"product of {rows:,} x {rows:,}"] = product
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in runs}
    for half in (False, True) * (1 + rounds):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            for name, run in runs.items():
                seconds[name][half].append(run()[0])
    for name, both in seconds.items():
        # the first round warms up
        plain, short = (median(own[1:]) for own in both)
        yield [name, f"{1e3 * plain:.0f} ms", f"{1e3 * short:.0f} ms", f"{plain / short:.2f}"]


def main() -> None:
    """Train with every precision, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--cells", type=int, default=32, help="of a step")
    parser.add_argument("--strategies", default="S4,fused,sparse,stream")
    parser.add_argument("--data", type=Path, help="a data directory, beside synthetic cells")
    parser.add_argument("--rounds", type=int, default=5, help="of steps of the decoder alone")
    parser.add_argument("--quick", action="store_true", help="one epoch of few cells, one round of a small decoder")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/reports/gpu.md")
    asked = parser.parse_args()
    if asked.write:
        read_part(PAGE, PART)  # a page without markers is refused before anything is measured
    epochs, rounds, size, product = asked.epochs, asked.rounds, DECODER, PRODUCT
    if asked.quick:
        epochs, rounds, size, product = 1, 1, replace(DECODER, anchors=600, window=160), 256
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    steps = list(step_rows(size, rounds, product))
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        synthetic = Path(folder) / "synthetic"
        synthesize(synthetic, **FEW if asked.quick else SYNTHETIC)
        data = [synthetic, *filter(None, [asked.data])]
        fits = [row for one in data for row in fit_rows(one, asked.strategies, epochs, asked.cells)]
    given = f" --data {asked.data.name}" if asked.data else ""
    lines = [
        *paragraph(origin(f"python -m benchmarks.training.bf16 --epochs {epochs}{given} --write")),
        *table(HEADER, fits),
        *paragraph(f"The decoder alone, {size}, w {size.window}, one thread, medians of {rounds} rounds:"),
        *table(["plan", "float32", "bfloat16", "times as fast"], steps),
    ]
    if asked.write:
        write_part(PAGE, PART, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
