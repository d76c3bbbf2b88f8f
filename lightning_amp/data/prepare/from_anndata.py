"""Write AnnData objects as a data directory, for a data module of objects in memory.

Cells stay in the order of the objects, and none is left out. Genes are chosen and the guidance graph is built by the
functions of `prepare`. One difference: only contacts within the strata of an object can become edges, where `prepare`
also sees the contacts further apart.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from lightning_amp.data.files.graphml import write_graph
from lightning_amp.data.files.new_hdf5 import UNKNOWN_ASSEMBLY, new_hdf5, write_annotations
from lightning_amp.data.files.read_h5ad import DEPTH_COLUMNS
from lightning_amp.data.files.strata_layout import FeatureLayout, read_layout
from lightning_amp.data.prepare.gene_positions import as_genes, bin_names, build_graph, read_genes
from lightning_amp.data.prepare.hic_modality import Pseudobulk
from lightning_amp.data.prepare.rna_modality import RnaCounts, check_raw, choose_genes, positions_in
from lightning_amp.errors import DataError

BIN_COLUMNS = {"chrom": "chrom", "chromStart": "start", "chromEnd": "end"}
FEATURE = {"rna": "gene", "hic": "feature"}


def write_objects(
    root: Path,
    *,
    rna: Any,
    hic: Any,
    graph: Any,
    genes: str | Path | pd.DataFrame | None,
    n_genes: int,
    loop_quantile: float,
) -> None:
    """Write hic/, rna/ and graphs/ under an existing directory; arguments and errors as for `from_anndata`."""
    given = {"rna": rna, "hic": hic, "graph": graph, "genes": genes}
    found = [name for name, value in given.items() if value is not None]
    question = f"SingleCellDataModule.from_anndata: given are {found!r}; "
    both = rna is not None and hic is not None
    if rna is None and hic is None:
        raise DataError(f"{question}rna, hic or both are needed")
    if graph is not None and genes is not None:
        raise DataError(f"{question}give graph, or genes to build one with, not both")
    if genes is not None and not both:
        raise DataError(f"{question}genes build a graph between rna and hic, which needs both; leave genes out")
    if both and graph is None and genes is None:
        raise DataError(
            f"{question}rna and hic are related through a guidance graph: give genes=, a GTF, a BED or a table of"
            " positions such as rna.var, or graph=, a networkx graph"
        )
    from anndata import AnnData

    objects = {name: data for name, data in (("rna", rna), ("hic", hic)) if data is not None}
    for name, data in objects.items():
        if not isinstance(data, AnnData):
            raise DataError(f"{name}: an AnnData is needed, found {type(data).__name__!r}")
        objects[name] = data.to_memory() if data.isbacked else data
    counts = {name: _raw_counts(name, data) for name, data in objects.items()}
    layout = _write_hic(root, objects["hic"], counts["hic"]) if hic is not None else None
    if genes is not None:
        assert layout is not None, "genes are refused without Hi-C"
        bins = _bins(objects["hic"].var, layout)
        table = as_genes(genes) if isinstance(genes, pd.DataFrame) else read_genes(genes)
        read = RnaCounts(
            counts["rna"], objects["rna"].obs, objects["rna"].var_names, "rna", positions_in(objects["rna"].var)
        )
        source = "genes" if isinstance(genes, pd.DataFrame) else genes
        chosen, positions = choose_genes(read, table, bins, n_genes=n_genes, annotation=source)
        _write_matrix(root, "rna", chosen.counts, objects["rna"].obs, objects["rna"].var.loc[chosen.genes])
        tables = build_graph(positions, bins, _bulk(counts["hic"], layout, bins), loop_quantile=loop_quantile)
        (root / "graphs").mkdir()
        write_graph(root / "graphs" / "objects.graphml.gz", *tables)
        return
    if rna is not None:
        _write_matrix(root, "rna", counts["rna"], objects["rna"].obs, objects["rna"].var)
    if graph is not None:
        names = {"rna": objects["rna"].var_names} if rna is not None else {}
        _write_networkx(root, graph, names if layout is None else names | {"hic": layout.anchor_names})


def _raw_counts(name: str, data: Any) -> Any:
    """Return the counts as CSR array of shape [cell, feature], float32."""
    place = "layers['counts']" if "counts" in data.layers else "X"
    values = data.layers.get("counts", data.X)
    if values is None:
        raise DataError(f"{name}: neither layers['counts'] nor X found; put raw counts into one of them")
    if not len(data.obs_names):
        raise DataError(f"{name}: it has no cells; give an AnnData with one or more")
    counts = sp.csr_array(values)
    check_raw(counts, data.obs_names, data.var_names, where=name, place=place, feature=FEATURE[name])
    return counts.astype(np.float32)


def _write_matrix(
    root: Path, name: str, counts: Any, obs: pd.DataFrame, var: pd.DataFrame, uns: dict[str, Any] | None = None
) -> Path:
    from anndata.io import write_elem

    (root / name).mkdir()
    path = root / name / f"{name}_objects.h5ad"
    with new_hdf5(path) as (file, _):
        write_elem(file, "X", sp.csr_matrix(counts))
        try:
            write_annotations(file, obs=obs.set_axis(obs.index.astype(str)), var=var, uns=uns or {})
        except OSError:
            raise
        except Exception as error:
            # anndata says in notes which column it is
            found = "; ".join([str(error), *getattr(error, "__notes__", ())])
            raise DataError(
                f"{name}: obs or var cannot be written as an h5ad ({found}); allowed are columns of text, numbers,"
                " truth values or categories: change the others, or leave them out"
            ) from error
    return path


def _write_hic(root: Path, hic: Any, counts: Any) -> FeatureLayout:
    """Write the Hi-C modality; the plan balances cells by their depth, which is added where it is missing."""
    known = any(name in hic.obs for name in DEPTH_COLUMNS)
    obs = hic.obs if known else hic.obs.assign(depth=counts.sum(axis=1, dtype=np.float64))
    # the assembly that `prepare` has recorded, which files of imputed maps name
    assembly = hic.uns.get("amp", {}).get("genome_assembly", UNKNOWN_ASSEMBLY)
    path = _write_matrix(root, "hic", counts, obs, hic.var, {"amp": {"genome_assembly": str(assembly)}})
    try:
        return read_layout(path)
    except DataError as error:
        raise DataError(f"hic.var: {str(error).removeprefix(f'{path}: ')}") from error


def _bins(var: pd.DataFrame, layout: FeatureLayout) -> pd.DataFrame:
    absent = [name for name in BIN_COLUMNS if name not in var]
    if absent:
        raise DataError(
            f"hic.var: {list(BIN_COLUMNS)!r} say where the bins lie, which genes need; missing are {absent!r}, found"
            f" {list(var)!r}; add them or give graph="
        )
    if len({stratum.resolution for stratum in layout.strata}) > 1:
        raise DataError(
            "hic.var: genes= requires one resolution, found several resolutions; give graph=, or one resolution"
        )
    bins = var[list(BIN_COLUMNS)].iloc[: layout.n_anchors].rename(columns=BIN_COLUMNS).reset_index(drop=True)
    bins["chrom"] = bins["chrom"].astype(str)
    for name, place in zip(layout.anchor_names.tolist(), bin_names(bins), strict=True):
        if name != place:
            raise DataError(
                f"hic.var: the bin named {name!r} is at {place!r} by chrom, chromStart and chromEnd; make them agree"
            )
    codes, start = pd.factorize(bins["chrom"])[0], bins["start"].to_numpy()
    if (np.diff(codes) < 0).any() or (start[1:] <= start[:-1])[np.diff(codes) == 0].any():
        raise DataError("hic.var: bins are not in the order of the genome; sort them by chrom and chromStart")
    return bins


def _bulk(counts: Any, layout: FeatureLayout, bins: pd.DataFrame) -> Any:
    """Sum the contacts within chromosomes over the cells, as `write_hic` does, to a COO array [anchor, anchor]."""
    bulk = Pseudobulk(len(bins))
    # strata may have features beyond a chromosome's end, whose partner is no bin
    chrom = np.pad(pd.factorize(bins["chrom"])[0], (0, layout.n_strata), constant_values=-1)
    total = np.asarray(counts.sum(axis=0, dtype=np.float64)).ravel()
    for stratum in layout.strata:
        low, count = stratum.anchors, total[slice(*stratum.columns)]
        cis = (count > 0) & (chrom[low] == chrom[low + stratum.k])
        bulk.add(low[cis], low[cis] + stratum.k, count[cis])
    return bulk.total()


def _write_networkx(root: Path, graph: Any, names: dict[str, Any]) -> None:
    """Write the graph, after a check that the features of all modalities are vertices."""
    import networkx

    if not isinstance(graph, networkx.Graph):
        raise DataError(f"graph: a networkx graph is needed, found {type(graph).__name__!r}")
    for modality, features in names.items():
        missing = [name for name in map(str, features) if name not in graph]
        if missing:
            raise DataError(
                f"graph: {len(missing)!r} of {len(features)!r} features of {modality} are no vertices of it, e.g."
                f" {missing[:3]!r}; add them, or take the others only"
            )
    (root / "graphs").mkdir()
    try:
        networkx.write_graphml(graph, root / "graphs" / "objects.graphml.gz")
    except networkx.NetworkXError as error:
        raise DataError(
            f"graph: cannot be written as GraphML ({error}); attributes must be text, numbers or truth values"
        ) from error
