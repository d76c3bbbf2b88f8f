"""Objects in memory become the batches, the graph and the profile of the directory that `prepare` writes of them."""

import dataclasses
import gc
import pickle
from pathlib import Path
from typing import Any

import anndata
import mudata
import networkx
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_amp.data.files.graphml import Graph
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.prepare import prepare
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import DataError
from lightning_amp.lightning.callbacks.predictions import collect_predictions
from lightning_amp.models.glue import GLUE
from lightning_amp.profiling.read_profile import profile
from tests.data.tiny_data import Files, write_all
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks


@dataclasses.dataclass(frozen=True)
class Prepared:
    files: Files
    rna: anndata.AnnData
    hic: anndata.AnnData

    def given(self, **changed: Any) -> dict[str, Any]:
        return {"rna": self.rna, "hic": self.hic, "genes": self.files.genes} | changed


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    files = write_all(tmp_path)
    # as many strata as the longest chromosome has bins: no contact is further apart
    found = prepare(**files.arguments() | {"strata": 12}, labels=files.labels, loop_quantile=0.5)
    assert found.hic is not None, "Hi-C is prepared"
    return Prepared(files, anndata.read_h5ad(files.rna), anndata.read_h5ad(found.hic))


def served(data: SingleCellDataModule) -> list[Any]:
    data.setup()
    return [*data.train_dataloader(), *data.val_dataloader(), *data.predict_dataloader()]


def edges(graph: Graph) -> list[Any]:
    ends = np.sort([graph.source, graph.target], axis=0).tolist()
    return sorted(zip(*ends, graph.weight.tolist(), graph.sign.tolist(), strict=True))


def assert_same(mine: SingleCellDataModule, theirs: SingleCellDataModule, *, edges_in_order: bool = True) -> None:
    pairs = list(zip(served(mine), served(theirs), strict=True))
    assert pairs
    for one, other in pairs:
        assert list(one) == list(other)
        for modality in one:
            for name, value in one[modality].items():
                assert torch.equal(value, other[modality][name]), (modality, name)
    assert mine.graph is not None
    assert theirs.graph is not None
    if edges_in_order:
        for field in dataclasses.fields(mine.graph):
            np.testing.assert_array_equal(getattr(mine.graph, field.name), getattr(theirs.graph, field.name))
    assert edges(mine.graph) == edges(theirs.graph)
    for modality, table in mine.tables.items():
        assert table.feature_names() == theirs.tables[modality].feature_names()
        assert table.obs_names.tolist() == theirs.tables[modality].obs_names.tolist()


def test_batches_graph_and_profile_are_those_of_the_prepared_directory(prepared: Prepared) -> None:
    data = SingleCellDataModule.from_anndata(**prepared.given(), loop_quantile=0.5, batch_size=2)
    assert_same(data, SingleCellDataModule(prepared.files.out, batch_size=2))
    mine, theirs = profile(data.data_dir), profile(prepared.files.out)
    assert mine.graph is not None
    assert theirs.graph is not None
    assert (mine.graph.vertices, mine.graph.edges) == (theirs.graph.vertices, theirs.graph.edges)
    found = [[dataclasses.replace(m, file="") for m in p.modalities] for p in (mine, theirs)]
    assert found[0] == found[1]


def test_objects_are_not_changed(prepared: Prepared) -> None:
    before = prepared.rna.copy(), prepared.hic.copy()
    SingleCellDataModule.from_anndata(**prepared.given()).setup()
    for now, then in zip((prepared.rna, prepared.hic), before, strict=True):
        pd.testing.assert_frame_equal(now.obs, then.obs)
        pd.testing.assert_frame_equal(now.var, then.var)
        assert (now.X != then.X).nnz == 0


def test_counts_may_be_dense_in_a_layer_a_view_or_on_disk(prepared: Prepared, tmp_path: Path) -> None:
    rna = prepared.rna.copy()
    rna.layers["counts"] = rna.X.toarray().astype(np.int64)
    rna.X = rna.X * 0.3
    wide = anndata.concat([prepared.hic, prepared.hic], merge="same", index_unique="-")
    prepared.hic.write_h5ad(tmp_path / "backed.h5ad")
    theirs = SingleCellDataModule(prepared.files.out, batch_size=2)
    backed = anndata.read_h5ad(tmp_path / "backed.h5ad", backed="r")
    view = wide[: prepared.hic.n_obs]
    view.obs_names = prepared.hic.obs_names
    for hic in (view, backed):
        given = prepared.given(rna=rna, hic=hic)
        data = SingleCellDataModule.from_anndata(**given, loop_quantile=0.5, batch_size=2)
        assert_same(data, theirs)


