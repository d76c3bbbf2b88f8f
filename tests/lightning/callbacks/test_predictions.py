"""What a trained model says about the cells arrives in files with which other tools go on: embeddings, genes, settings,
imputed expression, contact maps and pseudobulk; what cannot be written is refused.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
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
from lightning_amp.data.files.write_results import (
    _file_stems,
    read_assembly,
    same_type_share,
    write_imputed,
    write_pseudobulk,
)
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import DataError, ModelError
from lightning_amp.lightning.callbacks import predictions as gathering
from lightning_amp.lightning.callbacks.prediction_writer import PredictionWriter, _agreement
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
    """Embeds a cell as (row, library, modality, a draw) and imputes half its counts."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        found = {}
        for i, (modality, cells) in enumerate(batch.items()):
            library = cells["library"][:, 0]
            columns = [cells["index"].float(), library, torch.full_like(library, i), torch.randn_like(library)]
            found[modality] = {"index": cells["index"], "embedding": torch.stack(columns, 1)}
        return found

    def impute(self, modality: str, cells: Any) -> torch.Tensor:
        assert not self.training, "imputing in training mode"
        assert not torch.is_grad_enabled(), "imputing with gradients"
        return cells["x"] / 2


class Mute(pl.LightningModule):
    predict_step = Halves.predict_step


def trainer_of(*callbacks: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=1, callbacks=[*callbacks], **QUIET, **options)


def predict(
    root: Path, writer: PredictionWriter, model: pl.LightningModule | None = None, **options: Any
) -> tuple[list[Any] | None, SingleCellDataModule]:
    data = SingleCellDataModule(root, batch_size=8)
    return trainer_of(writer, **options).predict(model or Halves(), datamodule=data), data


def source(root: Path, modality: str) -> anndata.AnnData:
    (path,) = (root / modality).glob("*.h5ad")
    return anndata.read_h5ad(path)


def test_the_files_have_embeddings_in_the_order_of_the_cells_genes_and_settings(root: Path, tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path / "new" / "out", impute_rna=True, **KEYS)
    outputs, data = predict(root, writer)
    collected = collect_predictions(outputs, data, impute=["rna", "hic"])
    names = ["embeddings_hic.h5ad", "embeddings_rna.h5ad", "imputed.scool", "embedding.png", "contact_map.png"]
    assert {*names} <= {path.name for path in writer.written}
    assert sorted(writer.written) == sorted(p for p in (tmp_path / "new" / "out").rglob("*") if p.is_file())
    for modality in ("hic", "rna"):
        cells = source(root, modality)
        found = anndata.read_h5ad(tmp_path / "new" / "out" / f"embeddings_{modality}.h5ad")
        pd.testing.assert_frame_equal(found.obs.astype(str), cells.obs.astype(str))
        embedding, pca = found.obsm["X_amp"], found.obsm["X_pca"]
        assert embedding.dtype == np.float32
        np.testing.assert_array_equal(embedding[:, 0], np.arange(cells.n_obs))
        np.testing.assert_array_equal(embedding[:, 1], np.asarray(cells.X.sum(axis=1)).ravel())
        assert found.X is None
        np.testing.assert_allclose(cdist(pca, pca), cdist(embedding, embedding), rtol=1e-5, atol=1e-2)
        assert found.uns["pca"]["variance_ratio"].sum() == pytest.approx(1)
        about = found.uns["lightning_amp"]
        assert about["torch"] == torch.__version__
        assert (about["model"], about["checkpoint"], about["strategy"]) == ("Halves", "none", "SingleDeviceStrategy")
        assert dict(about["settings"]) == KEYS
        assert json.loads(about["hyper_parameters"]) == {}
        np.testing.assert_array_equal(collected[modality].layers["imputed"], cells.X.toarray() / 2)
        np.testing.assert_array_equal(collected[modality].var_names, cells.var_names)
    np.testing.assert_array_equal(found.var_names, cells.var_names)
    assert {"chrom", "chromStart", "chromEnd"} <= set(found.var)
    assert found.layers["imputed"].dtype == np.float32
    np.testing.assert_array_equal(found.layers["imputed"], cells.X.toarray() / 2)


def test_one_cell_of_each_type_is_imputed_by_default(root: Path, tmp_path: Path) -> None:
    predict(root, writer := PredictionWriter(tmp_path))
    cells = source(root, "hic").obs
    found = [name.removeprefix("/cells/") for name in cooler.fileops.list_scool_cells(str(tmp_path / "imputed.scool"))]
    assert sorted(cells.loc[found, "celltype"]) == sorted(set(cells["celltype"]))
    for name in found:
        same = cells[cells["celltype"] == cells.loc[name, "celltype"]]
        assert sorted(same["depth"]).index(cells.loc[name, "depth"]) == len(same) // 2
    assert tmp_path / "contact_map.png" in writer.written
    predict(root, PredictionWriter(tmp_path, contact_map_cells="all"))
    assert len(cooler.fileops.list_scool_cells(str(tmp_path / "imputed.scool"))) == len(cells)
    with pytest.raises(DataError, match="contact_map_cells='each' is not supported; give 'by_label', 'all'"):
        PredictionWriter(tmp_path, contact_map_cells="each")  # type: ignore[arg-type]


