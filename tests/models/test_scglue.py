"""Claim: the network of the package scglue, wrapped as in the example, trains under "amp" as on one device.

Compared are two ranks of unequal numbers of cells and one process with the union of their cells, in float64, without
dropout. Skipped where scglue is not installed: `pip install '.[scglue]'`.
"""

import importlib.util
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.paths import EXAMPLES
from tests.ranks import run_ranks

# looked for, not imported: its own imports warn of much that is deprecated
pytestmark = pytest.mark.skipif(importlib.util.find_spec("scglue") is None, reason="scglue is not installed")

EXAMPLE = EXAMPLES / "scglue_lightning.py"
CELLS, STEPS = (5, 3), 4
"""Cells of each modality on the two ranks, and steps."""


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self.values.append(loss.detach().clone())


def example() -> Any:
    spec = importlib.util.spec_from_file_location("scglue_lightning", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batches_of(data: SingleCellDataModule, rank: int | None) -> list[Any]:
    """The cells of a rank, or with None those of all ranks."""
    own = slice(None) if rank is None else slice(sum(CELLS[:rank]), sum(CELLS[: rank + 1]))
    steps = [batch for _, batch in zip(range(STEPS), data.train_dataloader(), strict=False)]
    assert len(steps) == STEPS
    return [
        {
            name: {key: part[own].double() if part.is_floating_point() else part[own] for key, part in c.items()}
            for name, c in batch.items()
        }
        for batch in steps
    ]


def plain_descent(network: nn.Module) -> list[torch.optim.Optimizer]:
    judge = list(network.du.parameters())
    others = [p for name, p in network.named_parameters() if not name.startswith("du.")]
    return [torch.optim.SGD(parameters, lr=0.02, momentum=0.5) for parameters in (judge, others)]


def train(glue: Any, data: SingleCellDataModule, rank: int | None) -> dict[str, Any]:
    """Train with "amp" on the running ranks, or with rank None on one device without it."""
    torch.manual_seed(0)
    module = glue.LightningSCGLUE(glue.build(data, dim=6, hidden=8, dropout=0.0), data.graph).double()
    # RMSprop would make steps of the rounding of gradients that are 0, as those of a bias before a BatchNorm
    module.configure_optimizers = lambda: plain_descent(module.network)
    start = {key: value.clone() for key, value in module.state_dict().items()}
    losses, strategy = Losses(), "auto" if rank is None else AMPStrategy()
    options: dict[str, Any] = {"max_steps": -1, "use_distributed_sampler": False, "callbacks": [losses]}
    trainer = trainer_of(strategy, rank=rank or 0, ranks=1 if rank is None else 2, **options)
    trainer.fit(module, DataLoader(batches_of(data, rank), batch_size=None))  # type: ignore[arg-type]
    state, names = module.state_dict(), [name for name, _ in module.named_parameters()]
    return {"start": start, "state": state, "parameters": names, "losses": torch.stack(losses.values)}


def on_rank(rank: int | None, ranks: int, folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    data = SingleCellDataModule(folder, batch_size=sum(CELLS), val_fraction=0)
    data.setup()
    return train(example(), data, rank)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other), "the same state"
    return max(((one[k] - other[k]).double().norm() / (1 + other[k].double().norm())).item() for k in one)


@pytest.mark.ranks
def test_two_ranks_train_as_one_device_on_the_union(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    synthesize(folder, cells=40, bins=12, strata=3, genes=15, chromosomes=1, depth=200)
    with warnings.catch_warnings():
        union, ranks = on_rank(None, 1, folder), run_ranks(on_rank, 2, tmp_path, folder)
    assert all(not torch.equal(union["start"][key], union["state"][key]) for key in union["parameters"])
    for rank in ranks:
        assert distance(rank["start"], union["start"]) == 0
        assert distance(rank["state"], union["state"]) < 1e-10
    first, second = (rank["state"] for rank in ranks)
    assert all(torch.equal(first[key], second[key]) for key in first)
    shares = [n / sum(CELLS) for n in CELLS]
    losses = sum(share * rank["losses"] for share, rank in zip(shares, ranks, strict=True))
    assert len(losses) == 2 * STEPS, "the discriminator's and the generator's"
    torch.testing.assert_close(losses, union["losses"], rtol=1e-10, atol=0)


@pytest.mark.exhaustive
@pytest.mark.release
def test_the_example_runs_and_writes_what_it_says(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--out", str(tmp_path), "--epochs", "3"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=250)
    assert run.returncode == 0, run.stderr
    assert "plan            S1 data parallel" in run.stderr
    losses = [float(value) for value in re.findall(r"generator_loss (\S+)", run.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2
    for name in ("hic", "rna"):
        embedding = anndata.read_h5ad(tmp_path / f"embeddings_{name}.h5ad").obsm["X_amp"]
        assert embedding.shape == (200, 32)
        assert np.isfinite(embedding).all()
    assert run.stdout.count("after training: ") == 2
