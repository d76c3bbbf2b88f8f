"""prepare keeps exactly the contacts, genes and edges it says, on tiny files by hand and on real ones by cooler."""

import gzip
from pathlib import Path

import anndata
import cooler
import h5py
import networkx
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from lightning_amp.cli.main import main
from lightning_amp.data.files.graphml import count_graph, read_graph
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.gene_positions import overlap_bins, promoters, read_genes
from lightning_amp.data.prepare.hic_modality import Pseudobulk
from lightning_amp.data.prepare.prepare import prepare
from lightning_amp.data.prepare.read_scool import ScoolFile, choose_chromosomes, strip_resolution
from lightning_amp.data.prepare.rna_modality import check_same_assembly, most_variable
from lightning_amp.errors import DataError
from tests.data.tiny_data import (
    BIN,
    CELLS,
    GENES,
    Files,
    make_bins,
    make_pixels,
    rna_counts,
    write_all,
    write_rna,
    write_scool,
)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return write_all(tmp_path)


def expected_matrix(var: pd.DataFrame, *, cis_only: bool = True) -> np.ndarray:
    """Look every feature of every cell up in the full map, by the coordinates that var gives."""
    bins = make_bins()
    row = {(c, s): i for i, (c, s) in enumerate(zip(bins["chrom"], bins["start"], strict=True))}
    first = [row[key] for key in zip(var["chrom"], var["chromStart"], strict=True)]
    second = [row[key] for key in zip(var["target_chrom"], var["target_chromStart"], strict=True)]
    maps = np.zeros((len(CELLS), len(bins), len(bins)))
    for i in range(len(CELLS)):
        pixels = make_pixels(i)
        maps[i, pixels["bin1_id"], pixels["bin2_id"]] = pixels["count"]
    return maps[:, first, second]


@pytest.mark.parametrize("cis_only", [True, False])
def test_every_feature_holds_the_contacts_of_its_two_bins(files: Files, cis_only: bool) -> None:
    found = prepare(**files.arguments(), labels=files.labels, cis_only=cis_only)
    hic = anndata.read_h5ad(found.hic)
    assert list(hic.obs_names) == CELLS
    np.testing.assert_array_equal(hic.X.toarray(), expected_matrix(hic.var))
    n_expected = sum(12 - k + 8 - k for k in range(4)) if cis_only else sum(20 - k for k in range(4))
    assert hic.n_vars == n_expected
    assert (hic.var["chrom"].astype(str) == hic.var["target_chrom"].astype(str)).all() == cis_only
    assert hic.var_names[0] == "chr1:0-1000000"
    assert hic.var_names[n_expected - 1].endswith("-3")


def test_the_genome_assembly_is_kept(files: Files) -> None:
    cells = {cell: make_pixels(i) for i, cell in enumerate(CELLS)}
    for assembly in (None, "hg38"):
        cooler.create_scool(str(files.hic), make_bins(), cells, dtypes={"count": np.int32}, assembly=assembly)
        found = prepare(**files.arguments(), overwrite=True)
        assert anndata.read_h5ad(found.hic).uns["amp"]["genome_assembly"] == (assembly or "unknown")
    with h5py.File(files.hic, "r+") as file:
        del file.attrs["genome-assembly"]
    assert ScoolFile(files.hic).assembly == "hg38", "of a cell"


def test_cells_carry_labels_and_depths(files: Files) -> None:
    found = prepare(**files.arguments(), labels=files.labels)
    hic = anndata.read_h5ad(found.hic)
    assert list(hic.obs["celltype"]) == ["type0", "type1", "type2"] * 2
    assert list(hic.obs["batch"]) == ["b0", "b1"] * 3
    assert list(hic.obs["read_depth"]) == [100.0 + i for i in range(6)]
    np.testing.assert_array_equal(hic.obs["depth"], hic.X.sum(axis=1).A1)
    assert set(hic.obs["dataset"]) == {"train"}
    # RNA keeps raw counts of placed genes
    rna = anndata.read_h5ad(found.rna)
    assert list(rna.var_names) == GENES
    np.testing.assert_array_equal(rna.X.toarray(), rna_counts().toarray()[:, :10])
    np.testing.assert_array_equal(rna.layers["counts"].toarray(), rna.X.toarray())
    assert list(rna.obs["celltype"]) == ["a", "b"] * 4
    assert {"chrom", "chromStart", "chromEnd", "strand", "highly_variable", "in_hic"} <= set(rna.var)


