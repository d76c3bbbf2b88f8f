"""synthesize writes what was asked for, the same each time, and cell types differ in contacts and in expression."""

from pathlib import Path
from typing import Any

import anndata
import cooler
import numpy as np
import pytest

from lightning_amp.data.files.directory import DataDirectory
from lightning_amp.data.files.graphml import read_graph
from lightning_amp.data.files.read_h5ad import read_header
from lightning_amp.data.files.strata_layout import read_layout
from lightning_amp.data.prepare.prepare import prepare
from lightning_amp.data.prepare.synthetic import synthesize, synthesize_files
from lightning_amp.errors import DataError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DataDirectory:
    return synthesize(tmp_path_factory.mktemp("synthetic") / "out")


def test_sizes_are_those_asked_for(made: DataDirectory) -> None:
    layout, graph = read_layout(made.hic), read_graph(made.graph)
    assert (layout.n_anchors, layout.n_strata) == (120, 8)
    assert layout.n_features == sum(2 * (60 - k) for k in range(8))
    assert (read_header(made.hic).n_cells, read_header(made.rna).n_cells, read_header(made.rna).n_features) == (
        200,
        200,
        150,
    )
    assert set(layout.anchor_names) | set(anndata.read_h5ad(made.rna).var_names) == set(graph.vertices)


def test_same_seed_same_values_other_seed_other_values(made: DataDirectory, tmp_path: Path) -> None:
    again, other = synthesize(tmp_path / "again"), synthesize(tmp_path / "other", seed=1)
    for name, path in made.modalities.items():
        first, second = anndata.read_h5ad(path), anndata.read_h5ad(again.modalities[name])
        assert (first.X != second.X).nnz == 0
        assert first.obs.equals(second.obs)
        assert (first.X != anndata.read_h5ad(other.modalities[name]).X).nnz > 0
    assert made.graph.read_bytes() == again.graph.read_bytes()


def by_type(path: Path) -> tuple[Any, np.ndarray]:
    """The table, and each feature's mean share of a cell's counts, [type, feature]."""
    table = anndata.read_h5ad(path)
    share = table.to_df().div(table.to_df().sum(axis=1), axis=0)
    return table, share.groupby(table.obs["celltype"].astype(str)).mean().to_numpy()


def linked_correlation(made: DataDirectory) -> float:
    """Mean over genes of the correlation over types between expression and contacts of the gene's bin, strata 0, 1."""
    (rna, expressed), (hic, contacts) = by_type(made.rna), by_type(made.hic)
    anchor, stratum = hic.var["anchor"].to_numpy(), hic.var["stratum"].to_numpy()
    near = np.zeros((len(contacts), anchor.max() + 1))
    for k, end in ((0, anchor), (1, anchor), (1, anchor + 1)):
        np.add.at(near, (slice(None), end[stratum == k]), contacts[:, stratum == k])
    bins = hic.var[stratum == 0]
    home = {(b.chrom, b.chromStart): b.anchor for b in bins.itertuples()}
    starts = np.where(rna.var["strand"] == "+", rna.var["chromStart"], rna.var["chromEnd"]) // 10**6 * 10**6
    near = near[:, [home[where] for where in zip(rna.var["chrom"], starts, strict=True)]]
    x, y = expressed - expressed.mean(axis=0), near - near.mean(axis=0)
    return float(np.mean((x * y).sum(axis=0) / np.sqrt((x**2).sum(axis=0) * (y**2).sum(axis=0))))


def test_genes_are_expressed_where_their_bins_have_more_short_contacts(made: DataDirectory, tmp_path: Path) -> None:
    """What makes an alignment of the modalities possible at all."""
    assert linked_correlation(made) >= 0.5
    for seed in (1, 2):
        demo = synthesize(tmp_path / str(seed), cells=240, strata=12, depth=6000, seed=seed)
        assert linked_correlation(demo) >= 0.5


@pytest.mark.parametrize(("sizes", "text"), [
    ({"cells": 0}, "cells=0 is too small; at least 1"),
    ({"chromosomes": 9, "bins": 8}, "chromosomes=9 do not fit in bins=8; each needs a bin"),
    ({"strata": 61}, "synthetic bins: 61 strata are not possible; allowed are 1 to 60"),
])  # fmt: skip
def test_impossible_sizes_are_refused(tmp_path: Path, sizes: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        synthesize(tmp_path / "out", **sizes)
    assert not list(tmp_path.iterdir())


def test_the_files_are_prepared_to_what_synthesize_writes(tmp_path: Path) -> None:
    sizes = {"cells": 12, "bins": 24, "strata": 4, "genes": 20}
    hic, labels, rna, genes = synthesize_files(tmp_path / "files", **sizes)
    ready = prepare(hic=hic, labels=labels, rna=rna, genes=genes, strata=4, out=tmp_path / "prepared")
    for name, path in synthesize(tmp_path / "direct", **sizes).modalities.items():
        first, second = anndata.read_h5ad(path), anndata.read_h5ad(ready.modalities[name])
        first, second = first[:, first.var_names.sort_values()], second[:, second.var_names.sort_values()]
        assert first.var_names.equals(second.var_names)
        assert first.obs_names.equals(second.obs_names)
        assert (first.X != second.X).nnz == 0
        assert first.obs["celltype"].astype(str).equals(second.obs["celltype"].astype(str))
    matrix = cooler.Cooler(f"{hic}::/cells/hic_cell0").matrix(balance=False)[:]
    assert np.triu(matrix).sum() == anndata.read_h5ad(ready.hic)["hic_cell0"].X.sum()
    assert (matrix == matrix.T).all()
