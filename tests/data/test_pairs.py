"""Paired cells stay together: rows of one barcode, on any number of ranks; other barcodes are refused with counts."""

from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest

from lightning_amp.cli.main import main
from lightning_amp.data.files.pairs import check_pairs
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.loading.sampler import StepSampler
from lightning_amp.data.prepare.prepare import prepare
from lightning_amp.data.prepare.synthetic import synthesize, synthesize_files
from lightning_amp.errors import DataError

SIZES: dict[str, Any] = {"cells": 12, "bins": 24, "strata": 4, "genes": 30, "depth": 300, "paired": True}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    hic, labels, rna, genes = synthesize_files(tmp_path / "files", **SIZES)
    # in another order than the Hi-C cells
    anndata.read_h5ad(rna)[::-1].copy().write_h5ad(rna)
    return {"hic": hic, "labels": labels, "rna": rna, "genes": genes, "strata": 4, "out": tmp_path / "data"}


@pytest.mark.parametrize("balanced", [False, True])
def test_pairs_are_on_one_rank_whatever_their_number(balanced: bool) -> None:
    rng = np.random.default_rng(0)
    contacts = {"hic": rng.lognormal(8, 1, 40), "rna": rng.lognormal(5, 1, 50)}
    cells = {"hic": rng.permutation(40)[:31], "rna": rng.permutation(50)[:31]}
    partner = dict(zip(*(rows.tolist() for rows in cells.values()), strict=True))
    whole = StepSampler(contacts, 8, cells=cells, paired=True)
    ranks = [
        StepSampler(contacts, 4, num_replicas=2, rank=r, cells=cells, paired=True, balance=balanced) for r in (0, 1)
    ]
    seen = []
    for step, *parts in zip(whole, *ranks, strict=True):
        for part in (step, *parts):
            assert [partner[row] for row in part.rows["hic"].tolist()] == part.rows["rna"].tolist()
        for modality, rows in step.rows.items():
            assert sorted(rows) == sorted(np.concatenate([part.rows[modality] for part in parts]))
        seen += step.rows["hic"].tolist()
    assert set(seen) == set(partner)
    with pytest.raises(DataError, match=r"paired cells: the modalities have \{'hic': 40, 'rna': 50\} cells"):
        StepSampler(contacts, 8, paired=True)


def test_prepared_pairs_are_matched_by_name(files: dict[str, Any]) -> None:
    found = prepare(**files, paired=True)
    assert "12 cells are paired" in str(found)
    data = SingleCellDataModule(files["out"], batch_size=4, val_fraction=0.25)
    data.setup("fit")
    assert data.pairs is not None
    names = {modality: table.obs_names for modality, table in data.tables.items()}
    assert names["hic"].tolist() != names["rna"].tolist()
    for rows in (data.pairs, *data._split()):
        np.testing.assert_array_equal(names["hic"][rows["hic"]], names["rna"][rows["rna"]])
    training, held = ({*rows["hic"].tolist()} for rows in data._split())
    assert (len(training), len(held), training & held) == (9, 3, set())
    for batch in data.train_dataloader():
        own = [names[modality][part["index"]].tolist() for modality, part in batch.items()]
        assert own[0] == own[1]
    # evaluation takes every cell once, in the order of the files
    assert [row for batch in data.predict_dataloader() for row in batch["rna"]["index"].tolist()] == list(range(12))
    apart = SingleCellDataModule(files["out"], paired=False)
    apart.setup("fit")
    assert apart.pairs is None


def test_a_cell_that_one_modality_has_dropped_is_not_trained_on(files: dict[str, Any]) -> None:
    depths = anndata.read_h5ad(prepare(**files).modalities["hic"]).obs["depth"]
    found = prepare(**files, paired=True, min_depth=int(depths.median()), overwrite=True)
    n = int(found.table.loc["Hi-C cells", "kept"])
    assert 0 < n < 12
    assert f"{n} cells are paired; 0 Hi-C and {12 - n} RNA cells are without the other half" in str(found)
    data = SingleCellDataModule(files["out"], val_fraction=0.0)
    data.setup("fit")
    assert {modality: len(rows) for modality, rows in data.training_rows().items()} == {"hic": n, "rna": n}


def test_other_barcodes_are_refused_with_their_number(
    files: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = anndata.read_h5ad(files["rna"])
    whole[3:].copy().write_h5ad(files["rna"])
    with pytest.raises(DataError, match=r"cells.scool: 3 of its 12 barcodes are not in .*rna.h5ad, e.g. \['cell9', "):
        prepare(**files, paired=True)
    words = [word for name, value in files.items() for word in (f"--{name}", str(value))]
    assert main(["prepare", *words, "--paired"]) == 2
    assert "rename or remove these cells, or prepare without pairs" in capsys.readouterr().err
    assert not files["out"].exists()
    with pytest.raises(DataError, match=r"rna: paired cells need unique barcodes, and 1 are repeated, e.g. \['b'\]"):
        check_pairs({"hic": ["a", "b"], "rna": ["b", "a", "b"]})


def test_what_is_not_paired_is_refused(tmp_path: Path) -> None:
    synthesize(tmp_path / "data", **SIZES | {"paired": False})
    assert SingleCellDataModule(tmp_path / "data").paired is None
    with pytest.raises(DataError, match=r"12 of its 12 barcodes are not in .*, e.g. \['hic_cell0'"):
        SingleCellDataModule(tmp_path / "data", paired=True).setup("fit")
    with pytest.raises(DataError, match="paired=True needs two modalities or more"):
        SingleCellDataModule(tmp_path / "data", paired=True, modalities=["rna"]).setup("fit")
