"""Cells of Hi-C and of RNA embedded together: the reference model beside the package scglue's, on the same data.

    pip install '.[scglue]'
    python -m benchmarks.training.integration [--cortex FOLDER] [--seeds 0 1 2] [--quick] [--write]

    same-type share  share of a cell's 15 nearest cells in the other modality that are of its type
    FOSCTTM          fraction of the other modality's cells that are closer than the true match, where every cell of the
                     same type is a true match in turn
    seconds          of the processor, of the training alone

The package's network is trained as in examples/scglue_lightning.py; without the package ours is alone. FOLDER has the
cortex files that docs/quickstart.md names. `--write` puts the table into docs/reports/integration.md. About five
minutes a seed, with --quick (few cells, 20 steps) half a minute.
"""

import argparse
import importlib.util
import logging
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything

from benchmarks.domain.integration import TYPES, prepare_cortex, same_type
from benchmarks.page import ROOT, origin, write_as_it_grows
from benchmarks.training.whole_step import QUIET
from lightning_amp import GLUE, SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize

PAGE, PART = ROOT / "docs" / "reports" / "integration.md", "training.integration"
EXAMPLE = ROOT / "examples" / "scglue_lightning.py"
SIZES: dict[str, dict[str, int]] = {
    "small": {"cells": 240, "bins": 120, "strata": 12, "genes": 150, "depth": 6000},
    "middle": {"cells": 480, "bins": 240, "strata": 12, "genes": 300, "depth": 12000},
    "large": {"cells": 960, "bins": 480, "strata": 12, "genes": 600, "depth": 24000},
}
OURS = {"latent_dim": 32, "window": 20, "lr": 0.01, "hidden_depth": 1, "lam_graph": 0.02, "lam_align": 0.1}
"""The settings of the demo."""
CELLS, STEPS = {"ours": 32, "scglue": 16}, {"ours": 280, "scglue": 840}
"""Cells of each modality in a step, and steps: ours those of the demo, the package's those of 60 epochs of it."""
HEADER = ["", "cells x bins x strata, genes", *(f"{what}, {of}" for what in ("same-type share", "FOSCTTM", "seconds")
          for of in CELLS)]  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a model did: as above."""

    share: float
    foscttm: float
    seconds: float


def train(folder: Path, model: str, seed: int, steps: int) -> Found:
    """Train one model on a data directory with one thread, and measure how the modalities agree."""
    seed_everything(seed, verbose=False)
    data = SingleCellDataModule(folder, batch_size=CELLS[model])
    data.setup()
    module = GLUE(**OURS) if model == "ours" else scglue_of(data)
    # manual optimisation counts the steps of both optimizers
    trainer = Trainer(**QUIET, accelerator="cpu", devices=1, max_steps=2 * steps, max_epochs=-1)
    before = time.process_time()
    trainer.fit(module, data)
    seconds = time.process_time() - before
    batches: Any = trainer.predict(module, data)
    embeddings, labels = dict[str, Any](), dict[str, Any]()
    for name, cells in data.tables.items():
        rows, values = (
            torch.cat([batch[name][key] for batch in batches if name in batch]) for key in ("index", "embedding")
        )
        embeddings[name] = np.full((cells.n_cells, values.shape[1]), np.nan, dtype=np.float32)
        embeddings[name][rows.numpy()] = values.numpy()
        labels[name] = cells.read_obs()["celltype"].to_numpy().astype(str)
    types = {name: np.array([TYPES.get(one, one) for one in own]) for name, own in labels.items()}
    return Found(same_type(embeddings, labels), foscttm(embeddings, types), seconds)


def scglue_of(data: SingleCellDataModule) -> LightningModule:
    """The package's network, as the example trains it."""
    spec = importlib.util.spec_from_file_location("scglue_lightning", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    module: LightningModule = example.LightningSCGLUE(example.build(data), data.graph)
    vars(module)["on_train_epoch_end"] = lambda: None  # says every epoch how it goes
    return module


def foscttm(embeddings: dict[str, Any], types: dict[str, Any]) -> float:
    """As above: cells of a type are alike but for noise, and real ones come from other people: there are no pairs."""
    found = list[float]()
    for one, other in permutations(embeddings, 2):
        far = np.linalg.norm(embeddings[one][:, None] - embeddings[other][None], axis=2)
        rank = far.argsort(axis=1).argsort(axis=1) / (far.shape[1] - 1)
        same = types[one][:, None] == types[other][None]
        found += [float(rank[i, same[i]].mean()) for i in np.flatnonzero(same.any(axis=1))]
    return float(np.mean(found))


def rows(
    sizes: dict[str, dict[str, int]], cortex: Path | None, seeds: list[int], steps: dict[str, int]
) -> Iterator[list[str]]:
    """Means over seeds, with the worst in brackets; cells of a package that is not there are empty."""
    models = ["ours", *(["scglue"] if importlib.util.find_spec("scglue") else [])]
    for name in [*sizes, *(["cortex"] if cortex else [])]:
        found = {model: list[Found]() for model in models}
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                data = Path(folder) / name
                if name in sizes:
                    synthesize(data, **sizes[name], seed=seed)
                elif cortex:
                    prepare_cortex(cortex, data)
                for model in models:
                    found[model].append(train(data, model, seed, steps[model]))
        row = [
            name,
            "2 x {cells} x {bins} x {strata}, {genes}".format(**sizes[name]) if name in sizes else "real cells",
        ]
        for what, worst, form in (("share", min, ".3f"), ("foscttm", max, ".3f"), ("seconds", max, ".1f")):
            for model in CELLS:
                values = [float(getattr(one, what)) for one in found.get(model, [])]
                row.append(f"{np.mean(values):{form}} ({worst(values):{form}})" if values else "")
        yield row


def main() -> None:
    """Train, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cortex", type=Path, help="folder with the files of examples/cortex.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="one seed, few cells, 20 steps")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/integration.md")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    sizes, seeds, steps = SIZES, asked.seeds, STEPS
    if asked.quick:
        sizes, seeds, steps = {"small": SIZES["small"] | {"cells": 80}}, [0], dict.fromkeys(STEPS, 20)
    of = ", ".join(map(str, seeds))
    first = f"""{origin("python -m benchmarks.training.integration --write")} One thread. Means over the seeds {of} of
        the synthetic data and of the models; in brackets the worst."""
    write_as_it_grows(PAGE, PART, first, HEADER, rows(sizes, asked.cortex, seeds, steps), write=asked.write)


if __name__ == "__main__":
    main()