def test_counts_layer_wins_over_a_scaled_matrix_and_empty_cells_go(files: Files) -> None:
    counts = rna_counts().toarray()
    counts[3, :10] = 0
    write_rna(files.rna, counts - 0.5, layer=sp.csr_matrix(counts))
    rna = anndata.read_h5ad(prepare(**files.arguments()).rna)
    np.testing.assert_array_equal(rna.X.toarray(), np.delete(counts, 3, axis=0)[:, :10])
    assert rna.uns["amp"]["n_dropped_cells"] == 1


def test_graph_has_the_edges_that_the_definitions_give(files: Files) -> None:
    found = prepare(**files.arguments(), loop_quantile=0.5)
    graph = networkx.read_graphml(found.graph)
    assert not graph.is_directed()
    bins = [f"{c}:{s}-{e}" for c, s, e in make_bins().itertuples(index=False)]
    assert set(graph) == {*GENES, *bins}
    edges = list(graph.edges(data=True))
    overlap = {frozenset((u, v)) for u, v, data in edges if data["type"] == "overlap"}
    assert overlap == {frozenset((gene, bins[i % 6 + 12 * (i >= 6)])) for i, gene in enumerate(GENES)}
    assert {u for u, v, data in edges if data["type"] == "self-loop" and u == v} == {*GENES, *bins}
    hic = {frozenset((u, v)): data["weight"] for u, v, data in edges if data["type"] == "hic"}
    neighbours = [frozenset(bins[i : i + 2]) for i in range(19) if i != 11]
    assert all(hic.pop(pair) == 1 for pair in neighbours)
    total = sum(p.set_index(["bin1_id", "bin2_id"])["count"].reindex(every_pair(), fill_value=0) for p in all_pixels())
    for first, after in ((0, 12), (12, 20)):
        far = {(i, j): n for (i, j), n in total.items() if first <= i < j - 1 < after - 1 and n > 0}
        limit = np.quantile(list(far.values()), 0.5)
        frequent = {frozenset((bins[i], bins[j])): n for (i, j), n in far.items() if n > limit}
        weights = {pair: hic.pop(pair) for pair in frequent}
        by_count = sorted(frequent, key=frequent.__getitem__)
        assert max(weights.values()) <= 1
        assert min(weights.values()) > 0
        assert weights[by_count[0]] <= weights[by_count[-1]]
    assert hic == {}
    assert {data["sign"] for _, _, data in edges} == {1.0}


def every_pair() -> pd.MultiIndex:
    return pd.MultiIndex.from_product([range(20), range(20)])


def all_pixels() -> list[pd.DataFrame]:
    return [make_pixels(i) for i in range(len(CELLS))]


def test_pseudobulk_is_the_sum_however_often_it_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_amp.data.prepare.hic_modality.FLUSH_AT", 50)
    bulk, expected = Pseudobulk(20), np.zeros((20, 20))
    for pixels in all_pixels():
        i, j, n = (pixels[c].to_numpy() for c in ("bin1_id", "bin2_id", "count"))
        bulk.add(i, j, n)
        expected[i, j] += n
    np.testing.assert_array_equal(bulk.total().toarray(), expected)


def test_most_variable_finds_the_genes_that_vary_beyond_their_mean() -> None:
    """Rare genes have the larger variance on the log scale, so only a comparison at equal mean finds the others."""
    rng = np.random.default_rng(0)
    rate = np.tile(np.linspace(0.3, 30, 400), (300, 1))
    varied = np.arange(200, 400, 20)
    rate[:150, varied] *= 1.5
    rate[150:, varied] *= 0.5
    counts = rng.poisson(rate).astype(float)
    assert list(np.flatnonzero(most_variable(sp.csr_array(counts), n_genes=10))) == list(varied)
    assert not most_variable(sp.csr_array(counts * (np.arange(400) > 0)), n_genes=400)[0]


def test_promoters_touch_bins_to_the_base() -> None:
    """Bins of 10 kb: a promoter of 2001 bases that ends with a bin, starts with one, or lies across two."""
    bins = pd.DataFrame({"chrom": "1", "start": [0, 10_000, 20_000], "end": [10_000, 20_000, 30_000]})
    starts = {"last base of bin 0": 9_999, "first base of bin 1": 10_000, "all in bin 1": 12_000, "beyond": 32_001}
    genes = pd.DataFrame({"chrom": "1", "start": list(starts.values()), "strand": "+"}).assign(
        end=lambda t: t["start"] + 9
    )
    gene, touched = overlap_bins(genes, bins)
    assert list(zip(gene.tolist(), touched.tolist(), strict=True)) == [(0, 0), (1, 0), (1, 1), (2, 1)]


