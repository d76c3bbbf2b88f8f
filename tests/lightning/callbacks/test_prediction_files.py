"""The files of a prediction go on in scanpy and cooler: genes, neighbours, settings, pseudobulk, imputed expression."""

import json
from pathlib import Path
from typing import Any

import anndata
import cooler
import h5py
import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.spatial.distance import cdist

from lightning_amp import figures
from lightning_amp.data.files.new_hdf5 import is_fixed
from lightning_amp.data.files.strata_layout import FeatureLayout, StratumLayout
from lightning_amp.data.files.write_results import _file_stems, read_assembly, write_pseudobulk
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import DataError, ModelError
from lightning_amp.lightning.callbacks.prediction_writer import PredictionWriter
from lightning_amp.lightning.callbacks.predictions import collect_predictions
from tests.any_module import QUIET

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
]
KEYS = {"celltype_key": "celltype", "batch_key": "batch"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "synthetic"
    synthesize(out, cells=30, rna_cells=21, bins=24, strata=4, genes=40, cell_types=2)
    (hic,) = (out / "hic").glob("*.h5ad")
    with h5py.File(hic, "r+") as file:
        del file["uns/amp/genome_assembly"]
        anndata.io.write_elem(file, "uns/amp/genome_assembly", "hg38")
    return out


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take the most of the time, and other tests look at them."""
    for name in ("embedding", "contact_maps"):
        monkeypatch.setattr(figures, name, lambda path, **_: path.touch())


class Halves(pl.LightningModule):
    """Embeds a cell at random and imputes half its counts."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {
            name: {"index": cells["index"], "embedding": torch.randn(len(cells["index"]), 4)}
            for name, cells in batch.items()
        }

    def impute(self, modality: str, cells: Any) -> torch.Tensor:
        assert not self.training, "imputing in training mode"
        return cells["x"] / 2


class Mute(pl.LightningModule):
    predict_step = Halves.predict_step


def predict(
    root: Path, writer: PredictionWriter, model: pl.LightningModule | None = None, **options: Any
) -> tuple[list[Any] | None, SingleCellDataModule]:
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[writer], **QUIET, **options)
    data = SingleCellDataModule(root, batch_size=8)
    return trainer.predict(model or Halves(), datamodule=data), data


def source(root: Path, modality: str) -> anndata.AnnData:
    (path,) = (root / modality).glob("*.h5ad")
    return anndata.read_h5ad(path)


def test_the_h5ad_has_genes_and_settings(root: Path, tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path, impute_rna=True, contact_map_cells=0, **KEYS)
    outputs, data = predict(root, writer)
    collected = collect_predictions(outputs, data)
    for modality in ("hic", "rna"):
        found, cells = anndata.read_h5ad(tmp_path / f"embeddings_{modality}.h5ad"), source(root, modality)
        embedding = found.obsm["X_amp"]
        assert found.X is None
        pca = found.obsm["X_pca"]
        np.testing.assert_allclose(cdist(pca, pca), cdist(embedding, embedding), atol=1e-5)
        assert found.uns["pca"]["variance_ratio"].sum() == pytest.approx(1)
        about = found.uns["lightning_amp"]
        assert about["torch"] == torch.__version__
        assert (about["model"], about["checkpoint"], about["strategy"]) == ("Halves", "none", "SingleDeviceStrategy")
        assert dict(about["settings"]) == KEYS
        assert json.loads(about["hyper_parameters"]) == {}
        pd.testing.assert_frame_equal(found.var, collected[modality].var)
    np.testing.assert_array_equal(found.var_names, cells.var_names)
    assert {"chrom", "chromStart", "chromEnd"} <= set(found.var)
    assert found.layers["imputed"].dtype == np.float32
    np.testing.assert_array_equal(found.layers["imputed"], cells.X.toarray() / 2)


def test_what_was_not_predicted_has_no_expression(root: Path, tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path, impute_rna=True, contact_map_cells=0, celltype_key="celltype")
    predict(root, writer, limit_predict_batches=1)
    found = anndata.read_h5ad(tmp_path / "embeddings_rna.h5ad")
    assert np.isfinite(found.layers["imputed"]).all(axis=1).tolist() == [True] * 8 + [False] * 13
    assert np.isfinite(found.obsm["X_pca"]).all(axis=1).tolist() == [True] * 8 + [False] * 13
    cells = sum(json.loads(cooler_attribute(path, "metadata"))["cells"] for path in pseudobulk(tmp_path))
    assert cells == 8, "the cells that were predicted"


