"""Read raw RNA counts, choose variable genes whose promoter is in a Hi-C bin, and write the RNA modality.

Genes of another assembly or species than the contacts raise a DataError. The check compares lengths: genes must lie
within the chromosomes, and the last of many genes must be near the end. If the lengths are those of human or mouse
chromosomes, the gene ids must be of that species.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from lightning_amp.data.files.new_hdf5 import new_hdf5, write_annotations
from lightning_amp.data.files.read_h5ad import fault_of_counts, first_column, open_h5ad
from lightning_amp.data.prepare.gene_positions import overlap_bins
from lightning_amp.data.prepare.read_scool import bare_name, spell_as
from lightning_amp.errors import DataError

CELL_COLUMNS = {"celltype": (("celltype", "cell_type"), "Unknown"), "batch": (("batch",), "0")}


@dataclass(frozen=True, slots=True, eq=False)
class RnaCounts:
    """Raw counts as read."""

    counts: Any  # CSR array of shape [cell, gene], float32
    obs: pd.DataFrame  # celltype and batch, then all other columns of the file, indexed by cell
    genes: pd.Index  # symbols, of shape [gene]
    source: str
    positions: pd.DataFrame | None = None  # chrom, start and end in the file, indexed by gene, where it has them


POSITIONS = {
    "chrom": ("chrom", "chromosome", "chromosome_name", "chr", "seqname"),
    "start": ("chromStart", "start", "start_position", "txStart", "gene_start"),
    "end": ("chromEnd", "end", "end_position", "txEnd", "gene_end"),
}
"""Usual names of columns of `var` with the positions of genes."""


def positions_in(var: pd.DataFrame) -> pd.DataFrame | None:
    """Return chrom, start and end of the genes for which a table of features has them; None if it has no columns."""
    columns = {name: next((c for c in usual if c in var), None) for name, usual in POSITIONS.items()}
    if None in columns.values():
        return None
    table = pd.DataFrame({name: var[column] for name, column in columns.items()}).set_axis(var.index.astype(str))
    for name in ("start", "end"):
        table[name] = pd.to_numeric(table[name], errors="coerce")
    table = table.dropna()
    return table.assign(chrom=table["chrom"].astype(str))


def read_rna(path: str | Path) -> RnaCounts:
    """Read raw counts from layers["counts"] of an h5ad, else from X."""
    from anndata.io import read_elem

    path = Path(path)
    with open_h5ad(path) as file:
        place = "layers/counts" if "layers" in file and "counts" in file["layers"] else "X"
        if place not in file:
            raise DataError(f"{path}: neither layers['counts'] nor X found; write raw counts into one of them")
        others = [f"layers[{name!r}]" for name in file.get("layers", ()) if name != "counts"]
        others += ["raw.X"] if "raw" in file and place == "X" else []
        counts = sp.csr_array(read_elem(file[place]))
        obs, var = read_elem(file["obs"]), read_elem(file["var"])
    if counts.shape != (len(obs), len(var)):
        raise DataError(f"{path}: {place} has shape {counts.shape!r}, obs and var {(len(obs), len(var))!r}; rewrite it")
    check_raw(counts, obs.index, var.index, where=str(path), place=place, others=others)
    known = pd.DataFrame({name: first_column(obs, *of).astype(str) for name, of in CELL_COLUMNS.items()})
    cells = known.join(obs.drop(columns=list(known), errors="ignore")).set_axis(obs.index.astype(str))
    return RnaCounts(counts.astype(np.float32), cells, var.index.astype(str), str(path), positions_in(var))


def check_raw(
    counts: Any,  # CSR array of shape [cell, feature]
    cells: pd.Index,  # names of the cells; `features`: names of the features
    features: pd.Index,
    *,
    where: str,  # the file or object, for messages; `place`: the place of the counts in it
    place: str,
    feature: str = "gene",  # what a feature is called in messages
    others: Sequence[str] = (),  # other places of the file or object that may hold the counts, for messages
) -> None:
    """Raise a DataError for values that are not raw counts, and for repeated names."""
    fault = fault_of_counts(counts.data)
    if fault:
        raise DataError(
            f"{where}: {place} has {fault[0]} values (e.g. {fault[1]!r}), so it holds no raw counts; put raw "
            "counts into layers['counts'] (scaled or normalised values cannot be used)"
            + (f"; other matrices of the file are {', '.join(others)}" if others else "")
        )
    for names, what in ((cells, "cell"), (features, feature)):
        if names.has_duplicates:
            again = names[names.duplicated()].unique().tolist()
            raise DataError(f"{where}: {what} names are repeated: {again[:3]!r} ({len(again)}); make them unique")


def write_rna(path: Path, rna: RnaCounts, positions: pd.DataFrame, *, settings: dict[str, Any]) -> None:
    """Write the RNA modality; drop cells without counts in the kept genes, and store their number.

    Positions are chrom, start, end, strand of the genes in their order; settings go to `uns["amp"]`.
    """
    from anndata.io import write_elem

    filled = rna.counts.sum(axis=1) > 0
    counts = sp.csr_matrix(rna.counts[filled], dtype=np.float32)
    var = positions.rename(columns={"start": "chromStart", "end": "chromEnd"}).rename_axis(None)
    var = var[["chrom", "chromStart", "chromEnd", "strand"]].assign(highly_variable=True, in_hic=True)
    with new_hdf5(path) as (file, _):
        write_elem(file, "X", counts)
        write_elem(file, "layers", {"counts": counts})
        amp = settings | {"schema": 1, "n_dropped_cells": int((~filled).sum())}
        amp["genes"] = positions.attrs.get("genes", {})
        write_annotations(file, obs=rna.obs[filled], var=var, uns={"amp": amp})


FEW, BEYOND = 3, 0.05
"""Number and share of genes beyond the end of their chromosome that raise an error; fewer are dropped."""
MANY, REACH = 100, 0.95
"""On a chromosome with this many genes, they must reach this share of its length; Y is not checked."""
LENGTHS = {"human": {"1": 249e6, "2": 243e6, "3": 199e6}, "mouse": {"1": 195e6, "2": 182e6, "3": 160e6}}
"""Lengths of the first chromosomes; assemblies of one species differ by less than 2 %."""
IDS = {"human": re.compile(r"ENSG\d"), "mouse": re.compile(r"ENSMUSG\d|[A-Z][a-z]")}
"""Start of most ids; symbols in capitals may be of any species."""
REMEDY = (
    "Give the annotation of the contacts' assembly. If the contacts have a part of each chromosome only, leave the"
    " genes of the other parts out of the annotation"
)


def check_same_assembly(genes: pd.DataFrame, bins: pd.DataFrame, *, annotation: str | Path) -> None:
    """Raise a DataError for genes that cannot be of the bins' assembly; chromosomes may have any spelling."""
    ends = {bare_name(chrom): int(end) for chrom, end in bins.groupby("chrom")["end"].max().items()}
    width = int((bins["end"] - bins["start"]).max())
    chroms = genes["chrom"].map(bare_name)
    end = chroms.map(ends)
    why = _beyond(genes, chroms, end + width, ends) or _short(genes, chroms, ends)
    species = named = ""
    for name, lengths in LENGTHS.items():
        there = lengths.keys() & ends.keys()
        if there and all(abs(ends[chrom] / lengths[chrom] - 1) < 0.02 for chrom in there):
            species = name
        if sum(IDS[name].match(gene) is not None for gene in genes.index) > 0.8 * len(genes):
            named = name
    if species and named and species != named:
        why = f"their names are a {named}'s, and the chromosomes are as long as a {species}'s"
    if why:
        raise DataError(
            f"{annotation}: its genes, such as {genes.index[:3].tolist()!r}, are of another assembly than the contacts:"
            f" {why}. {REMEDY}"
        )