def gtf(feature: str, start: int, end: int, symbol: str, strand: str = "+") -> str:
    attributes = f'gene_id "ID_{symbol}"; gene_name "{symbol}";' if symbol != "NONAME" else 'gene_id "ID0";'
    return f"chr1\tsource\t{feature}\t{start}\t{end}\t.\t{strand}\t.\t{attributes}\n"


def test_gtf_gives_half_open_positions_and_the_longest_of_a_symbol(tmp_path: Path) -> None:
    path = tmp_path / "genes.gtf.gz"
    lines = [
        gtf("gene", 11, 20, "A"),
        gtf("exon", 11, 12, "A"),
        gtf("gene", 1, 50, "B", "-"),
        gtf("gene", 1, 5, "NONAME"),
    ]
    path.write_bytes(gzip.compress(("#!comment\n" + "".join([*lines, gtf("gene", 101, 200, "A")])).encode()))
    genes = read_genes(path)
    assert genes.attrs["n_duplicated"] == 1
    assert genes.loc["A"].tolist() == ["chr1", 100, 200, "+"]
    assert genes.loc["B"].tolist() == ["chr1", 0, 50, "-"]
    assert "ID0" in genes.index
    start, end = promoters(genes)
    assert (start[genes.index == "B"], end[genes.index == "B"]) == (49, 2050)
    assert (start[genes.index == "A"], end[genes.index == "A"]) == (0, 101)


def test_only_the_files_own_resolution_is_taken_off_a_cell_name() -> None:
    names = ["a.1mb", "a.1000kb", "a.1000000.cool", "a.cool"]
    assert {strip_resolution(name, resolution=BIN) for name in names} == {"a"}
    for name in ("a.500kb", "a.b.c", "a.0", "1mb"):
        assert strip_resolution(name, resolution=BIN) == name


def test_cells_may_have_bins_of_their_own_if_equal(tmp_path: Path, real_data: Path) -> None:
    scool = ScoolFile(real_data / "scool_test_file.scool")
    cells = scool.named_cells()
    assert len(cells) == 5
    assert scool.resolution() == 100_000
    assert "GSM2687248_41669_ACAGTG-R1-DpnII" in cells
    for cell in cells.values():
        reference = cooler.Cooler(f"{scool.path}::/cells/{cell}").pixels()[:]
        pd.testing.assert_frame_equal(next(scool.iterate([cell]))[1], reference)


@pytest.mark.long
def test_real_cells_keep_every_contact_in_the_strata(tmp_path: Path, real_data: Path) -> None:
    source = real_data / "cortex_lee2019_chr1_1mb.scool"
    found = prepare(
        hic=source,
        labels=real_data / "cortex_lee2019_ref.tsv",
        rna=real_data / "cortex_darmanis2015_rna.h5ad",
        genes=real_data / "hg19_genes.gtf.gz",
        strata=32,
        resolution="1mb",
        out=tmp_path / "out",
    )
    assert found.hic.name == "hic_1000kb_raw_0.98_2d_32.h5ad"
    hic, rna = anndata.read_h5ad(found.hic), anndata.read_h5ad(found.rna)
    assert hic.shape == (400, sum(250 - k for k in range(32)))
    assert hic.obs["celltype"].value_counts().to_dict() == {"Astro": 100, "MG": 100, "ODC": 100, "Sst": 100}
    for cell in ("Astro_1", "MG_50", "Sst_100"):
        clr = cooler.Cooler(f"{source}::/cells/{cell}")
        pixels = clr.pixels()[:]
        near = pixels[pixels["bin2_id"] - pixels["bin1_id"] < 32]
        assert hic.obs.loc[cell, "depth"] == near["count"].sum() == hic[cell].X.sum()
        assert hic.obs.loc[cell, "read_depth"] == clr.info["sum"]
        row = hic.X[hic.obs_names.get_loc(cell)].toarray().ravel()
        stratum = hic.var["stratum"].to_numpy()
        sums = near.groupby(near["bin2_id"] - near["bin1_id"])["count"].sum().reindex(range(32), fill_value=0)
        np.testing.assert_array_equal(np.bincount(stratum, weights=row), sums)
    assert set(rna.var["chrom"]) == {"chr1"}
    assert rna.n_obs == 466
    backed = anndata.read_h5ad(found.hic, backed="r")
    assert backed[:3].to_memory().X.sum() == hic.X[:3].sum()
    graph = read_graph(found.graph)
    assert (len(graph.vertices), len(graph.source)) == count_graph(found.graph)
    assert set(graph.vertices) == {*rna.var_names, *hic.var_names[:250]}


