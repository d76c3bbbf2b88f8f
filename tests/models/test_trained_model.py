"""A trained model is kept: losses of every epoch without a setting, also in a checkpoint; new cells get embeddings."""

import warnings
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import ModelError
from lightning_amp.models.glue import GLUE

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval:UserWarning"),
]
QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "data"
    synthesize(out, cells=20, rna_cells=14, bins=24, strata=4, genes=30, cell_types=2)
    return out


@pytest.fixture(scope="module")
def trainer(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A trainer with its module, after three epochs of two batches."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    made = Trainer(max_epochs=3, logger=CSVLogger(folder, name="", version=""), default_root_dir=folder, **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(GLUE(latent_dim=4, hidden_dim=8, window=4), SingleCellDataModule(root, batch_size=8))
    return made


def objects(root: Path) -> dict[str, anndata.AnnData]:
    return {name: anndata.read_h5ad(next((root / name).glob("*.h5ad"))) for name in ("hic", "rna")}


def test_losses_of_every_epoch_are_logged_and_kept(trainer: Trainer) -> None:
    model = trainer.lightning_module
    assert isinstance(model, GLUE)
    history = model.history
    assert list(history.columns[:2]) == ["train_loss", "val_loss"]
    assert {"train_nll_hic", "train_nll_rna", "train_kl_graph", "train_alignment"} <= set(history)
    assert history.index.tolist() == [0, 1, 2]
    assert history.notna().all().all()
    folder = Path(str(trainer.log_dir))
    logged = pd.read_csv(folder / "metrics.csv").groupby("epoch").max()
    np.testing.assert_allclose(logged["train_loss"], history["train_loss"], rtol=1e-5)
    assert model.written == [folder / "losses.png"]
    assert model.written[0].stat().st_size > 10_000
    # a batch is a step, though two optimizers step
    assert trainer.global_step == 3 * trainer.num_training_batches


def test_a_run_that_is_continued_continues_its_losses(trainer: Trainer, root: Path, tmp_path: Path) -> None:
    path = Path(str(trainer.checkpoint_callback.best_model_path))  # type: ignore[union-attr]
    first = GLUE.load(path.parent.parent)
    pd.testing.assert_frame_equal(first.history, trainer.lightning_module.history)
    options = QUIET | {"logger": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    model, more = GLUE(latent_dim=4, hidden_dim=8, window=4), Trainer(max_epochs=4, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        more.fit(model, SingleCellDataModule(root, batch_size=8), ckpt_path=str(path), weights_only=True)
    assert model.history.index.tolist() == [0, 1, 2, 3]
    pd.testing.assert_frame_equal(model.history[:3], first.history)
    assert model.written == []


def test_new_cells_are_embedded_as_predict_does(trainer: Trainer, root: Path) -> None:
    model, tables = trainer.lightning_module, objects(root)
    assert isinstance(model, GLUE)
    model.train()
    found = model.embed(root)
    data = SingleCellDataModule(root, batch_size=30)
    (predicted,) = Trainer(logger=False, enable_checkpointing=False, **QUIET).predict(model, data)
    model.train()
    for name, embedding in found.items():
        np.testing.assert_allclose(embedding, predicted[name]["embedding"].numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(model.embed(**{name: tables[name]})[name], embedding)
        np.testing.assert_array_equal(model.get_latent_representation(tables[name]), embedding)
    # genes in another order, and cells of a batch that the model has not seen, which is said
    other = tables["rna"][:, ::-1].copy()
    other.obs["batch"] = "new"
    with pytest.warns(UserWarning, match="not seen the batches \\['new'\\]"):
        np.testing.assert_allclose(model.embed(rna=other)["rna"], found["rna"], rtol=1e-5, atol=1e-6)
    assert model.training
    expression = model.get_normalized_expression(tables["rna"], library_size=1e4)
    assert list(expression.columns) == list(tables["rna"].var_names)
    assert list(expression.index) == list(tables["rna"].obs_names)
    np.testing.assert_allclose(expression.sum(axis=1), 1e4, rtol=1e-4)


def test_what_cannot_be_embedded_or_loaded_is_refused(trainer: Trainer, root: Path, tmp_path: Path) -> None:
    model, rna = trainer.lightning_module, objects(root)["rna"]
    assert isinstance(model, GLUE)
    with pytest.raises(ModelError, match="3 of the model's 30 features of 'rna' are missing"):
        model.embed(rna=rna[:, 3:].copy())
    with pytest.raises(ModelError, match="given are neither"):
        model.embed()
    rna.var_names = [f"ENSG{i}" for i in range(30)]
    with pytest.raises(ModelError, match="no feature of this AnnData, such as \\['ENSG0'"):
        model.get_latent_representation(rna)
    with pytest.raises(ModelError, match="no networks yet"):
        GLUE().embed(root)
    with pytest.raises(ModelError, match="found a folder without a checkpoint"):
        GLUE.load(tmp_path)
    (tmp_path / ".metadata").touch()
    with pytest.raises(ModelError, match="lightning-amp convert"):
        GLUE.load(tmp_path)
