"""A model meets data of another directory: genes in another order give the same numbers, what is missing is refused."""

import shutil
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Trainer

from lightning_amp.cli.main import main
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import ModelError
from lightning_amp.lightning.command_line import _with_new_cells
from lightning_amp.models.glue import GLUE
from lightning_amp.models.inputs import CHECKPOINT_KEY

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "old"
    synthesize(out, cells=20, rna_cells=14, bins=24, strata=4, genes=30, cell_types=2)
    return out


@pytest.fixture
def checkpoint(root: Path, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model, path = GLUE(latent_dim=4, hidden_dim=8, window=4), tmp_path / "model.ckpt"
    trainer = Trainer(max_steps=2, **QUIET | {"enable_checkpointing": True}, default_root_dir=tmp_path)
    trainer.fit(model, SingleCellDataModule(root, batch_size=8))
    trainer.save_checkpoint(path)
    return path


def rewrite(root: Path, out: Path, modality: str, change: Any) -> Path:
    """Copy a data directory with one of its tables changed."""
    copy = Path(shutil.copytree(root, out))
    (path,) = (copy / modality).glob("*.h5ad")
    change(anndata.read_h5ad(path)).write_h5ad(path)
    return copy


def predictions(model: GLUE, root: Path) -> dict[str, torch.Tensor]:
    """Embedding of every cell of both modalities, and expected counts of RNA cells by the model's genes."""
    data = SingleCellDataModule(root, batch_size=30)
    (found,) = Trainer(**QUIET).predict(model, data)
    batch = next(iter(data.predict_dataloader()))
    imputed = model.eval().impute("rna", batch["rna"])
    return {**{name: part["embedding"] for name, part in found.items()}, "imputed": imputed}


def test_genes_in_another_order_are_put_in_order(root: Path, checkpoint: Path, tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(30)
    other = rewrite(root, tmp_path / "new", "rna", lambda table: table[:, order].copy())
    expected = predictions(GLUE.load_from_checkpoint(checkpoint), root)
    found = predictions(GLUE.load_from_checkpoint(checkpoint), other)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    data = SingleCellDataModule(other)
    Trainer(**QUIET).predict(GLUE.load_from_checkpoint(checkpoint), data)
    genes = anndata.read_h5ad(next((root / "rna").glob("*.h5ad"))).var_names
    assert data.tables["rna"].feature_names() == list(genes) == list(data.tables["rna"].read_var().index)


def test_genes_that_the_model_lacks_are_left_out(root: Path, checkpoint: Path, tmp_path: Path) -> None:
    def add(table: anndata.AnnData) -> anndata.AnnData:
        more = table[:, :3].copy()
        more.var_names = ["new1", "new2", "new3"]
        return anndata.concat([more, table], axis=1, merge="first")

    other = rewrite(root, tmp_path / "new", "rna", add)
    expected = predictions(GLUE.load_from_checkpoint(checkpoint), root)
    found = predictions(GLUE.load_from_checkpoint(checkpoint), other)
    torch.testing.assert_close(found["rna"], expected["rna"], rtol=1e-5, atol=1e-6)


def renamed(table: anndata.AnnData) -> anndata.AnnData:
    table.var_names = [f"other{i}" if i >= 2 else name for i, name in enumerate(table.var_names)]
    return table


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_missing_genes_are_refused_in_python_and_on_the_command_line(
    root: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the configuration of a run is written into its folder
    other = rewrite(root, tmp_path / "new", "rna", renamed)
    text = "28 of the model's 30 features of 'rna' are missing"
    with pytest.raises(ModelError, match=text):
        Trainer(**QUIET).predict(GLUE.load_from_checkpoint(checkpoint), SingleCellDataModule(other))
    config = {
        "seed_everything": 1,
        "trainer": QUIET,
        "model": {"class_path": "lightning_amp.GLUE", "init_args": {"latent_dim": 4, "hidden_dim": 8, "window": 4}},
        "data": {"class_path": "lightning_amp.SingleCellDataModule", "init_args": {"data_dir": str(other)}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    words = ["predict", "--config", str(tmp_path / "config.yaml"), "--ckpt_path", str(checkpoint)]
    assert main(words) != 0
    assert text in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_new_cells_are_predicted_into_a_folder_of_their_own(
    root: Path, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rewrite(root, tmp_path / "new", "rna", lambda table: table[3:9].copy())
    writer = {"class_path": "lightning_amp.PredictionWriter", "init_args": {"out_dir": "predictions"}}
    config = {
        "seed_everything": 1,
        "trainer": QUIET | {"callbacks": [writer]},
        "model": {"class_path": "lightning_amp.GLUE", "init_args": {"latent_dim": 4, "hidden_dim": 8, "window": 4}},
        "data": {"class_path": "lightning_amp.SingleCellDataModule", "init_args": {"data_dir": str(root)}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    words = ["predict", "--config", "config.yaml", "--ckpt_path", str(checkpoint), "--data"]
    assert main([*words, "new"]) == 0
    assert anndata.read_h5ad("predictions_new/embeddings_rna.h5ad").n_obs == 6
    assert not (tmp_path / "predictions").exists()
    assert main([*words, "absent"]) == 2
    assert "--data 'absent' was given; --data DIR names a folder" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "expected"), [
    ("--config c --data d --out o", ("--config c --data.init_args.data_dir d", "d", "o")),
    ("--data=d --config c", ("--config c --data.init_args.data_dir d", "d", None)),
    ("--data my.Data --data.path d", ("--data my.Data --data.path d", None, None)),
])  # fmt: skip
def test_folders_are_told_from_classes(
    words: str, expected: tuple[str, str | None, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    others, *folders = _with_new_cells(words.split())
    assert (" ".join(others), *(None if x is None else str(x) for x in folders)) == expected


def test_other_bins_are_refused(root: Path, checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "finer"
    synthesize(other, cells=20, rna_cells=14, bins=28, strata=4, genes=30, cell_types=2)
    with pytest.raises(ModelError, match=r"built for 24 bins .* found 28"):
        Trainer(**QUIET).predict(GLUE.load_from_checkpoint(checkpoint), SingleCellDataModule(other, modalities=["hic"]))


def test_other_strata_are_refused(root: Path, checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "fewer"
    synthesize(other, cells=20, rna_cells=14, bins=24, strata=3, genes=30, cell_types=2)
    with pytest.raises(ModelError, match=r"strata at the distances \[0, 1, 2, 3\], found \[0, 1, 2\]"):
        Trainer(**QUIET).predict(GLUE.load_from_checkpoint(checkpoint), SingleCellDataModule(other, modalities=["hic"]))


def test_a_new_batch_is_said_and_refused_in_training(root: Path, checkpoint: Path, tmp_path: Path) -> None:
    def label(table: anndata.AnnData) -> anndata.AnnData:
        table.obs["batch"] = ["b7"] * len(table)
        return table

    other = rewrite(root, tmp_path / "new", "rna", label)
    model = GLUE.load_from_checkpoint(checkpoint)
    with pytest.raises(ModelError, match=r"the model has no batch \['b7'\] of 'rna', only \['"):
        Trainer(**QUIET, max_steps=1).fit(model, SingleCellDataModule(other))
    expected = predictions(GLUE.load_from_checkpoint(checkpoint), root)
    with pytest.warns(UserWarning, match=r"not seen the batches \['b7'\]"):
        found = predictions(model, other)
    torch.testing.assert_close(found["rna"], expected["rna"])


def test_a_checkpoint_without_names_is_compared_by_sizes(root: Path, checkpoint: Path, tmp_path: Path) -> None:
    old = torch.load(checkpoint, weights_only=False)
    for part in old[CHECKPOINT_KEY]["modalities"].values():
        del part["features"], part["batches"]
    torch.save(old, tmp_path / "old.ckpt")
    model = GLUE.load_from_checkpoint(tmp_path / "old.ckpt")
    assert predictions(model, root).keys() == {"hic", "rna", "imputed"}
    fewer = rewrite(root, tmp_path / "new", "rna", lambda table: table[:, :20].copy())
    with pytest.raises(ModelError, match=r"built for 30 features of 'rna', found 20"):
        predictions(GLUE.load_from_checkpoint(tmp_path / "old.ckpt"), fewer)