def test_scaffolds_and_the_mitochondrial_chromosome_are_left_out_unless_asked_for(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"chr1": 12, "chr2": 8, "chr1_gl000191_random": 2, "chrUn_KI270302v1": 1, "GL000009.2": 1, "chrM": 1}
    write_scool(files.hic, {cell: make_pixels(i) for i, cell in enumerate(CELLS)}, make_bins(names))
    depths = sorted(int(make_pixels(i).query("bin2_id < 12")["count"].sum()) for i in range(len(CELLS)))
    counts = rna_counts().toarray()
    counts[3, :10] = 0
    write_rna(files.rna, counts)
    words = [w for name, value in files.arguments().items() for w in (f"--{name}", str(value))]
    assert main(["prepare", *words, "--min-depth", str(depths[2]), "--n-genes", "7", "--chromosomes", "1"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.split("\n\n")[0].splitlines())) <= 80
    told = " ".join(text.split())
    assert f"Hi-C cells 6 4 2 with fewer than {depths[2]} contacts" in told
    assert "RNA cells 8 7 1 without counts in the genes kept" in told
    assert "genes 12 6 2 without a position in the annotation, 4 on chromosomes left out" in told
    assert "chromosomes 6 1 chr2, chr1_gl000191_random, chrUn_KI270302v1, GL000009.2, chrM; --chromosomes" in told
    assert "no cell has a type: --labels has it in a column celltype, cell_type or cluster" in told
    hic = anndata.read_h5ad(prepare(**files.arguments(), overwrite=True).hic)
    assert set(hic.var["chrom"]) == {"chr1", "chr2"}
    hic = anndata.read_h5ad(prepare(**files.arguments(), overwrite=True, chromosomes=["2", "M"]).hic)
    assert set(hic.var["chrom"]) == {"chr2", "chrM"}


@pytest.mark.parametrize(("present", "kept"), [
    (["chrI", "chrXVI", "chrM", "2-micron"], ["chrI", "chrXVI"]),
    (["2L", "2R", "4", "X", "mitochondrion_genome", "211000022278279"], ["2L", "2R", "4", "X"]),
    (["NC_000001.11", "NT_187361.1", "NC_012920.1"], ["NC_000001.11"]),
    (["10", "1", "MT", "KI270728.1", "hs37d5", "chr6_apd_hap1", "chrEBV"], ["10", "1"]),
    (["scaffold_1", "scaffold_2"], ["scaffold_1", "scaffold_2"]),
])  # fmt: skip
def test_what_counts_as_a_chromosome(present: list[str], kept: list[str]) -> None:
    assert choose_chromosomes(None, present, path="x") == kept


def test_every_column_of_the_cells_is_kept(files: Files) -> None:
    table = anndata.read_h5ad(files.rna)
    table.obs["donor"] = pd.Categorical(["d1", "d2", "d3", None] * 2)
    table.obs["age"] = np.arange(8.0)
    table.obs["site"] = pd.array([f"s{i % 3}" for i in range(7)] + [None], dtype="string")
    table.obs["batch"] = [1, 2] * 4
    counts = rna_counts().toarray()
    counts[3, :10] = 0
    table.X = counts
    with h5py.File(files.rna, "w") as file, anndata.settings.override(allow_write_nullable_strings=True):
        anndata.io.write_elem(file, "/", table)
    assert isinstance(anndata.read_h5ad(files.rna).obs["site"].dtype, pd.StringDtype)
    found = anndata.read_h5ad(prepare(**files.arguments()).rna).obs
    kept = np.delete(np.arange(8), 3)
    assert list(found) == ["celltype", "batch", "cell_type", "donor", "age", "site"]
    assert found["site"].tolist()[:-1] == [f"s{i % 3}" for i in kept[:-1]]
    assert found["site"].isna().tolist() == (kept == 7).tolist()
    for name in ("cell_type", "donor", "age"):
        assert found[name].astype(str).tolist() == table.obs[name].astype(str).iloc[kept].tolist()
    assert found["batch"].tolist() == [str(1 + i % 2) for i in kept]
    assert found["donor"].dtype == "category"


MB = 1_000_000
HUMAN, MOUSE = {"1": 249, "2": 243, "3": 198}, {"1": 195, "2": 182, "3": 160}
"""Chromosomes in Mb."""