def test_what_is_no_prediction_becomes_no_anndata(root: Path) -> None:
    data = SingleCellDataModule(root, batch_size=8)
    with pytest.raises(DataError, match=r"impute has \['atac'\], and the data have \['hic', 'rna'\]"):
        collect_predictions(*predict(root, PredictionWriter(root.parent / "out", contact_map_cells=0)), impute=["atac"])
    with pytest.raises(DataError, match=r"outputs=\[\] of trainer=None were given; call it with what trainer"):
        collect_predictions([], data)
    outputs = trainer_of().predict(Halves(), datamodule=data, return_predictions=False)
    with pytest.raises(DataError, match=r"outputs=None .* predict on one device, or let the callback"):
        collect_predictions(outputs, data)
    with pytest.raises(ModelError, match=r"'Halves'\.predict_step must return"):
        collect_predictions([torch.ones(2)], data)


def test_imputed_maps_open_in_cooler(root: Path, tmp_path: Path) -> None:
    data = SingleCellDataModule(root)
    data.setup()
    names = data.tables["hic"].obs_names[[7, 2]].tolist()
    predict(root, PredictionWriter(tmp_path, contact_map_cells=names))
    path = tmp_path / "imputed.scool"
    assert sorted(cooler.fileops.list_scool_cells(str(path))) == sorted(f"/cells/{name}" for name in names)
    for row, name in zip((7, 2), names, strict=True):
        clr = cooler.Cooler(f"{path}::/cells/{name}")
        bins = clr.bins()[:]
        spans = [f"{b.chrom}:{b.start}-{b.end}" for b in bins.itertuples()]
        assert spans == data.layout.anchor_names.tolist()
        dense = clr.matrix(balance=False)[:]
        x = data.tables["hic"].counts[row].toarray().ravel()
        assert dense.dtype.kind == "f"
        assert np.triu(dense).sum() == x.sum() / 2
        for stratum in data.layout.strata:
            observed = x[slice(*stratum.columns)] / 2
            np.testing.assert_array_equal(dense[stratum.anchors, stratum.anchors + stratum.k], observed)


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


def test_each_resolution_has_its_own_file(tmp_path: Path) -> None:
    strata = (
        StratumLayout(0, "2kb", 0, 2, np.array([0, 1])),
        StratumLayout(0, "1kb", 2, 6, np.array([2, 3, 4, 5])),
        StratumLayout(1, "1kb", 6, 9, np.array([2, 3, 4])),
    )
    names = ["1:0-2000", "1:2000-4000", *(f"1:{i}000-{i + 1}000" for i in range(4))]
    layout = FeatureLayout(strata, np.array(names))
    paths = write_imputed(tmp_path, layout=layout, contacts=[("a", np.arange(9, dtype=np.float32))], n_cells=1)
    assert [path.name for path in paths] == ["imputed_2kb.scool", "imputed_1kb.scool"]
    coarse, fine = (cooler.Cooler(f"{path}::/cells/a") for path in paths)
    assert (coarse.binsize, fine.binsize) == (2000, 1000)
    np.testing.assert_array_equal(np.diag(coarse.matrix(balance=False)[:]), [0, 1])
    np.testing.assert_array_equal(np.diag(fine.matrix(balance=False)[:], 1), [6, 7, 8])


def test_no_maps_when_none_are_asked_or_there_is_no_hic(root: Path, tmp_path: Path) -> None:
    predict(root, PredictionWriter(tmp_path, contact_map_cells=0))
    assert not (tmp_path / "imputed.scool").exists()
    writer = PredictionWriter(tmp_path)
    data = SingleCellDataModule(root, modalities=["rna"])
    trainer_of(writer).predict(Halves(), datamodule=data, return_predictions=False)
    assert [path.name for path in writer.written] == ["embeddings_rna.h5ad", "embedding.png"]


def test_ranks_are_gathered_and_repeated_cells_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(*rows: int) -> Any:
        return {"hic": [(np.array(rows), np.array(rows, np.float32)[:, None])]}

    def all_gather_object(ranks: list[Any], mine: Any) -> None:
        ranks[:] = [mine, part(2, 3), part(3)]

    monkeypatch.setattr(gathering.dist, "all_gather_object", all_gather_object)
    data: Any = SimpleNamespace(tables={"hic": SimpleNamespace(n_cells=4)})
    assert gathering.gather(part(0, 1), data, 3)["hic"].ravel().tolist() == [0, 1, 2, 3]


