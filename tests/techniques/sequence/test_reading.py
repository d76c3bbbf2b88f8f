"""Claim: a rank that reads its own part of every sample trains as ranks that read whole samples, in float64; what it
cannot hand over is refused before anything is trained.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, seed_everything
from scipy import sparse
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp import AMPStrategy, DataError, ShardedTensor, ShardError, SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.planning.plan.plan import Plan
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.optimised import Optimised
from tests.ranks import run_ranks

GENES = 13


class OwnGenes(LightningDataModule):
    """A data module of a few lines, as the page on data shows it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def train_dataloader(self) -> DataLoader[Any]:
        own = lightning_amp.own_part(GENES, self.trainer)
        self.cells = lightning_amp.OwnColumns(self.path, own)
        return DataLoader(self.cells, batch_size=4, collate_fn=lambda rows: {"x": torch.stack(rows)})

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": lightning_amp.as_sharded(batch["x"], self.trainer, dim=1, length=GENES)}

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


class ByHand(OwnGenes):
    """With `from_local` and the sizes of the parts."""

    sizes: tuple[int, ...] | None = (7, 6)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        mesh = self.trainer.strategy.mesh["model"]
        return {"x": ShardedTensor.from_local(batch["x"], mesh, dim=1, sizes=self.sizes)}


class WithoutSizes(ByHand):
    sizes = None


class NotHandedOver(OwnGenes):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Before(OwnGenes):
    def setup(self, stage: str) -> None:
        lightning_amp.own_part(GENES, self.trainer)


class WholeGenes(OwnGenes):
    """Every rank reads whole rows."""

    def train_dataloader(self) -> DataLoader[Any]:
        cells = lightning_amp.OwnColumns(self.path)
        return DataLoader(cells, batch_size=4, collate_fn=lambda rows: {"x": torch.stack(rows)})


class Autoencoder(Optimised, by=torch.optim.SGD, lr=0.05, momentum=0.9):
    """Counts of all genes; `read` picks x from the batch."""

    def __init__(self, features: int = GENES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(features))
        self.net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))
        self.losses: list[float] = []
        self.seen: list[str] = []

    def read(self, batch: Any) -> Tensor:
        return batch["x"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.read(batch)
        x = torch.log1p(x) * self.scale
        loss = (self.net(x[..., None])[..., 0] - x.mean(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx), sync_dist=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(type(self.read(batch)).__name__)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


class OnRna(Autoencoder):
    def read(self, batch: Any) -> Tensor:
        return batch["rna"]["x"]


def trained(module: Any, data: Any, rank: int, ranks: int, **options: Any) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    strategy = (
        AMPStrategy(**{"strategies": "sequence", "model_parallel_size": ranks, **options}) if ranks > 1 else "auto"
    )
    given = {"max_epochs": None, "precision": "64-true", "limit_val_batches": 2, "num_sanity_val_steps": 0}
    trainer = trainer_of(strategy, rank=rank, ranks=ranks, use_distributed_sampler=False, **given)
    trainer.fit(module, datamodule=data)
    plan = getattr(trainer.strategy, "plan", None)
    (val,) = trainer.validate(module, datamodule=data, verbose=False)
    return {
        "val": val["val"],
        "losses": module.losses,
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "seen": module.seen,
        "plan": None if plan is None else plan.to_json(),
    }


def test_a_fit_in_one_process_reads_whole_rows(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert trained(Autoencoder(), OwnGenes(path), 0, 1)["seen"] == ["Tensor"] * 3


def written(folder: Path) -> str:
    counts = np.random.default_rng(0).poisson(1.0, (12, GENES)).astype(np.float32)
    anndata.AnnData(sparse.csc_matrix(counts)).write_h5ad(folder / "genes.h5ad")
    return str(folder / "genes.h5ad")


def on_ranks(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    path, found = f"{folder}/genes.h5ad", {}
    named = {"sequence_dim": {"x": 1}}
    found["own"] = trained(Autoencoder(), OwnGenes(path), rank, ranks, **named)
    found["by hand"] = trained(Autoencoder(), ByHand(path), rank, ranks, **named)
    found["whole"] = trained(Autoencoder(), WholeGenes(path), rank, ranks, **named)
    data = SingleCellDataModule(f"{folder}/data", batch_size=4)
    found["ours"] = trained(OnRna(40), data, rank, ranks, sequence_dim={"rna.x": 1})
    found["ours"]["columns"] = data.tables["rna"].counts.shape[1], data.tables["hic"].columns
    return found


@pytest.mark.ranks
def test_parts_that_ranks_have_read_train_as_whole_rows_do(tmp_path: Path) -> None:
    path = written(tmp_path)
    synthesize(tmp_path / "data", cells=20, rna_cells=16, bins=24, strata=4, genes=40, cell_types=2)
    right = trained(Autoencoder(), WholeGenes(path), 0, 1)
    ours = trained(OnRna(40), SingleCellDataModule(tmp_path / "data", batch_size=4), 0, 1)
    for rank, found in enumerate(run_ranks(on_ranks, 2, tmp_path, str(tmp_path))):
        assert found["ours"].pop("columns") == (20, None)
        for name, one in found.items():
            expected = ours if name == "ours" else right
            assert one["seen"] == ["Tensor" if name == "whole" else "ShardedTensor"] * 3, name
            assert one["val"] == pytest.approx(expected["val"], rel=1e-12), name
            assert one["losses"] == pytest.approx(expected["losses"], rel=1e-12), name
            torch.testing.assert_close(one["state"], expected["state"], rtol=1e-12, atol=1e-14)
        # a batch that is cut already is planned: a rank holds no whole one
        plans = {name: Plan.from_json(one["plan"]) for name, one in found.items()}
        assert not any(plan.uncounted for plan in plans.values()), rank
        assert plans["own"].predicted_peak_bytes < plans["whole"].predicted_peak_bytes


NAMED = {"sequence_dim": {"x": 1}}
REFUSED: dict[str, tuple[type[OwnGenes], dict[str, Any], type[Exception], str]] = {
    "no technique": (OwnGenes, {"strategies": "S1"}, ShardError, "no technique of this run splits"),
    "without sizes": (WithoutSizes, NAMED, ShardError, "from_local was called without sizes before the fit"),
    "not handed over": (NotHandedOver, NAMED, DataError, "hands over lightning_amp.as_sharded"),
    "before the plan": (Before, {**NAMED, "model_parallel_size": "auto"}, ShardError,
        "own_part was called before a plan is made"),
}  # fmt: skip


def refused(rank: int, ranks: int, path: str) -> dict[str, tuple[str, str]]:
    found = {}
    for name, (data, options, _, _) in REFUSED.items():
        try:
            trained(Autoencoder(), data(path), rank, ranks, **options)
            found[name] = "", ""
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    return found


@pytest.mark.ranks
def test_parts_that_no_technique_takes_are_refused(tmp_path: Path) -> None:
    for found in run_ranks(refused, 2, tmp_path, written(tmp_path)):
        for name, (_, _, kind, words) in REFUSED.items():
            assert found[name][0] == kind.__name__, (name, found[name])
            assert re.search(words, found[name][1]), (name, found[name])
