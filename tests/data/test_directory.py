"""Data directories, ours and HiGLUE's, layouts and headers are read from any of the encodings in use, without the
matrix, and written whole or not at all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata
import cooler
import h5py
import networkx
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata.io import write_elem

from lightning_amp.data.files.directory import DataDirectory, find, write_aside
from lightning_amp.data.files.graphml import count_graph, read_graph
from lightning_amp.data.files.read_h5ad import read_header
from lightning_amp.data.files.strata_layout import FeatureLayout, feature_name, read_layout
from lightning_amp.data.prepare.prepare import prepare
from lightning_amp.data.prepare.synthetic import synthesize, synthesize_files
from lightning_amp.errors import DataError

SETTING = "500kb_raw_0.98_2d_2"
BINS = ["chr1:0-500000", "chr1:500000-1000000", "chr2:0-500000"]


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def write_higlue(root: Path) -> Path:
    """Write what HiGLUE leaves for one resolution: scaled X with counts beside it, intermediate files, many graphs."""
    touch(root, "hic/hic_base_500kb_2d.h5ad", "rna/rna_base_2d.h5ad", f"graphs/overlap_{SETTING}.graphml.gz")
    names = [*BINS, *(f"{name}-1" for name in BINS[:2])]
    hic = sp.csr_matrix(np.arange(10, dtype=np.float32).reshape(2, 5))
    for modality, counts, features in (("hic", hic, names), ("rna", hic[:, :2], ["A", "B"])):
        table = anndata.AnnData(
            counts.toarray() - 1.5,
            obs=pd.DataFrame({"celltype": ["x", "y"], "depth": [10.0, 35.0]}, index=["c0", "c1"]),
            var=pd.DataFrame({"chrom": "chr1"}, index=features),
            layers={"counts": counts},
        )
        table.write_h5ad(root / modality / f"{modality}_{SETTING}.h5ad")
    graph = networkx.MultiDiGraph()
    graph.add_nodes_from(["A", "B"], chrom="chr1", chrom_pos=5, feature_type="RNA")
    graph.add_nodes_from(BINS, chrom="chr1", chrom_pos=0, feature_type="Hi-C", strata="0")
    for vertex in list(graph):
        graph.add_edge(vertex, vertex, weight=1.0, sign=1, type="self-loop")
    for ends, weight in ((("A", BINS[0]), 1.0), (("B", BINS[1]), 1.0), ((BINS[0], BINS[1]), 0.25)):
        graph.add_edge(*ends, weight=weight, sign=1, type="hic", dist=0.0, edge_id=f"{ends}")
        graph.add_edge(*ends[::-1], weight=weight, sign=1, type="hic", dist=0.0, edge_id=f"{ends} back")
    path = root / "graphs" / f"dcq_prior_{SETTING}.graphml.gz"
    networkx.write_graphml(graph, path, named_key_ids=True, edge_id_from_attribute="edge_id")
    return root


@pytest.mark.filterwarnings("ignore:Variable names are not unique:UserWarning")
def test_a_higlue_directory_reads_as_it_is(tmp_path: Path) -> None:
    found = find(write_higlue(tmp_path))
    assert found.hic == tmp_path / "hic" / f"hic_{SETTING}.h5ad"
    assert found.rna == tmp_path / "rna" / f"rna_{SETTING}.h5ad"
    assert found.graph == tmp_path / "graphs" / f"dcq_prior_{SETTING}.graphml.gz"
    assert (found.atac, found.methyl) == (None, None)
    layout = read_layout(found.hic)
    assert [s.anchors.tolist() for s in layout.strata] == [[0, 1, 2], [0, 1]]
    header = read_header(found.hic)
    assert (header.n_cells, header.n_features, header.n_nonzero, header.has_counts_layer) == (2, 5, 9, True)
    graph = read_graph(found.graph)
    assert list(graph.vertices) == ["A", "B", *BINS]


def test_an_edge_in_both_directions_counts_once(tmp_path: Path) -> None:
    path = find(write_higlue(tmp_path)).graph
    assert path is not None
    graph = read_graph(path)
    assert count_graph(path) == (5, 11)
    pairs = set(zip(graph.source.tolist(), graph.target.tolist(), graph.weight.tolist(), strict=True))
    assert pairs == {*((i, i, 1.0) for i in range(5)), (0, 2, 1.0), (1, 3, 1.0), (2, 3, 0.25)}
    assert len(graph.source) == 8


def test_a_one_way_edge_of_a_directed_graph_stays(tmp_path: Path) -> None:
    graph = networkx.DiGraph()
    graph.add_edge("a", 'b<&>"', weight=1.0, sign=1)
    graph.add_edge("c", "a", weight=0.5, sign=-1)
    graph.add_edge('b<&>"', "a", weight=0.25, sign=1)
    networkx.write_graphml(graph, tmp_path / "g.graphml")
    found = read_graph(tmp_path / "g.graphml")
    assert found.vertices.tolist() == ["a", 'b<&>"', "c"]
    assert sorted(found.weight.tolist()) == [0.25, 0.5, 1.0]
    assert found.sign.tolist().count(-1.0) == 1


def test_whole_and_other_numbers_may_be_weights_of_one_graph(tmp_path: Path) -> None:
    graph = networkx.Graph()
    graph.add_edge("a", "b", weight=1, sign=1)
    graph.add_edge("b", "c", weight=0.5, sign=-1.0)
    # networkx declares an attribute once for every type that it has
    networkx.write_graphml(graph, tmp_path / "g.graphml")
    found = read_graph(tmp_path / "g.graphml")
    assert sorted(zip(found.weight.tolist(), found.sign.tolist(), strict=True)) == [(0.5, -1.0), (1.0, 1.0)]


def test_a_setting_chooses_among_several(tmp_path: Path) -> None:
    names = [f"{m}/{m}_{s}.h5ad" for m in ("hic", "rna") for s in ("A_1", "B_1")]
    touch(tmp_path, *names, "graphs/A_1.graphml.gz", "graphs/x_prior_B_1.graphml.gz", "graphs/AB_1.graphml.gz")
    found = find(tmp_path, setting="B_1")
    assert found.hic.name == "hic_B_1.h5ad"
    assert found.rna.name == "rna_B_1.h5ad"
    assert found.graph.name == "x_prior_B_1.graphml.gz"
    with pytest.raises(DataError, match=r"hic: found 2 settings \['A_1', 'B_1'\]; choose one with setting="):
        find(tmp_path)
    with pytest.raises(DataError, match=r"hic: no file of setting 'C', found \['A_1', 'B_1'\]"):
        find(tmp_path, setting="C")


def test_a_graph_of_another_setting_is_not_taken(tmp_path: Path) -> None:
    touch(tmp_path, "hic/hic_A.h5ad", "hic/hic_B.h5ad", "graphs/A.graphml.gz")
    with pytest.raises(DataError, match=r"found graphs \['A.graphml.gz'\], of which 0 fit setting 'B'"):
        find(tmp_path, setting="B")
    touch(tmp_path, "graphs/other_A.graphml.gz")
    with pytest.raises(DataError, match=r"of which 2 fit setting 'A'"):
        find(tmp_path, setting="A")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interrupted_directory_leaves_the_old_one(tmp_path: Path, error: type[BaseException]) -> None:
    touch(tmp_path, "out/hic/old")

    def work() -> None:
        with write_aside(tmp_path / "out", overwrite=True) as aside:
            (aside / "hic").mkdir()
            raise error

    with pytest.raises(error):
        work()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "hic" / "old").exists()


def write_var(path: Path, names: list[str], columns: dict[str, Any] | None = None) -> Path:
    """Write an h5ad whose matrix is absent: whoever reads a layout must not miss it."""
    with h5py.File(path, "w") as file:
        write_elem(file, "obs", pd.DataFrame(index=["cell"]))
        write_elem(file, "var", pd.DataFrame(columns or {}, index=names))
    return path


def single_resolution(n: int = 6, strata: int = 3) -> tuple[list[str], list[int], list[int]]:
    """Return names, strata and anchors as HiGLUE lists them: pairs also run across the chromosome's end."""
    bins = [("chr1", i) for i in range(n - 2)] + [("chr2", 0), ("chr2", 1)]
    pairs = [(k, i) for k in range(strata) for i in range(n - k)]
    names = [feature_name(bins[i][0], bins[i][1] * 5, bins[i][1] * 5 + 5, k) for k, i in pairs]
    return names, [k for k, _ in pairs], [i for _, i in pairs]