def test_the_share_of_neighbours_of_the_same_type() -> None:
    rng = np.random.default_rng(0)
    centres = np.array([[0, 0], [9, 0], [0, 9], [9, 9]])
    types = {"hic": np.arange(80) % 4, "rna": np.arange(100) % 4}
    apart = {name: (centres[t] + rng.normal(size=(len(t), 2))).astype(np.float32) for name, t in types.items()}
    names = {name: t.astype(str) for name, t in types.items()}
    assert same_type_share(apart, names) == pytest.approx((1.0, 0.25), abs=0.01)
    mixed = {"hic": apart["hic"], "rna": apart["rna"][rng.permutation(100)]}
    assert same_type_share(mixed, names)[0] == pytest.approx(0.25, abs=0.08)
    lost = {"hic": np.where(types["hic"][:, None] == 0, np.nan, apart["hic"]), "rna": apart["rna"]}
    assert same_type_share(lost, names)[0] == pytest.approx(1.0, abs=0.01), "cells that were not embedded do not count"
    tables = {name: pd.DataFrame({"celltype": t}) for name, t in names.items()}
    assert _agreement(apart, tables)[0].endswith("25% by chance")
    assert _agreement(mixed, tables)[0].endswith("the modalities do not meet: train for more epochs")
    assert same_type_share({"rna": apart["rna"]}, names) is None
    assert same_type_share(apart, {"hic": names["hic"], "rna": np.full(100, "x")}) is None


def test_what_the_files_do_not_show_is_remarked(root: Path, tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path)
    predict(root, writer)
    cells, share = writer.remarks
    assert "imputed.scool holds 2 of 30 Hi-C cells; all with contact_map_cells: all" in cells
    assert re.match(r"same-type share 0\.\d\d: of a cell's 15 nearest .*, 50% by chance", share)
    predict(root, writer := PredictionWriter(tmp_path, contact_map_cells="all"))
    assert "imputed" not in " ".join(writer.remarks)
    predict(root, writer := PredictionWriter(tmp_path, contact_map_cells=0))
    assert writer.remarks[-1].endswith("did not write, as of another model: ['contact_map.png', 'imputed.scool']")


class Wrong(pl.LightningModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.zeros(3)


def test_what_cannot_be_written_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contact_map_cells=-1 is not supported"):
        PredictionWriter(tmp_path, contact_map_cells=-1)
    with pytest.raises(DataError, match=r"\['nobody'\] are no cells of .*its cells are named like"):
        predict(root, PredictionWriter(tmp_path, contact_map_cells=["nobody"]))
    for option in KEYS:
        with pytest.raises(DataError, match=rf"{option}='cluster' is no column of obs; found .*'celltype'"):
            predict(root, PredictionWriter(tmp_path, **{option: "cluster"}))
    with pytest.raises(ModelError, match="'Mute' has no method impute"):
        predict(root, PredictionWriter(tmp_path), Mute())
    with pytest.raises(ModelError, match="impute_rna=True is not supported: 'Mute' has no method impute"):
        predict(root, PredictionWriter(tmp_path, contact_map_cells=0, impute_rna=True), Mute())
    with pytest.raises(ModelError, match=r"'Wrong'.predict_step must return .*found Tensor"):
        predict(root, PredictionWriter(tmp_path, contact_map_cells=0), Wrong())
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file/out: cannot be made"):
        predict(root, PredictionWriter(tmp_path / "file" / "out"))
    with pytest.raises(DataError, match="the trainer has None; call trainer.predict"):
        trainer_of(PredictionWriter(tmp_path)).predict(Halves(), torch.utils.data.DataLoader([1]))
    writer = PredictionWriter(tmp_path, contact_map_cells=0, celltype_key="celltype")
    predict(root, writer, Mute())
    assert any("no pseudobulk is written: it requires a model with impute" in x for x in writer.remarks)
    assert not (tmp_path / "pseudobulk").exists()


def test_maps_that_could_not_be_named_are_refused_before_cells_are_predicted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    var = pd.DataFrame({"stratum": [0, 0, 1], "anchor": [0, 1, 0]}, index=["chr1:0-10", "chr1:10-20", "chr1:0-10-1"])
    hic = anndata.AnnData(rng.poisson(2.0, (3, 3)).astype(np.float32), var=var)

    def said(cells: list[str], bins: list[str], **options: Any) -> str:
        hic.obs_names, hic.var_names = cells, bins
        (tmp_path / "hic").mkdir(exist_ok=True)
        hic.write_h5ad(tmp_path / "hic" / "hic.h5ad")
        try:
            predict(tmp_path, PredictionWriter(tmp_path / "out", **options))
        except DataError as error:
            assert not list((tmp_path / "out").glob("*"))
            return str(error)
        return ""

    good, places = ["a", "b", "c"], list(var.index)
    assert "cells ['a'], which are repeated or have a '/'" in said(["a", "a", "c"], places)
    assert "cells ['p1/a', 'p1/b'], which" in said(["p1/a", "p1/b", "c"], places)
    assert "bins ['x', 'y'], which are not named as 'chr1:0-500000'" in said(good, ["x", "y", "z"])
    assert not said(["p1/a", "a", "a"], ["x", "y", "z"], contact_map_cells=0)
    assert not said(["p1/a", "b", "c"], places, contact_map_cells=["c"])
