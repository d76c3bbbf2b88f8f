"""Models of scvi-tools under AMPStrategy: one argument of `train`, and nothing else changes.

    pip install scvi-tools
    python examples/scvi_models.py SCVI --devices 2 --strategies fsdp

Prints the plan, and sums of the trained parameters, by which runs are compared. Synthetic counts; seconds on a CPU.
"""

import argparse
import os

import anndata
import numpy as np
import pandas as pd
import scvi
import torch

import lightning_amp

CELLS, GENES, PROTEINS = 600, 400, 12


def counts() -> anndata.AnnData:
    """Counts of genes and proteins in two batches and two types, with no structure."""
    rng = np.random.default_rng(0)
    found = anndata.AnnData(rng.poisson(1.0, (CELLS, GENES)).astype(np.float32))
    found.obs["batch"] = pd.Categorical(rng.choice(["a", "b"], CELLS))
    found.obs["type"] = pd.Categorical(rng.choice(["x", "y", "unknown"], CELLS))
    names = [f"protein{i}" for i in range(PROTEINS)]
    proteins = rng.poisson(5.0, (CELLS, PROTEINS)).astype(float)
    found.obsm["proteins"] = pd.DataFrame(proteins, index=found.obs_names, columns=names)
    return found


OPTIONS = {
    "SCVI": {"batch_key": "batch"},
    "LinearSCVI": {"batch_key": "batch"},
    "SCANVI": {"labels_key": "type", "unlabeled_category": "unknown"},
    "CondSCVI": {"labels_key": "type"},
    "AUTOZI": {},
    "TOTALVI": {"batch_key": "batch", "protein_expression_obsm_key": "proteins"},
    "PEAKVI": {"batch_key": "batch"},
}
"""Of `setup_anndata`."""


def first_batches(loader: scvi.dataloaders.SemiSupervisedDataLoader) -> tuple[dict[str, torch.Tensor], ...]:
    """A batch like those of a loader that joins others, for the planner."""
    return tuple(next(iter(one)) for one in loader.dataloaders)


def main() -> None:
    """Train one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=OPTIONS)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategies", help="such as S1, fsdp or replay; the planner chooses by default")
    parser.add_argument("--device-memory", help="such as 8GiB")
    arguments = parser.parse_args()
    scvi.dataloaders.SemiSupervisedDataLoader.amp_example_batch = first_batches
    scvi.settings.seed = 0
    kind, cells = getattr(scvi.model, arguments.model), counts()
    kind.setup_anndata(cells, **OPTIONS[arguments.model])
    model = kind(cells)
    strategy = lightning_amp.AMPStrategy(strategies=arguments.strategies, device_memory=arguments.device_memory)
    model.train(
        max_epochs=2,
        accelerator="cpu",
        devices=arguments.devices,
        batch_size=64,
        strategy=strategy,
        early_stopping=False,
    )
    weights = torch.cat([parameter.detach().flatten() for parameter in model.module.parameters()]).double()
    print(f"rank {os.environ.get('LOCAL_RANK', 0)}: {weights.sum().item()!r} {weights.abs().sum().item()!r}")


if __name__ == "__main__":
    main()