def _beyond(genes: pd.DataFrame, chroms: pd.Series, last: pd.Series, ends: dict[str, int]) -> str:
    known, beyond = int(last.notna().sum()), genes[genes["start"] > last]
    if len(beyond) < max(FEW, BEYOND * known):
        return ""
    name, chrom = beyond.index[0], chroms[beyond.index[0]]
    return (
        f"{len(beyond):,} of {known:,} are behind the end of their chromosome, such as {name!r} at"
        f" {int(beyond['start'].iloc[0]):,} of chromosome {chrom}, whose bins end at {ends[chrom]:,}"
    )


def _short(genes: pd.DataFrame, chroms: pd.Series, ends: dict[str, int]) -> str:
    reach, size = genes.groupby(chroms)["end"].max(), chroms.value_counts()
    many = [name for name in reach.index if name in ends and name != "Y" and size[name] >= MANY]
    short = [name for name in many if reach[name] < REACH * ends[name]]
    if len(short) <= len(many) / 2:
        return ""
    return (
        f"on {len(short)} of {len(many)} chromosomes the last one is far from the end, such as at"
        f" {int(reach[short[0]]):,} of {ends[short[0]]:,} on chromosome {short[0]}"
    )


SHIFTED_BP, MOVED = 5_000, 0.1
"""Median distance of the starts, and share of genes on other chromosomes, above which positions are not the same."""