@pytest.mark.filterwarnings("ignore:From 0.4 .update:FutureWarning")
def test_genes_may_be_a_table_and_objects_a_mudata(prepared: Prepared) -> None:
    table = pd.read_csv(prepared.files.genes, sep="\t", skiprows=1, header=None, index_col=3)
    table = table[[0, 1, 2, 5]].set_axis(["chrom", "chromStart", "chromEnd", "strand"], axis=1)
    table["chrom"] = "chr" + table["chrom"].astype(str)
    rna = prepared.rna.copy()
    rna.var = rna.var.join(table)
    assert rna.var["chrom"].isna().sum() == 2, "genes without a position are left out"
    mdata = mudata.MuData({"rna": rna, "contacts": prepared.hic})
    data = SingleCellDataModule.from_mudata(mdata, hic="contacts", genes=rna.var, loop_quantile=0.5, batch_size=2)
    assert_same(data, SingleCellDataModule(prepared.files.out, batch_size=2))
    with pytest.raises(DataError, match=r"\['hic'\] do not exist, found \['rna', 'contacts'\]"):
        SingleCellDataModule.from_mudata(mdata, genes=rna.var)


def test_a_networkx_graph_is_taken_as_it_is(prepared: Prepared) -> None:
    theirs = SingleCellDataModule(prepared.files.out, batch_size=2)
    theirs.setup()
    assert theirs.directory is not None
    graph = networkx.read_graphml(theirs.directory.graph)
    rna = prepared.rna[:, theirs.tables["rna"].feature_names()]
    data = SingleCellDataModule.from_anndata(rna=rna, hic=prepared.hic, graph=graph, batch_size=2)
    assert_same(data, theirs, edges_in_order=False)  # networkx writes them by vertex
    given = {"rna": prepared.rna, "hic": prepared.hic}
    with pytest.raises(DataError, match=r"2 of 12 features of rna are no vertices of it, e\.g"):
        SingleCellDataModule.from_anndata(**given, graph=graph)
    graph.nodes["G0"]["odd"] = [1]
    with pytest.raises(DataError, match=r"cannot be written as GraphML .*list"):
        SingleCellDataModule.from_anndata(rna=rna, hic=prepared.hic, graph=graph)
    with pytest.raises(DataError, match="a networkx graph is needed, found 'str'"):
        SingleCellDataModule.from_anndata(**given, graph="graph.graphml")


def test_one_modality_needs_no_graph(prepared: Prepared) -> None:
    cells = prepared.hic[:, :20].copy()
    del cells.obs["depth"], cells.obs["read_depth"]
    data = SingleCellDataModule.from_anndata(hic=cells, batch_size=2)
    assert {tuple(batch) for batch in served(data)} == {("hic",)}
    (modality,) = profile(data.data_dir).modalities
    assert modality.contact_spread is not None, "depth is added, for the plan"
    served(SingleCellDataModule.from_anndata(rna=prepared.rna, batch_size=2))


def test_the_directory_goes_with_the_module_and_not_with_a_copy(prepared: Prepared) -> None:
    data = SingleCellDataModule.from_anndata(**prepared.given())
    home = data.data_dir.parent
    copy = pickle.loads(pickle.dumps(data))
    assert copy.data_dir == data.data_dir
    del copy
    gc.collect()
    assert data.data_dir.is_dir()
    del data
    gc.collect()
    assert not home.exists()


def test_nothing_is_left_of_a_refusal(prepared: Prepared, tmp_path: Path, monkeypatch: Any) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with pytest.raises(DataError):
        SingleCellDataModule.from_anndata(rna=prepared.rna, hic=prepared.hic)
    with pytest.raises(DataError, match="batch_size=0"):
        SingleCellDataModule.from_anndata(rna=prepared.rna, batch_size=0)
    gc.collect()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("kind", [object, "string", "category"])
def test_text_may_be_missing(prepared: Prepared, kind: Any) -> None:
    rna = prepared.rna.copy()
    words = pd.Series(["a", *[None] * (rna.n_obs - 1)], index=rna.obs_names, dtype=kind)
    rna.obs = rna.obs.assign(annotation=words, batch=words, none=pd.Series(None, rna.obs_names, object))
    rna.var["name"] = pd.Series(["b", *[None] * (rna.n_vars - 1)], index=rna.var_names, dtype=kind)
    data = SingleCellDataModule.from_anndata(**prepared.given(rna=rna))
    data.setup()
    obs = data.tables["rna"].read_obs()
    assert obs["annotation"].dropna().tolist() == ["a"]
    assert obs["none"].isna().all()
    assert len(obs) == rna.n_obs
    assert data.tables["rna"].n_batches == 2
    assert rna.obs["annotation"].dtype == words.dtype, "the object is not changed"


def without_counts(table: anndata.AnnData) -> anndata.AnnData:
    return anndata.AnnData(obs=table.obs, var=table.var)