def pseudobulk(folder: Path) -> list[Path]:
    return sorted((folder / "pseudobulk").glob("*.cool"))


def cooler_attribute(path: Path, name: str) -> Any:
    with h5py.File(path) as file:
        return file.attrs[name]


def test_pseudobulk_is_the_sum_over_the_cells_of_a_type(root: Path, tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path, contact_map_cells=0, **KEYS)
    _, data = predict(root, writer)
    cells = source(root, "hic")
    types = sorted(cells.obs["celltype"].unique())
    assert [path.stem for path in pseudobulk(tmp_path)] == [name.replace(" ", "_") for name in types]
    for path, name in zip(pseudobulk(tmp_path), types, strict=True):
        clr = cooler.Cooler(str(path))
        mine = cells.X.toarray()[cells.obs["celltype"] == name]
        dense, total = clr.matrix(balance=False)[:], mine.sum(axis=0) / 2
        for stratum in data.layout.strata:
            expected = total[slice(*stratum.columns)]
            np.testing.assert_array_equal(dense[stratum.anchors, stratum.anchors + stratum.k], expected)
        assert clr.info["sum"] == total.sum()
        assert clr.info["metadata"] == {
            "celltype": name,
            "cells": len(mine),
            "count": "sum of the expected contacts of the cells",
        }
        assert clr.bins().columns.tolist() == ["chrom", "start", "end"], "no weights"
        assert clr.binsize == 1_000_000
        assert cooler.fileops.is_cooler(str(path))
        assert path in writer.written


def test_imputed_maps_name_the_assembly_of_the_contacts(root: Path, tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path, contact_map_cells=1, **KEYS)
    predict(root, writer)
    maps = [path for path in writer.written if path.suffix in (".scool", ".cool")]
    assert len(maps) == 3
    assert {cooler_attribute(path, "genome-assembly") for path in maps} == {"hg38"}
    (cell,) = cooler.fileops.list_scool_cells(str(maps[0]))
    assert cooler.Cooler(f"{maps[0]}::{cell}").info["genome-assembly"] == "hg38"
    data = SingleCellDataModule.from_anndata(hic=source(root, "hic"))
    data.setup()
    assert read_assembly(data.tables["hic"].path) == "hg38"


def test_bins_that_leave_some_out_are_not_of_one_width(tmp_path: Path) -> None:
    bins = pd.DataFrame({"chrom": "chr1", "start": [0, 10, 30], "end": [10, 20, 40]})
    assert is_fixed(bins[:2])
    assert not is_fixed(bins), "cooler would look for the third one at 20"
    # a stratum that is padded beyond the last bin, as in HiGLUE's files
    strata = (StratumLayout(0, None, 0, 3, np.arange(3)), StratumLayout(1, None, 3, 6, np.arange(3)))
    layout = FeatureLayout(strata, np.array(["chr1:0-10", "chr1:10-20", "chr1:30-40"]))
    sums = {"L2/3 IT": (2, np.arange(6.0)), "l2 3 IT": (1, np.ones(6))}
    paths = write_pseudobulk(tmp_path, layout=layout, sums=sums, key="type")
    assert [path.name for path in paths] == ["L2_3_IT.cool", "l2_3_IT_2.cool"]
    one = cooler.Cooler(str(paths[0]))
    assert one.pixels()[:]["count"].tolist() == [3, 1, 4, 2], "no pixel for a sum of zero"
    assert one.info["metadata"]["type"] == "L2/3 IT"
    assert _file_stems(["", "..", "a"]) == ["_", "__2", "a"]


def test_columns_and_options_that_there_are_not(root: Path, tmp_path: Path) -> None:
    for option in KEYS:
        writer = PredictionWriter(tmp_path, **{option: "cluster"})
        with pytest.raises(DataError, match=rf"{option}='cluster' is no column of obs; found .*'celltype'"):
            predict(root, writer)
    with pytest.raises(ModelError, match="impute_rna=True is not supported: 'Mute' has no method impute"):
        predict(root, PredictionWriter(tmp_path, contact_map_cells=0, impute_rna=True), Mute())
    writer = PredictionWriter(tmp_path, contact_map_cells=0, celltype_key="celltype")
    predict(root, writer, Mute())
    assert any("no pseudobulk is written: it requires a model with impute" in x for x in writer.remarks)
    assert not (tmp_path / "pseudobulk").exists()
