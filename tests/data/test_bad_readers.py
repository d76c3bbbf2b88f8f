"""Every reader ends a bad file in one DataError that names the file and what was found."""

import gzip
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
from lightning_amp.data.prepare.read_scool import ScoolFile, parse_resolution
from lightning_amp.errors import DataError
from tests.data.tiny_data import edit, make_pixels, write_scool


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
