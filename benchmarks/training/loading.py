"""How long a training step waits for its data, with the default workers of `SingleCellDataModule`.

    python -m benchmarks.training.loading [--gigabytes 1.0] [--cells 64] [--threads 1] [--write]

Writes a data directory to a temporary folder, whose h5ad of Hi-C is as large as asked and not compressed: contacts of
a few synthetic cells, drawn again and again. Then trains the reference model under `strategy="amp"`. A step waits from
its predecessor's end to its own beginning, as a callback sees them: reading, making tensors, moving them, and what
Lightning does in between. Printed is the share of the time of `STEPS` steps after warming up: for one
chromosome at 1 Mb, whose batches are dense, and for a genome at 1 Mb, whose batches are entries (`SparseCounts`).
`--write` puts what was found into docs/reports/growth.md. Three minutes on a quiet core and 4 GB of memory for 1 GB.
"""

import argparse
import tempfile
import time
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.gpu.device import wait
from benchmarks.page import ROOT, origin, paragraph, read_part, write_part
from benchmarks.training.whole_step import WARM_UP, prepared
from lightning_amp.quantities import format_bytes, format_seconds

PAGE = ROOT / "docs" / "reports" / "growth.md"
SIZES = ((250, 32), (2700, 8))
"""Bins and strata."""
STEPS = 100
POOL = 256
"""Synthetic cells of which all others are copies."""
GOAL = 0.02
ENTRY_BYTES = 8
"""Of a count in a file: float32 and the int32 of its column."""


class Waiting(Callback):
    """Notes how long each step waited for its batch, and how long it then took; the first one's waiting is not known.

    Args:
        steps: after which training ends
    """

    def __init__(self, steps: float = inf) -> None:
        self.waited: list[float] = []
        self.worked: list[float] = []
        self._steps, self._last = steps, 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """The batch is there."""
        begin = self._lap(pl_module)
        if self.worked:
            self.waited.append(begin)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """The step is done."""
        self.worked.append(self._lap(pl_module))
        if len(self.worked) >= self._steps:
            trainer.should_stop = True

    def _lap(self, module: LightningModule) -> float:
        wait(module.device)
        before, self._last = self._last, time.perf_counter()
        return self._last - before


def write_data(folder: Path, *, gigabytes: float, bins: int, strata: int) -> Path:
    """Write the data directory, and return the path of its large file."""
    from lightning_amp.data.prepare.synthetic import synthesize

    found = synthesize(folder, cells=POOL, bins=bins, strata=strata, genes=300).hic
    assert found is not None, "synthetic data have Hi-C"
    import anndata  # a device that trains on cells made in memory need not have it

    pool = anndata.read_h5ad(found)
    n_cells = round(gigabytes * 1e9 / (ENTRY_BYTES * pool.X.nnz / POOL))
    which = np.random.default_rng(0).integers(POOL, size=n_cells)
    cells = pool[which].copy()
    cells.obs_names = [f"cell{i}" for i in range(n_cells)]
    cells.write_h5ad(found)
    return found


def train(folder: Path, *, cells: int, threads: int) -> Waiting:
    """Train on one device of the CPU, and return what was noted."""
    waiting = Waiting(1 + WARM_UP + STEPS)
    prepared(folder, cells=cells, threads=threads, strategy="amp", callback=waiting)()
    return waiting


def sentence(found: Waiting, *, size: int, bins: int, strata: int, cells: int, threads: int) -> str:
    """What was found."""
    waits, steps = (np.array(seconds[-STEPS:]) for seconds in (found.waited, found.worked))
    share = waits.sum() / (waits + steps).sum()
    return (
        f"An h5ad of {format_bytes(size)} with {bins} bins and {strata} strata, {cells} cells a step, threads:"
        f" {threads}. A step takes {format_seconds(float(np.median(waits + steps)))}, of which it waits"
        f" {format_seconds(float(np.median(waits)))} for data (medians of {STEPS} steps, the longest wait was"
        f" {format_seconds(waits.max())}): {share:.1%} of the time of all, where at most {GOAL:.0%} is the goal."
    )


def main() -> None:
    """Write data, train, and print or write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--cells", type=int, default=64, help="of a step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="put the result into docs/reports/growth.md")
    arguments = parser.parse_args()
    if arguments.write:
        read_part(PAGE, "training.loading")  # a page without markers is refused before anything is measured
    found = [*paragraph(origin("python -m benchmarks.training.loading --write"))]
    for bins, strata in SIZES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "data"
            size = write_data(folder, gigabytes=arguments.gigabytes, bins=bins, strata=strata).stat().st_size
            how = {"cells": arguments.cells, "threads": arguments.threads}
            text = sentence(train(folder, **how), size=size, bins=bins, strata=strata, **how)
        print(text)
        found += [*paragraph(text)]
    if arguments.write:
        write_part(PAGE, "training.loading", found)


if __name__ == "__main__":
    main()