def genes_of(lengths: dict[str, int], each: int, named: str) -> pd.DataFrame:
    """So many genes on each chromosome, from its beginning to its end."""
    rows = [
        (named.format(f"{chrom}{i:03d}"), f"chr{chrom}", start, start + 1000, "+")
        for chrom, length in lengths.items()
        for i, start in enumerate(np.linspace(0, length * MB - 2000, each, dtype=int).tolist())
    ]
    return pd.DataFrame(rows, columns=["gene", "chrom", "start", "end", "strand"]).set_index("gene")


def test_genes_of_another_species_than_the_contacts_are_refused_with_a_remedy() -> None:
    def check(contacts: dict[str, int], genes: pd.DataFrame) -> None:
        check_same_assembly(genes, make_bins(contacts), annotation="genes.gtf")

    check(HUMAN, genes_of(HUMAN, 200, "GENE{}"))
    check(HUMAN, genes_of(HUMAN, 10, "ENSG{}"))
    check(MOUSE, genes_of(MOUSE, 200, "Gene{}"))
    check(MOUSE, genes_of(MOUSE, 10, "GENE{}"))
    check({"1": 12, "2": 8}, genes_of({"1": 12, "2": 8}, 10, "Gene{}"))
    for contacts, genes, why in (
        (MOUSE, genes_of(HUMAN, 10, "GENE{}"), "7 of 30 are behind the end of their chromosome, such as"),
        (HUMAN, genes_of(MOUSE, 200, "GENE{}"), r"on 3 of 3 chromosomes the last one is far from the end"),
        (HUMAN, genes_of(MOUSE, 10, "Gene{}"), "their names are a mouse's, and the chromosomes are as long"),
        (MOUSE, genes_of({"1": 195}, 10, "ENSG{}"), r"their names are a human's, .* as long as a mouse's"),
    ):
        with pytest.raises(DataError, match=f"genes.gtf: its genes, .*{why}.*Give the annotation of"):
            check(contacts, genes)


def test_new_cells_get_the_features_of_an_earlier_directory(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = prepare(**files.arguments(), labels=files.labels, n_genes=5)
    genes = anndata.read_h5ad(old.rna).var
    # one gene of the model is missing, the others have another order
    table = anndata.read_h5ad(files.rna)
    table = table[:, [name for name in reversed(list(table.var_names)) if name != genes.index[1]]].copy()
    table.write_h5ad(tmp_path / "new.h5ad")
    words = ["--hic", str(files.hic), "--rna", str(tmp_path / "new.h5ad"), "--out", str(tmp_path / "new")]
    main(["prepare", *words, "--like", str(files.out)])
    printed = capsys.readouterr().out
    assert "1 of the genes of --like are not in --rna" in printed
    new = SingleCellDataModule(tmp_path / "new")
    new.setup()
    assert new.tables["rna"].feature_names() == list(genes.index)
    pd.testing.assert_frame_equal(new.tables["rna"].read_var(), genes)
    counts = pd.DataFrame(anndata.read_h5ad(new.directory.rna).to_df(), columns=genes.index)
    expected = anndata.read_h5ad(files.rna).to_df()[genes.index].loc[counts.index]
    expected[genes.index[1]] = 0
    pd.testing.assert_frame_equal(counts, expected, check_dtype=False)
    np.testing.assert_array_equal(
        anndata.read_h5ad(new.directory.hic).X.toarray(), anndata.read_h5ad(old.hic).X.toarray()
    )
    for options, text in (
        ({"like": files.out, "strata": 3}, "strata=3 and like=.* exclude each other"),
        ({}, "strata is missing"),
        ({"strata": 3}, "genes is missing"),
    ):
        with pytest.raises(DataError, match=text):
            prepare(hic=files.hic, rna=files.rna, out=tmp_path / "other", **options)
    other = tmp_path / "other.scool"
    write_scool(other, {"a": make_pixels(0, n_bins=18)}, make_bins({"chr1": 10, "chr2": 8}))
    with pytest.raises(DataError, match="found 18 bins"):
        prepare(hic=other, rna=files.rna, out=tmp_path / "other", like=files.out)
    write_rna(tmp_path / "foreign.h5ad", rna_counts(), genes=[f"X{i}" for i in range(12)])
    with pytest.raises(DataError, match="of the 5 genes of"):
        prepare(hic=files.hic, rna=tmp_path / "foreign.h5ad", out=tmp_path / "other", like=files.out)