def check_same_positions(own: pd.DataFrame, genes: pd.DataFrame, *, source: str, annotation: str | Path) -> None:
    """Raise a DataError if the positions that a file has of its genes are not those of the annotation.

    Annotations of one assembly differ in single genes, so medians are compared.
    """
    shared = own.index[own.index.isin(genes.index) & ~own.index.duplicated(keep=False)]
    if len(shared) < FEW:
        return
    one, other = own.loc[shared], genes.loc[shared]
    same = one["chrom"].map(bare_name).to_numpy() == other["chrom"].map(bare_name).to_numpy()
    shift = np.abs(one["start"].to_numpy() - other["start"].to_numpy())
    where = ""
    if (~same).mean() > MOVED:
        first = int((~same).argmax())
        where = f"{int((~same).sum()):,} of {len(shared):,} genes are on another chromosome"
    elif same.any() and np.median(shift[same]) > SHIFTED_BP:
        first = int(np.argmax(same & (shift > SHIFTED_BP)))
        where = f"starts of {len(shared):,} genes differ by {int(np.median(shift[same])):,} bp (median)"
    if where:
        name, a, b = shared[first], one.iloc[first], other.iloc[first]
        raise DataError(
            f"{source}: its genes are at other positions than in {annotation}: {where}, such as {name!r} at"
            f" {a['chrom']}:{int(a['start']):,} and {b['chrom']}:{int(b['start']):,}. Give the annotation of the"
            " assembly of both files, or remove the columns of positions from var if these are wrong"
        )


N_TREND_BINS = 20


def choose_genes(
    rna: RnaCounts,
    genes: pd.DataFrame,  # positions of genes, chromosomes in any spelling
    bins: pd.DataFrame,  # chrom, start, end of the bins that are kept
    *,
    n_genes: int,  # how many of the genes on kept chromosomes count as most variable
    annotation: str | Path,  # the file of `genes`, for messages
) -> tuple[RnaCounts, pd.DataFrame]:
    """Return the counts and positions of the most variable genes whose promoter touches a kept bin.

    `.attrs["genes"]` of the positions has the number of genes read, and of genes dropped for each reason.
    """
    # first of all: by chance some genes of another assembly overlap bins as well
    check_same_assembly(genes, bins, annotation=annotation)
    shared = rna.genes[rna.genes.isin(genes.index)]
    if shared.empty:
        raise DataError(
            f"{rna.source}: none of its {len(rna.genes)} genes is in {annotation}; found e.g. "
            f"{rna.genes[:3].tolist()!r} and {genes.index[:3].tolist()!r}; set var_names to the annotation's "
            "names (gene_name of a GTF)"
        )
    if rna.positions is not None:
        check_same_positions(rna.positions, genes, source=rna.source, annotation=annotation)
    present = bins["chrom"].drop_duplicates().tolist()
    positions = genes.loc[shared]
    # genes get the chromosome spelling of the contacts' file, which the vertex names use
    spelling = spell_as(present, positions["chrom"].unique())
    chrom = positions["chrom"].map(spelling)
    positions = positions.assign(chrom=chrom)[chrom.notna().to_numpy()]
    counts = rna.counts[:, rna.genes.get_indexer(positions.index)]
    variable = most_variable(counts, n_genes=n_genes)
    in_hic = np.zeros(len(positions), dtype=bool)
    in_hic[overlap_bins(positions, bins)[0]] = True
    keep = np.flatnonzero(variable & in_hic)
    if not len(keep):
        raise DataError(
            f"{rna.source}: of {len(shared)} genes with a position none is expressed and in a bin of "
            f"{present[:5]!r}; {annotation} has chromosomes {genes['chrom'].unique()[:5].tolist()!r}; use "
            "the annotation of the assembly"
        )
    chosen = positions.iloc[keep]
    chosen.attrs["genes"] = {
        "read": len(rna.genes),
        "without_position": len(rna.genes) - len(shared),
        "on_chromosomes_left_out": len(shared) - len(positions),
        "outside_bins": int((~in_hic).sum()),
        "less_variable": int((in_hic & ~variable).sum()),
    }
    return replace(rna, counts=counts[:, keep], genes=chosen.index), chosen


def most_variable(counts: Any, *, n_genes: int) -> NDArray[np.bool_]:
    """Mark the most variable genes of counts [cell, gene], CSR; all expressed ones when there are fewer.

    Counts are normalised to 10,000 per cell, followed by log1p. Genes are sorted by mean into 20 groups of equal size.
    A gene's score is its log variance minus the median of its group. Ties keep the gene order.
    """
    totals = np.maximum(counts.sum(axis=1), 1)
    logged = sp.csr_array(counts, dtype=np.float64, copy=True)
    # CSR: every stored count gets the factor of its cell
    logged.data = np.log1p(logged.data * np.repeat(1e4 / totals, np.diff(logged.indptr)))
    mean = np.asarray(logged.mean(axis=0)).ravel()
    logged.data **= 2
    # a difference of two means: rounding may make it negative
    variance = np.maximum(np.asarray(logged.mean(axis=0)).ravel() - mean**2, 1e-12)
    score = np.full(len(mean), -np.inf)
    expressed = np.flatnonzero(mean > 0)
    groups = np.array_split(expressed[np.argsort(mean[expressed], kind="stable")], N_TREND_BINS)
    for group in (g for g in groups if len(g)):
        score[group] = np.log(variance[group]) - np.median(np.log(variance[group]))
    marked = np.zeros(len(mean), dtype=bool)
    best = np.argsort(-score, kind="stable")[:n_genes]
    marked[best[np.isfinite(score[best])]] = True
    return marked
