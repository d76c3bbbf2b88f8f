"""Make synthetic cells of any size, as a data directory or as the files that `prepare` reads.

Each cell type has its own active and inactive chromosome segments (compartments) and a few loops. Contacts
between bins i and i + k fall off as 1 / (k + 1), are more frequent within a compartment and around active
bins, and strongest at loops; RNA counts of genes in active segments are higher. Number of contacts and of
transcripts vary log-normally between cells.

More frequent contacts around active bins link the modalities: products of activities keep no sign. Scores of genes in
single-cell Hi-C rest on them, such as the contacts within a gene's body of scGAD (Shen
et al. 2022, doi 10.1093/bioinformatics/btac372), by which scHi-C cells are placed among RNA cells. No published number
for its strength was found; LINK is ours, and strong: the correlation over cell types of a gene's expression and its
bin's contacts of strata 0 and 1 is about 0.8, where the human cortex at 1 Mb (Lee et al. 2019, Darmanis et al. 2015,
chromosome 1) has 0.3 for the genes most particular to one type. Finer bins separate genes better.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from lightning_amp.data.files.directory import DataDirectory, find, write_aside
from lightning_amp.data.files.new_hdf5 import write_scool
from lightning_amp.data.prepare.hic_modality import FeatureGrid, build_grid
from lightning_amp.data.prepare.prepare import write_modalities
from lightning_amp.data.prepare.rna_modality import RnaCounts
from lightning_amp.errors import DataError

LOOP_QUANTILE = 0.98
SEGMENT = 6
LINK = 0.5
SPREAD = 0.6
TRANSCRIPTS = 3_000
DISPERSION = 5.0


def synthesize(out: str | Path, *, overwrite: bool = False, **sizes: Any) -> DataDirectory:
    """Write a synthetic data directory; the same arguments give the same values.

    Args:
        out: Directory to write.
        overwrite: Replace an existing data directory.
        cells, rna_cells: Numbers of Hi-C (200) and of RNA cells, by default equal.
        bins, chromosomes: Number of bins in all (120), and of chromosomes (2) of about equal length.
        strata, genes, cell_types: Numbers of these (8, 150, 4).
        resolution: Bin width in base pairs (1,000,000).
        depth: Mean number of contacts a cell (2000).
        seed: Seed of all random draws (0).
        paired: Whether Hi-C and RNA cells are the same ones, with the same names and types (False).

    Raises:
        DataError: An argument is out of range, or `out` cannot be written.
    """
    drawn = _draw(**sizes)
    with write_aside(out, overwrite=overwrite) as aside:
        write_modalities(aside, **drawn, loop_quantile=LOOP_QUANTILE, min_depth=0, source="synthetic cells")
    return find(Path(out))


def synthesize_files(out: str | Path, **sizes: Any) -> list[Path]:
    """Write the files that `prepare` reads, of the cells of `synthesize`, into a new folder.

    Contacts of bins `strata` or more apart are not drawn. Arguments and errors are those of `synthesize`.

    Returns:
        cells.scool, cells.tsv (labels of its cells), rna.h5ad and genes.bed.
    """
    from anndata import AnnData

    drawn = _draw(**sizes)
    names = ("cells.scool", "cells.tsv", "rna.h5ad", "genes.bed")
    with write_aside(out) as aside:
        hic, labels, rna, genes = (aside / name for name in names)
        cells = ((name, pixels.sort_values(["bin1_id", "bin2_id"])) for name, pixels in drawn["cells"])
        write_scool(hic, drawn["grid"].bins, cells, n_cells=len(drawn["labels"]))
        drawn["labels"].to_csv(labels, sep="\t", index_label="cell")
        var = pd.DataFrame(index=drawn["rna"].genes)
        AnnData(sp.csr_matrix(drawn["rna"].counts), obs=drawn["rna"].obs, var=var).write_h5ad(rna)
        bed = drawn["positions"].assign(name=drawn["positions"].index, score=0)
        bed[["chrom", "start", "end", "name", "score", "strand"]].to_csv(genes, sep="\t", header=False, index=False)
    return [Path(out) / name for name in names]


def _draw(
    *,
    cells: int = 200,
    rna_cells: int | None = None,
    bins: int = 120,
    strata: int = 8,
    genes: int = 150,
    cell_types: int = 4,
    chromosomes: int = 2,
    resolution: int = 1_000_000,
    depth: int = 2000,
    seed: int = 0,
    paired: bool = False,
) -> dict[str, Any]:
    rna_cells = cells if rna_cells is None else rna_cells
    sizes = {"cells": cells, "rna_cells": rna_cells, "genes": genes, "cell_types": cell_types, "depth": depth}
    for name, value in (sizes | {"bins": bins, "chromosomes": chromosomes, "resolution": resolution}).items():
        if value < 1:
            raise DataError(f"{name}={value!r} is too small; at least 1 is allowed")
    if chromosomes > bins:
        raise DataError(f"chromosomes={chromosomes!r} do not fit in bins={bins!r}; each needs a bin")
    rng = np.random.default_rng(seed)
    # chr1, chr2, ..., as equally long as possible
    parts = [len(part) for part in np.array_split(np.arange(bins), chromosomes)]
    start = np.concatenate([np.arange(n) * resolution for n in parts])
    chrom = np.repeat([f"chr{i + 1}" for i in range(chromosomes)], parts).astype(object)
    table = pd.DataFrame({"chrom": chrom, "start": start, "end": start + resolution})
    grid = build_grid(table, strata=strata, chromosomes=table["chrom"].unique().tolist(), source="synthetic bins")
    activity, cumulative = _make_population(rng, grid, cell_types)
    positions = _place_genes(rng, table, genes)
    rna = _draw_rna(rng, table, activity, positions, rna_cells)
    if paired:
        if rna_cells != cells:
            raise DataError(f"paired cells: cells={cells!r} and rna_cells={rna_cells!r} differ; give one number")
        labels = rna.obs.assign(read_depth=1.0).set_axis([f"cell{i}" for i in range(cells)])
        rna = replace(rna, obs=rna.obs.set_axis(labels.index))
    else:
        labels = _label("hic", rng.permutation(np.arange(cells) % cell_types))
    # contacts are drawn cell by cell as these are read
    contacts = _draw_cells(rng, grid, cumulative, labels, depth)
    return {"grid": grid, "cells": contacts, "labels": labels, "rna": rna, "positions": positions, "paired": paired}


def _make_population(
    rng: np.random.Generator, grid: FeatureGrid, n_types: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw compartments and loops of each cell type and work out the contact probabilities.

    Returns the compartment of each bin, positive where active, [type, bin], and the running sum of contact
    probabilities over the features, [type, feature].
    """
    n_bins = len(grid.bins)
    n_segments = -(-n_bins // SEGMENT)
    # Segments share a base over types, so that types differ in some places rather than everywhere.
    segments = rng.normal(size=n_segments) + rng.normal(size=(n_types, n_segments))
    activity = np.tanh(2 * np.repeat(segments, SEGMENT, axis=1)[:, :n_bins])
    visibility = rng.lognormal(sigma=0.2, size=n_bins)
    stratum, anchor = np.nonzero(grid.column_of >= 0)
    partner = anchor + stratum
    one, other = activity[:, anchor], activity[:, partner]
    rate = np.exp(0.8 * one * other + LINK * (one + other)) * visibility[anchor] * visibility[partner]
    rate /= stratum + 1
    far = np.flatnonzero(stratum >= min(2, grid.n_strata - 1))
    for of_type in rate:
        of_type[rng.choice(far, size=min(len(far), max(2, n_bins // 12)), replace=False)] *= 8
    cumulative = np.cumsum(rate, axis=1)
    return activity, cumulative / cumulative[:, -1:]


def _label(kind: str, types: NDArray[np.int64]) -> pd.DataFrame:
    names = pd.Index([f"{kind}_cell{i}" for i in range(len(types))], dtype=object)
    celltype = [f"type{t}" for t in types]
    return pd.DataFrame({"celltype": celltype, "batch": "0", "read_depth": 1.0}, index=names)


def _draw_cells(
    rng: np.random.Generator, grid: FeatureGrid, cumulative: NDArray[np.float64], labels: pd.DataFrame, depth: int
) -> Iterator[tuple[str, pd.DataFrame]]:
    stratum, anchor = np.nonzero(grid.column_of >= 0)
    for cell, celltype in labels["celltype"].items():
        of_type = cumulative[int(celltype.removeprefix("type"))]
        # At least one contact, so that every cell is written.
        n = max(1, rng.poisson(depth * rng.lognormal(-(SPREAD**2) / 2, SPREAD)))
        drawn = np.searchsorted(of_type, rng.random(n), side="right")
        feature, count = np.unique(drawn, return_counts=True)
        low = anchor[feature]
        yield cell, pd.DataFrame({"bin1_id": low, "bin2_id": low + stratum[feature], "count": count})


def _place_genes(rng: np.random.Generator, bins: pd.DataFrame, n_genes: int) -> pd.DataFrame:
    """Place genes in random bins, each with its promoter inside, on either strand."""
    home = bins.iloc[np.sort(rng.integers(len(bins), size=n_genes))]
    width = (home["end"] - home["start"]).to_numpy()
    start = home["start"].to_numpy() + rng.integers(0, np.maximum(width // 2, 1))
    table = pd.DataFrame({"chrom": home["chrom"].to_numpy(), "start": start, "end": start + np.maximum(width // 4, 1)})
    table["strand"] = rng.choice(["+", "-"], size=n_genes).astype(object)
    return table.set_index(pd.Index([f"GENE{i}" for i in range(n_genes)], dtype=object, name="gene"))


def _draw_rna(
    rng: np.random.Generator, bins: pd.DataFrame, activity: NDArray[np.float64], genes: pd.DataFrame, n_cells: int
) -> RnaCounts:
    """Draw negative binomial counts whose means follow the activity of each gene's bin."""
    types = rng.permutation(np.arange(n_cells) % len(activity))
    first = {chrom: rows[0] for chrom, rows in bins.groupby("chrom", sort=False).indices.items()}
    width = int((bins["end"] - bins["start"]).iloc[0])
    row = genes["chrom"].map(first).to_numpy() + genes["start"].to_numpy() // width
    rate = rng.lognormal(size=len(genes)) * np.exp(1.5 * activity[:, row])
    share = rate / rate.sum(axis=1, keepdims=True)
    # the shift lets the factor have the mean 1
    total = TRANSCRIPTS * rng.lognormal(-(SPREAD**2) / 2, SPREAD, size=n_cells)
    mean = share[types] * total[:, None]
    # a Poisson number whose mean is gamma distributed is negative binomial
    counts: Any = rng.poisson(mean * rng.gamma(DISPERSION, 1 / DISPERSION, size=mean.shape))
    obs = _label("rna", types)[["celltype", "batch"]]
    return RnaCounts(sp.csr_array(counts.astype(np.float32)), obs, genes.index, "synthetic cells")
