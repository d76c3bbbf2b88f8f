"""What a trained model says about the cells arrives in files that other tools open; pictures are whole."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata
import cooler
import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch

from lightning_amp import figures
from lightning_amp.data.files.directory import written_aside
from lightning_amp.data.files.strata_layout import FeatureLayout, StratumLayout
from lightning_amp.data.files.write_results import same_type_share, write_imputed
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


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "synthetic"
    synthesize(out, cells=30, rna_cells=21, bins=24, strata=4, genes=40, cell_types=2)
    return out


class Halves(pl.LightningModule):
    """Embeds a cell as (row, library, modality) and imputes half its counts."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {
            modality: {
                "index": cells["index"],
                "embedding": torch.stack(
                    [cells["index"].float(), cells["library"][:, 0], torch.full_like(cells["library"][:, 0], i)], 1
                ),
            }
            for i, (modality, cells) in enumerate(batch.items())
        }

    def impute(self, modality: str, cells: Any) -> torch.Tensor:
        assert modality == "hic", f"asked for {modality}"
        assert not self.training, "imputing in training mode"
        assert not torch.is_grad_enabled(), "imputing with gradients"
        return cells["x"] / 2


def quiet_trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=1, **QUIET, **options)


def predict(root: Path, writer: PredictionWriter, model: pl.LightningModule | None = None, **options: Any) -> None:
    trainer = quiet_trainer(callbacks=[writer], **options)
    data = SingleCellDataModule(root, batch_size=8)
    trainer.predict(model or Halves(), datamodule=data, return_predictions=False)


def test_embeddings_are_in_the_order_of_the_files(root: Path, tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path / "new" / "out")
    predict(root, writer)
    names = ["embeddings_hic.h5ad", "embeddings_rna.h5ad", "imputed.scool", "embedding.png", "contact_map.png"]
    assert [path.name for path in writer.written] == names
    assert sorted(path.name for path in (tmp_path / "new" / "out").iterdir()) == sorted(names)
    for modality in ("hic", "rna"):
        found = anndata.read_h5ad(tmp_path / "new" / "out" / f"embeddings_{modality}.h5ad")
        (path,) = (root / modality).glob("*.h5ad")
        source = anndata.read_h5ad(path)
        pd.testing.assert_frame_equal(found.obs.astype(str), source.obs.astype(str))
        assert found.obsm["X_amp"].dtype == np.float32
        np.testing.assert_array_equal(found.obsm["X_amp"][:, 0], np.arange(source.n_obs))
        np.testing.assert_array_equal(found.obsm["X_amp"][:, 1], np.asarray(source.X.sum(axis=1)).ravel())


def test_what_is_no_prediction_becomes_no_anndata(root: Path) -> None:
    data = SingleCellDataModule(root, batch_size=8)
    with pytest.raises(DataError, match=r"outputs=\[\] of trainer=None were given; call it with what trainer"):
        collect_predictions([], data)
    outputs = quiet_trainer().predict(Halves(), datamodule=data, return_predictions=False)
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


def test_each_resolution_has_its_own_file(tmp_path: Path) -> None:
    strata = (
        StratumLayout(0, "2kb", 0, 2, np.array([0, 1])),
        StratumLayout(0, "1kb", 2, 6, np.array([2, 3, 4, 5])),
        StratumLayout(1, "1kb", 6, 9, np.array([2, 3, 4])),
    )
    names = ["1:0-2000", "1:2000-4000", *(f"1:{i}000-{i + 1}000" for i in range(4))]
    layout = FeatureLayout(strata, np.array(names))
    paths = write_imputed(tmp_path, layout=layout, contacts={"a": np.arange(9, dtype=np.float32)})
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
    quiet_trainer(callbacks=[writer]).predict(Halves(), datamodule=data, return_predictions=False)
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


@pytest.mark.long
def test_what_the_files_do_not_show_is_remarked(root: Path, tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path)
    predict(root, writer)
    cells, share = writer.remarks
    assert "imputed.scool holds 4 of 30 Hi-C cells; all with contact_map_cells: 30" in cells
    assert re.match(r"same-type share 0\.\d\d: of a cell's 15 nearest .*, 50% by chance", share)
    predict(root, writer := PredictionWriter(tmp_path, contact_map_cells=30))
    assert "imputed" not in " ".join(writer.remarks)


class Mute(pl.LightningModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.zeros(3)


def test_what_cannot_be_written_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contact_map_cells=-1 is not supported"):
        PredictionWriter(tmp_path, contact_map_cells=-1)
    with pytest.raises(DataError, match=r"\['nobody'\] are no cells of .*its cells are named like"):
        predict(root, PredictionWriter(tmp_path, contact_map_cells=["nobody"]))
    with pytest.raises(ModelError, match="'Mute' has no method impute"):
        predict(root, PredictionWriter(tmp_path), Mute())
    with pytest.raises(ModelError, match=r"'Mute'.predict_step must return .*found Tensor"):
        predict(root, PredictionWriter(tmp_path, contact_map_cells=0), Mute())
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file/out: cannot be made"):
        predict(root, PredictionWriter(tmp_path / "file" / "out"))
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[PredictionWriter(tmp_path)])
    with pytest.raises(DataError, match="the trainer has None; call trainer.predict"):
        trainer.predict(Halves(), torch.utils.data.DataLoader([1]))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result"
    path.write_text("old")

    def fail() -> None:
        with written_aside(path) as aside:
            aside.write_text("half")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="full"):
        fail()
    assert [p.name for p in tmp_path.iterdir()] == ["result"]
    assert path.read_text() == "old"


def image(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return np.asarray(imread(path)[:, :, :3])


def curve(path: Path, **options: Any) -> np.ndarray:
    given = {"predicted_bytes": [2e9, 3e9], "measured_bytes": [2.1e9, 2.9e9], "budget_bytes": None}
    figures.memory_curve(path, **{**given, **options}, title="Memory", rank_label="rank 0")
    return image(path)


@pytest.mark.long
def test_pictures_are_drawn_and_not_cut_off(tmp_path: Path) -> None:
    curve(tmp_path / "memory.png", budget_bytes=4e9)
    rng = np.random.default_rng(0)
    many = [f"a type with a long name {i % 40}" for i in range(60)]
    figures.embedding(tmp_path / "cells.png", xy=rng.normal(size=(60, 2)), labels={"type": many, "b": many}, title="t")
    maps = {"observed": rng.poisson(3, (9, 9)), "imputed": np.ones((9, 9))}
    bins = {"chromosomes": ["chr1"] * 5 + ["chr2"] * 4, "starts": [10**6 * i for i in (*range(5), *range(4))]}
    figures.contact_maps(tmp_path / "maps.png", maps=maps, **bins, title="Contacts")
    figures.contact_maps(tmp_path / "none.png", maps={"observed": np.zeros((9, 9))}, **bins, title="Contacts")
    for path in tmp_path.iterdir():
        picture = image(path)
        assert picture.std() > 0.05
        border = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
        assert (border > 0.99).all(), f"{path.name}: something touches the border"