def outline(layout: FeatureLayout) -> list[tuple[int, str | None, tuple[int, int]]]:
    return [(s.k, s.resolution, s.columns) for s in layout.strata]


def same(first: FeatureLayout, second: FeatureLayout) -> None:
    assert list(first.anchor_names) == list(second.anchor_names)
    assert outline(first) == outline(second)
    for one, other in zip(first.strata, second.strata, strict=True):
        np.testing.assert_array_equal(one.anchors, other.anchors)


def test_names_alone_give_strata_and_anchors(tmp_path: Path) -> None:
    names, _, _ = single_resolution()
    layout = read_layout(write_var(tmp_path / "hic.h5ad", names))
    assert outline(layout) == [(0, None, (0, 6)), (1, None, (6, 11)), (2, None, (11, 15))]
    assert [s.anchors.tolist() for s in layout.strata] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4], [0, 1, 2, 3]]
    assert list(layout.anchor_names) == names[:6]
    assert (layout.n_anchors, layout.n_strata, layout.n_features) == (6, 3, 15)


def test_columns_of_every_encoding_give_the_layout_of_the_names(tmp_path: Path) -> None:
    names, stratum, anchor = single_resolution()
    path = write_var(tmp_path / "hic.h5ad", names, {"stratum": stratum})
    with h5py.File(path, "a") as file:
        var = file["var"]
        var.create_dataset(
            "__categories/anchor", data=np.array(names[:6][::-1], dtype=object), dtype=h5py.string_dtype()
        )
        var["anchor"] = np.array([5 - i for i in anchor], dtype=np.int8)
        var["anchor"].attrs["categories"] = var["__categories/anchor"].ref
    same(read_layout(path), read_layout(write_var(tmp_path / "names.h5ad", names)))
    # columns and names give the same layout
    by_name = read_layout(write_var(tmp_path / "names.h5ad", names))
    same(by_name, read_layout(write_var(tmp_path / "columns.h5ad", names, {"stratum": stratum, "anchor": anchor})))
    text = [names[i] for i in anchor]
    columns = {"stratum": stratum, "anchor": pd.Categorical(text)}
    same(by_name, read_layout(write_var(tmp_path / "text.h5ad", names, columns)))
    # nullable text columns and indices are read
    names, stratum, anchor = single_resolution()
    path = write_var(tmp_path / "hic.h5ad", names, {"stratum": stratum})
    with h5py.File(path, "a") as file:
        del file["var/_index"]
        for name, values in (("anchor", [names[i] for i in anchor]), ("_index", names)):
            group = file["var"].create_group(name)
            group.attrs.update({"encoding-type": "nullable-string-array", "encoding-version": "0.1.0"})
            write_elem(group, "values", np.array(values, dtype=object))
            write_elem(group, "mask", np.zeros(len(values), dtype=bool))
    same(read_layout(path), read_layout(write_var(tmp_path / "names.h5ad", names)))