def with_var(table: anndata.AnnData, change: Any) -> anndata.AnnData:
    changed = table.copy()
    changed.var = change(changed.var)
    return changed


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (lambda p: {}, r"given are \[\]; rna, hic or both are needed"),
    "no graph": (lambda p: {"rna": p.rna, "hic": p.hic}, r"given are \['rna', 'hic'\]; rna and hic are"),
    "both": (lambda p: p.given(graph=networkx.Graph()), "give graph, or genes to build one with, not both"),
    "genes alone": (lambda p: p.given(hic=None), "genes build a graph between rna and hic, which needs both"),
    "no object": (lambda p: p.given(rna=p.rna.to_df()), "rna: an AnnData is needed, found 'DataFrame'"),
    "no counts": (lambda p: p.given(hic=without_counts(p.hic)), r"hic: neither layers\['counts'\] nor X"),
    "no cells": (lambda p: p.given(rna=p.rna[:0]), "rna: it has no cells; give an AnnData with one or more"),
    "no place of bins": (lambda p: p.given(hic=with_var(p.hic, lambda var: var.drop(columns=["chromStart"]))),
        r"hic\.var: \['chrom', 'chromStart', 'chromEnd'\] say .* missing are \['chromStart'\]"),
    "other bins": (lambda p: p.given(hic=with_var(p.hic, lambda var: var.assign(chromStart=var["chromStart"] + 5))),
        "the bin named 'chr1:0-1000000' is at 'chr1:5-1000000' by chrom"),
    "no strata": (lambda p: p.given(hic=with_var(p.hic, lambda v: v[["chrom"]].set_axis(map(str, range(len(v)))))),
        r"^hic\.var: feature name '0' does not parse"),
    "strand": (lambda p: p.given(genes=pd.DataFrame({"chrom": "chr1", "start": [5], "end": 9, "strand": "-1"},
        index=["G0"])), r"genes: row 'G0' is malformed \(strand '-1'"),
    "no position": (lambda p: p.given(genes=pd.DataFrame({"chrom": [None], "start": 5, "end": 9}, index=["G0"])),
        "genes: none of its 1 rows has a position"),
    "order": (lambda p: p.given(hic=p.hic[:, ::-1]), r"hic\.var: expected stratum 0, found stratum"),
    "lists": (lambda p: p.given(rna=anndata.AnnData(p.rna.X, p.rna.obs.assign(all=[[1, 2]] * p.rna.n_obs), p.rna.var)),
        r"rna: obs or var cannot be written as an h5ad \(.*'all'"),
    "no columns": (lambda p: p.given(genes=p.rna.var),
        r"genes: a table with chrom, .* missing are \['chrom', 'start', 'end'\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_used_is_refused(case: str, prepared: Prepared) -> None:
    given, message = WRONG[case]
    with pytest.raises(DataError, match=message):
        SingleCellDataModule.from_anndata(**given(prepared))


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("objects") / "data"
    found = synthesize(out, cells=24, rna_cells=16, bins=24, strata=4, genes=20)
    assert found.hic is not None
    assert found.rna is not None
    rna = anndata.read_h5ad(found.rna)
    return {"rna": rna, "hic": anndata.read_h5ad(found.hic), "genes": rna.var}


def trainer(devices: int = 1, **options: Any) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    more = {"strategy": "amp", "limit_val_batches": 0, "max_steps": 2} | options
    return Trainer(**quiet, accelerator="cpu", devices=devices, precision="64-true", **more)


def fitted_and_predicted(given: dict[str, Any], rank: int = 0, ranks: int = 1, **options: Any) -> Any:
    """Embeddings of all cells after two steps with the same global batches, whatever the number of ranks."""
    torch.use_deterministic_algorithms(True)
    seed_everything(3)
    model = GLUE(latent_dim=4, hidden_dim=8, window=8, edges_per_step=16)
    data = SingleCellDataModule.from_anndata(**given, batch_size=8 // ranks)
    plugins = [RunningRanks(rank, ranks)] if ranks > 1 else []
    trainer(ranks, plugins=plugins, **options).fit(model, data)
    # spawned ranks keep their predictions
    last = trainer(ranks, plugins=plugins)
    found = collect_predictions(last.predict(model, datamodule=data), data)
    return {modality: table.obsm["X_amp"] for modality, table in found.items()}


def on_rank(rank: int, ranks: int, given: dict[str, Any]) -> Any:
    return fitted_and_predicted(given, rank, ranks)


@pytest.mark.ranks
def test_ranks_train_and_predict_as_one_process_does(synthetic: dict[str, Any], tmp_path: Path) -> None:
    """Each rank writes its own directory; every rank has the predictions of all."""
    one = fitted_and_predicted(synthetic)
    assert [values.shape for values in one.values()] == [(24, 4), (16, 4)]
    for embeddings in run_ranks(on_rank, 2, tmp_path, synthetic, timeout=120):
        for modality, values in embeddings.items():
            np.testing.assert_allclose(values, one[modality], rtol=1e-6, atol=1e-8)
