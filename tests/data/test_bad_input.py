"""Every bad input ends in one DataError that names the file and what was found, and leaves nothing behind."""

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from lightning_amp.data.files.directory import find
from lightning_amp.data.files.graphml import read_graph
from lightning_amp.data.files.read_h5ad import read_header
from lightning_amp.data.files.strata_layout import read_layout
from lightning_amp.data.prepare.gene_positions import read_genes
from lightning_amp.data.prepare.prepare import prepare
from lightning_amp.data.prepare.read_scool import ScoolFile, parse_resolution
from lightning_amp.errors import DataError
from tests.data.tiny_data import (
    CELLS,
    GENES,
    Files,
    edit,
    make_bins,
    make_pixels,
    rna_counts,
    write_all,
    write_rna,
    write_scool,
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    write_all(root)
    return root


@pytest.fixture
def files(originals: Path, tmp_path: Path) -> Files:
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    names = ("cells.scool", "rna.h5ad", "genes.bed", "labels.tsv", "out")
    return Files(*(tmp_path / name for name in names))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def one_cell(files: Files, *, count: Any = None, dtype: type = float, **columns: Any) -> None:
    """Rewrite the .scool with a cell whose first pixel has another count."""
    pixels = make_pixels(0).astype({"count": dtype})
    if count is not None:
        pixels.loc[0, "count"] = count
    write_scool(files.hic, {"odd": pixels.assign(**columns)}, dtype=dtype)


def old_layout(files: Files) -> None:
    """Move the cells to the root, where cooler before 0.8.9 had them."""

    def change(file: Any) -> None:
        for cell in CELLS:
            file.move(f"cells/{cell}", cell)
        for name in ("cells", "bins", "chroms"):
            del file[name]

    edit(files.hic, change)


def variable_bins(files: Files) -> None:
    bins = make_bins()
    bins.loc[3, "end"] -= 1000
    bins.loc[4, "start"] -= 1000
    write_scool(files.hic, {"cell": make_pixels(0)}, bins)


def two_assemblies(files: Files) -> None:
    def change(file: Any) -> None:
        del file["cells/cell_2/bins/start"]
        file["cells/cell_2/bins/start"] = file["bins/start"][:] + 1

    edit(files.hic, change)


def damage_chunk(files: Files) -> None:
    with h5py.File(files.hic) as file:
        chunk = file["cells/cell_2/pixels/count"].id.get_chunk_info(0)
    content = bytearray(files.hic.read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = b"\xff" * chunk.size
    files.hic.write_bytes(bytes(content))


def wrong_pixel(file: Any) -> None:
    file["cells/cell_2/pixels/bin2_id"][0] = -1


def repeat(path: Path, axis: str) -> None:
    table = anndata.read_h5ad(path)
    names = list(getattr(table, axis))
    setattr(table, axis, [names[0], names[0], *names[2:]])
    table.write_h5ad(path)


def place_genes(files: Files, shift: int, chrom: str | None = None) -> None:
    """Write positions into the file of RNA, those of the annotation but for a shift or the chromosome."""
    table, genes = anndata.read_h5ad(files.rna), read_genes(files.genes).reindex([*GENES, "?", "?"])
    table.var["chrom"] = [chrom or f"chr{name}" for name in genes["chrom"]]
    table.var["chromStart"], table.var["chromEnd"] = genes["start"].to_numpy() + shift, genes["end"].to_numpy() + shift
    table.write_h5ad(files.rna)


def lines(path: Path, text: str) -> None:
    path.write_text(text)


def occupied(files: Files, name: str) -> None:
    files.out.mkdir()
    (files.out / name).touch()


def only(key: str, value: Any) -> Callable[[Files], dict[str, Any]]:
    return lambda files: {key: value}


# What is done to good files, and the text of the error; a returned dictionary changes the arguments.
PREPARE: dict[str, tuple[Callable[[Files], Any], str]] = {
    "scool absent": (lambda f: f.hic.unlink(), r"cells\.scool: expected a \.scool file, found nothing"),
    "scool not HDF5": (lambda f: lines(f.hic, "chr1\t0"), r"cells\.scool: .*found a file that starts with"),
    "scool compressed": (lambda f: f.hic.write_bytes(gzip.compress(f.hic.read_bytes())),
        r"found a file that is compressed with gzip; decompress it first: gunzip .*cells\.scool"),
    "scool truncated": (lambda f: truncate(f.hic), r"cells\.scool: the \.scool file is truncated or damaged"),
    "scool chunk damaged": (damage_chunk, r"cells\.scool: the \.scool file is damaged"),
    "scool before 0.8.9": (old_layout, r"cells\.scool: cells are at the root.*'cell_1'.*before 0\.8\.9"),
    "mcool": (lambda f: edit(f.hic, lambda h: h.create_group("resolutions")), r".scool: .*found a \.mcool"),
    "cool": (lambda f: edit(f.hic, lambda h: h.create_group("pixels")), r"cells\.scool: .*found a \.cool"),
    "other HDF5": (lambda f: {"hic": f.rna}, r"rna\.h5ad: expected a \.scool, found an HDF5 file with \['X'"),
    "no cells": (lambda f: edit(f.hic, lambda h: h["cells"].clear()), r"cells\.scool: the \.scool has no"),
    "variable bins": (variable_bins, r"cells\.scool: the bins are of variable width \(found \[999000"),
    "bins left out": (lambda f: write_scool(f.hic, {"cell": make_pixels(0, 19)}, make_bins().drop(index=5)),
        r"cells\.scool: the bins are of variable width .* or leave some out"),
    "two assemblies": (two_assemblies, r"cell 'cell_2' has 20 bins on chromosomes \['chr1', 'chr2'\], which"),
    "fractional contacts": (lambda f: one_cell(f, count=0.5), r"cells\.scool: cell 'odd' has a fractional"),
    "pixel outside": (lambda f: edit(f.hic, wrong_pixel), r"'cell_2' has a pixel of bins \(\d+, -1\); bin1"),
    "square storage": (lambda f: edit(f.hic, lambda h: h["cells/cell_1"].attrs.update({"storage-mode": "square"})),
        r"'cell_1' has storage-mode 'square'"),
    "names equal without resolution": (lambda f: write_scool(f.hic, {"a.1mb": make_pixels(0), "a": make_pixels(1)}),
        r"the cells 'a' and 'a\.1mb' have the same name 'a'"),
    "min_depth too high": (only("min_depth", 10**6), r"no cell is left of 6: min_depth=1000000 contacts"),
    "strata 0": (only("strata", 0), r"strata=0 is too small; at least 1"),
    "strata above bins": (only("strata", 13), r"cells\.scool: 13 strata are not possible; allowed are 1 to"),
    "loop_quantile 1": (only("loop_quantile", 1.0), r"loop_quantile=1\.0 is out of range"),
    "wrong resolution": (only("resolution", "500kb"), r"cells\.scool: resolution='500kb' was given, found"),
    "unknown chromosome": (only("chromosomes", ["1", "chr9"]), r"cells\.scool: .*\['chr9'\] are not in the"),
    "rna no h5ad": (lambda f: {"rna": f.hic}, r"an h5ad has groups 'obs' and 'var', found \['bins', 'cells'"),
    "rna scaled": (lambda f: write_rna(f.rna, rna_counts().toarray() - 1.5), r"rna\.h5ad: X has negative"),
    "rna counts in another place": (lambda f: (write_rna(f.rna, rna_counts() * 0.3, layer=rna_counts()) or edit(f.rna,
        lambda h: h["layers"].move("counts", "raw_counts"))),
        r"rna\.h5ad: X has fractional values .*; other matrices of the file are layers\['raw_counts'\]"),
    "rna without X": (lambda f: edit(f.rna, lambda h: h.pop("X")), r"rna\.h5ad: neither layers\['counts'\]"),
    "rna of another shape": (lambda f: edit(f.rna, lambda h: h["X"].attrs.update({"shape": [8, 13]})),
        r"rna\.h5ad: X has shape \(8, 13\), obs and var \(8, 12\)"),
    "rna empty": (lambda f: write_rna(f.rna, sp.csr_matrix((8, 12))), r"rna\.h5ad: of 10 genes .* none is"),
    "rna repeated cells": (lambda f: repeat(f.rna, "obs_names"), r"rna\.h5ad: cell names are repeated"),
    "no gene matches": (lambda f: write_rna(f.rna, rna_counts(), genes=[f"ENSG{i}" for i in range(12)]),
        r"rna\.h5ad: none of its 12 genes is in .*genes\.bed; found e\.g\. \['ENSG0'.* and \['G0'.*set var_names"),
    "genes elsewhere": (lambda f: lines(f.genes, "chrUn\t0\t9\tG0\n"), r"rna\.h5ad: of 1 genes .* in a bin"),
    "genes of another assembly": (lambda f: lines(f.genes,
        "".join(f"chr1\t{90 + i}000000\t{90 + i}000009\tG{i}\n" for i in range(3))),
        r"genes\.bed: .*3 of 3 are behind the end of their chromosome, such as 'G0' at 90,000,000 of chromosome 1"),
    "genes shifted in the file": (lambda f: place_genes(f, 300_000),
        r"rna\.h5ad: its genes are at other .* 10 genes differ by 300,000 bp \(median\), such as 'G0' at chr1:400,000"),
    "genes on other chromosomes in the file": (lambda f: place_genes(f, 0, chrom="chr7"),
        r"rna\.h5ad: .*10 of 10 genes are on another chromosome, such as 'G0' at chr7:100,000 and 1:100,000"),
    "genes absent": (lambda f: f.genes.unlink(), r"genes\.bed: expected the gene annotation, found nothing"),
    "genes of another kind": (lambda f: {"genes": f.labels}, r"labels\.tsv: .*allowed: \.gtf, \.bed"),
    "bed of text": (lambda f: lines(f.genes, "#c\nchr1\tone\t9\tG0\n"), r"genes\.bed: line 2 is malformed"),
    "bed strand": (lambda f: lines(f.genes, "chr1\t1\t9\tG0\t0\tx\n"), r"line 1 .*strand 'x' is none of"),
    "labels without cell": (lambda f: lines(f.labels, "name\tdepth\na\t1\n"), r"labels\.tsv: no column"),
    "labels repeated": (lambda f: lines(f.labels, "cell\na\na.1mb\n"), r"labels\.tsv: cells are listed more"),
    "labels of text": (lambda f: lines(f.labels, "cell\tdepth\na\tdeep\n"), r"labels\.tsv: depth 'deep' of"),
    "labels incomplete": (lambda f: lines(f.labels, "cell\n" + "\n".join(CELLS[:4])),
        r"labels\.tsv: 2 of 6 cells have no label, e\.g\. \['cell_11', 'cell_12'\].* may be empty"),
    "output a file": (lambda f: f.out.touch(), r"out: expected a directory to write, found a file"),
    "output occupied": (lambda f: occupied(f, "hic"), r"out: the output exists and holds \['hic'\].*--overwrite"),
    "output foreign": (lambda f: occupied(f, "thesis.tex") or {"overwrite": True}, "out: does not overwrite"),
    "output below nothing": (lambda f: {"out": f.rna / "a" / "b"}, r"b: cannot write there \(Not a directory"),
    "output below nothing, again": (lambda f: {"out": f.out / "a" / "b", "min_depth": 10**6}, "no cell is left"),
    "scool without bins": (lambda f: edit(f.hic, lambda h: h.pop("bins")), r"has no \['bins/chrom', 'bins/start'"),
    "cell without pixels": (lambda f: edit(f.hic, lambda h: h.pop("cells/cell_2/pixels")), r"'cell_2' has no \['pix"),
    "bed of 3 columns": (lambda f: lines(f.genes, "chr1\t1\t9\n"),
        r"genes\.bed: line 1 .*fewer than 4 .*'chr1\\t1\\t9'"),
    "bed reversed": (lambda f: lines(f.genes, "chr1\t9\t1\tG0\n"), r"line 1 .*position 9-1 is empty or negative"),
    "labels empty": (lambda f: lines(f.labels, ""), r"labels\.tsv: the labels are no tab-separated table"),
}  # fmt: skip


def listing(root: Path) -> list[Path]:
    return sorted(root.rglob("*"))


@pytest.mark.parametrize(("damage", "text"), PREPARE.values(), ids=PREPARE.keys())
@pytest.mark.filterwarnings("ignore:(Observation|Variable) names are not unique:UserWarning")
def test_prepare_refuses(files: Files, damage: Callable[[Files], Any], text: str) -> None:
    changed = damage(files)
    arguments = files.arguments() | {"labels": files.labels} | (changed if isinstance(changed, dict) else {})
    # Labels name other cells than those of a rewritten .scool; what is tested then comes after them.
    if "cell" not in {name.split("_")[0] for name in _cells(arguments["hic"])}:
        arguments["labels"] = None
    before = listing(files.out.parent)
    with pytest.raises(DataError, match=text):
        prepare(**arguments)
    assert listing(files.out.parent) == before


def _cells(path: Path) -> list[str]:
    try:
        return ScoolFile(path).cells
    except DataError:
        return ["cell_1"]


def test_the_same_files_unharmed_are_accepted(files: Files) -> None:
    place_genes(files, 500)
    place = files.out / "new" / "data"
    found = prepare(**files.arguments() | {"out": place}, labels=files.labels)
    assert found.graph == place / "graphs" / found.graph.name  # type: ignore[union-attr]
    assert found.table.loc["genes"].tolist() == [12, 10, "2 without a position in the annotation"]
    for printed in (str(found), repr(found)):
        assert "genes        12    10    2 without a position in the annotation" in printed
        assert printed.endswith(f"wrote {found.hic}\nwrote {found.rna}\nwrote {found.graph}")


def given(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def var_file(path: Path, names: list[str], **columns: Any) -> Path:
    anndata.AnnData(
        sp.csr_matrix((1, len(names)), dtype=np.float32),
        obs=pd.DataFrame(index=["c"]),
        var=pd.DataFrame(columns, index=names),
    ).write_h5ad(path)
    return path


def compound(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file["obs"] = np.zeros(2, dtype=[("index", "S2"), ("depth", "f4")])
    return path


def changed(path: Path, change: Callable[[Any], object]) -> Path:
    var_file(path, ["chr1:0-5"])
    edit(path, change)
    return path


def resize(file: Any) -> None:
    file["X"].attrs["shape"] = [7, 7]


GRAPHML = (
    '<graphml><key id="w" for="edge" attr.name="weight"/><key id="s" for="edge" attr.name="sign"/>'
    "<graph>{}</graph></graphml>"
)
NODES = '<node id="a"/><node id="b"/>'


def edges(weight: str = "1", target: str = "b") -> str:
    """Write a good edge and one of this weight and end."""
    rows = [
        f'<edge source="a" target="{end}"><data key="w">{number}</data><data key="s">1</data></edge>'
        for number, end in (("1", "b"), (weight, target))
    ]
    return GRAPHML.format(NODES + "".join(rows))


def twice(file: Any) -> None:
    del file["var/_index"]
    file["var"].create_dataset("_index", data=["chr1:0-5", "chr1:0-5"])


def scool(root: Path) -> Path:
    write_scool(root / "s.scool", {"cell": make_pixels(0)})
    return root / "s.scool"


def empty_bins(path: Path) -> Path:
    def change(file: Any) -> None:
        for name in ("chrom", "start", "end"):
            del file[f"bins/{name}"]
            file[f"bins/{name}"] = np.empty(0, dtype=np.int32)

    edit(path, change)
    return path


def two_settings(root: Path) -> Path:
    (root / "hic").mkdir()
    for name in ("hic_500kb_2d_8", "hic_1mb_2d_8", "hic_base_1mb_2d"):
        (root / "hic" / f"{name}.h5ad").touch()
    return root


READERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "layout: names": (lambda p: read_layout(var_file(p / "h.h5ad", ["TP53"])),
        r"h\.h5ad: feature name 'TP53' does not"),
    "layout: no stratum": (lambda p: read_layout(var_file(p / "h.h5ad", ["1:0-5", "1:0-5-x"])),
        r"h\.h5ad: feature name '1:0-5-x' ends in no stratum"),
    "layout: gap": (lambda p: read_layout(var_file(p / "h.h5ad", ["1:0-5", "1:5-9", "1:0-5-2"])),
        r"h\.h5ad: expected stratum 1, found stratum 2"),
    "layout: anchor-major": (lambda p: read_layout(var_file(p / "h.h5ad", ["1:0-5", "1:0-5-1", "1:5-9"])),
        r"h\.h5ad: expected stratum 2, found stratum 0; .* sort var by resolution"),
    "layout: unknown anchor": (lambda p: read_layout(var_file(p / "h.h5ad", ["x", "y", "z"], stratum=[0, 0, 1],
        anchor=[0, 1, 5])), r"h\.h5ad: the feature 'z' of stratum 1 has a bin that stratum 0 does not list"),
    "layout: res alone": (lambda p: read_layout(var_file(p / "h.h5ad", ["1:0-5"], res=["1mb"])),
        r"h\.h5ad: var has a column 'res' but no integer 'stratum'"),
    "layout: no features": (lambda p: read_layout(var_file(p / "h.h5ad", [])), r"h\.h5ad: the file has no"),
    "layout: no index": (lambda p: read_layout(changed(p / "h.h5ad", lambda h: h["var"].pop("_index"))),
        r"h\.h5ad: '/var' names no index column"),
    "header: old anndata": (lambda p: read_header(compound(p / "h.h5ad")), r"h\.h5ad: 'obs' is a compound"),
    "header: shape": (lambda p: read_header(changed(p / "h.h5ad", resize)), r"'/X' has shape \(7, 7\) but"),
    "scool: cell": (lambda p: next(ScoolFile(scool(p)).iterate(["no"])), r"s\.scool: cell 'no' is not in the file"),
    "scool: no bins": (lambda p: ScoolFile(empty_bins(scool(p))), r"s\.scool: the \.scool has no bins"),
    "find: a file": (lambda p: find(given(p / "file", "")), "file: expected a data directory, found a file"),
    "find: empty": (lambda p: find(p), r"no modality found, the directory holds \[\]"),
    "find: two settings": (lambda p: find(two_settings(p)), r"hic: found 2 settings \['1mb_2d_8'"),
    "gtf: no genes": (lambda p: read_genes(given(p / "g.gtf", 'chr1\ts\texon\t1\t2\t.\t+\t.\tgene_id "a";\n')),
        r"g\.gtf: found no gene and no transcript"),
    "gtf: short": (lambda p: read_genes(given(p / "g.gtf", "chr1\ts\tgene\t1\n")), r"g\.gtf: line 1 .*fewer"),
    "gtf: truncated": (lambda p: read_genes(given(p / "g.gtf.gz", gzip.compress(b"chr1\t" * 999)[:-9])),
        r"g\.gtf\.gz: the compressed gene annotation is truncated or damaged"),
    "graph: cut": (lambda p: read_graph(given(p / "g.graphml", edges()[:-30])), r"g\.graphml: the graph is"),
    "graph: vertex twice": (lambda p: read_graph(given(p / "g.graphml", GRAPHML.format(NODES * 2))),
        r"g\.graphml: the vertex 'a' is listed twice"),
    "graph: unknown vertex": (lambda p: read_graph(given(p / "g.graphml", edges(target="c"))),
        r"g\.graphml: edge 1 goes from 'a' to 'c' with .*needs two vertices that are listed above it"),
    "graph: no weight": (lambda p: read_graph(given(p / "g.graphml", edges(weight=""))),
        r"edge 1 goes from 'a' to 'b' with weight None and sign '1'; .* two finite numbers"),
    "resolution": (lambda p: parse_resolution("0kb"), r"resolution '0kb' is not a bin width"),
    "layout: bin twice": (lambda p: read_layout(changed(p / "h.h5ad", twice)),
        r"h\.h5ad: the bin 'chr1:0-5' is listed twice"),
    "layout: anchor twice": (lambda p: read_layout(var_file(p / "h.h5ad", ["x", "y"], stratum=[0, 0], anchor=[1, 1])),
        r"h\.h5ad: stratum 0 lists a bin twice"),
    "gtf: no name": (lambda p: read_genes(given(p / "g.gtf", "chr1\ts\tgene\t1\t2\t.\t+\t.\tnote\n")),
        r"g\.gtf: line 1 is malformed \(neither gene_name nor gene_id\)"),
    "graph: empty": (lambda p: read_graph(given(p / "g.graphml", "<graphml/>")), r"g\.graphml: the graph has no vert"),
}  # fmt: skip


@pytest.mark.parametrize(("read", "text"), READERS.values(), ids=READERS.keys())
def test_readers_refuse(tmp_path: Path, read: Callable[[Path], Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        read(tmp_path)