@pytest.mark.parametrize("encode", [list, pd.Categorical], ids=["strings", "categorical"])
def test_several_resolutions_are_numbered_one_after_another(tmp_path: Path, encode: Callable[[Any], Any]) -> None:
    """As HiGLUE writes it: `anchor` is a bin's name, every stratum lists all bins, a name may come at both widths."""
    rows = [("1mb", k, a) for k in range(2) for a in ("chr1:0-9", "chrM:0-3")]
    rows += [("500kb", k, a) for k in range(3) for a in ("chr1:0-5", "chr1:5-9", "chrM:0-3")]
    names = [a if k == 0 else f"{a}-{k}" for _, k, a in rows]
    columns = {
        "res": encode([r for r, _, _ in rows]),
        "stratum": [k for _, k, _ in rows],
        "anchor": encode([a for *_, a in rows]),
    }
    columns["anchor_bin"] = list(range(len(rows)))
    layout = read_layout(write_var(tmp_path / "hic.h5ad", names, columns))
    assert [(s.resolution, s.k, s.columns) for s in layout.strata] == [
        ("1mb", 0, (0, 2)),
        ("1mb", 1, (2, 4)),
        ("500kb", 0, (4, 7)),
        ("500kb", 1, (7, 10)),
        ("500kb", 2, (10, 13)),
    ]
    assert [s.anchors.tolist() for s in layout.strata] == [[0, 1]] * 2 + [[2, 3, 4]] * 3
    assert list(layout.anchor_names) == ["chr1:0-9", "chrM:0-3", "chr1:0-5", "chr1:5-9", "chrM:0-3"]


def write_table(path: Path, counts: Any, *, layer: Any = None, obs: dict[str, Any] | None = None) -> Path:
    frame = pd.DataFrame(obs or {}, index=[f"c{i}" for i in range(counts.shape[0])])
    table = anndata.AnnData(counts, obs=frame, var=pd.DataFrame(index=[f"g{i}" for i in range(counts.shape[1])]))
    if layer is not None:
        table.layers["counts"] = layer
    table.write_h5ad(path)
    return path


def test_header_counts_without_reading_the_matrix(tmp_path: Path) -> None:
    dense = np.array([[0, 1, 2], [3, 0, 0]], dtype=np.float32)
    header = read_header(write_table(tmp_path / "x.h5ad", sp.csr_matrix(dense), obs={"n_counts": [3, 3]}))
    assert (header.n_cells, header.n_features, header.n_nonzero, header.has_counts_layer) == (2, 3, 3, False)
    assert header.depth.tolist() == [3.0, 3.0]
    header = read_header(write_table(tmp_path / "layer.h5ad", dense - 0.5, layer=sp.csr_matrix(dense)))
    assert (header.n_nonzero, header.has_counts_layer, header.depth) == (3, True, None)
    assert read_header(write_table(tmp_path / "dense.h5ad", dense)).n_nonzero is None


# synthesize writes what was asked for, the same each time, and cell types differ in contacts and in expression.


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
