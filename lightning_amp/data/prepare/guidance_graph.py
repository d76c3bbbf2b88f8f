"""Builds the guidance graph: genes and the bins they are in, and bins in contact.

Edges of three types, each listed once:
    overlap     gene - bin that its promoter (transcription start and 2 kb upstream) touches; weight 1
    hic         bin - bin in frequent contact, weight by rank; and neighbouring bins, weight 1
    self-loop   every vertex; weight 1
"""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from lightning_amp.data.files.strata_layout import feature_name
from lightning_amp.data.prepare.gene_positions import promoters


def bin_names(bins: pd.DataFrame) -> NDArray[Any]:
    """Return the names of bins (chrom, start, end) as vertices of the graph."""
    columns = (bins["chrom"], bins["start"], bins["end"])
    return np.array([feature_name(c, s, e, 0) for c, s, e in zip(*columns, strict=True)], dtype=object)


def overlap_bins(genes: pd.DataFrame, bins: pd.DataFrame) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of genes and of bins for every pair in which the gene's promoter touches the bin.

    Chromosomes have the same names in both; bins are contiguous and ascending on each chromosome.
    """
    low, high = promoters(genes)
    gene_rows, bin_rows = [], []
    chrom_of_gene = genes["chrom"].to_numpy()
    for chrom, rows in bins.groupby("chrom", sort=False).indices.items():
        mine = np.flatnonzero(chrom_of_gene == chrom)
        first = np.searchsorted(bins["end"].to_numpy()[rows], low[mine], side="right")
        after = np.searchsorted(bins["start"].to_numpy()[rows], high[mine], side="left")
        n = np.maximum(after - first, 0)
        gene_rows.append(np.repeat(mine, n))
        # The k-th bin of each gene, k counting from its own first one.
        step = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
        bin_rows.append(rows[np.repeat(first, n) + step])
    return np.concatenate(gene_rows), np.concatenate(bin_rows)


def contact_edges(
    bulk: Any, bins: pd.DataFrame, *, loop_quantile: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return rows of both bins and weights of the contacts above a quantile, and of all neighbours.

    On each chromosome the observed contacts between bins at least two apart are compared; those above the
    quantile weigh rank / number, so that the weight is in (0, 1]. Neighbouring bins are always joined, with
    weight 1.

    Args:
        bulk: Contacts summed over cells, COO array of shape [bin, bin], upper triangle, within chromosomes.
        bins: chrom, start, end.
        loop_quantile: In [0, 1).
    """
    chrom = pd.factorize(bins["chrom"])[0]
    low = np.flatnonzero(chrom[:-1] == chrom[1:])
    sources, targets, weights = [low], [low + 1], [np.ones(len(low))]
    apart = bulk.col - bulk.row >= 2
    row, column, count = bulk.row[apart].astype(np.int64), bulk.col[apart].astype(np.int64), bulk.data[apart]
    for code in np.unique(chrom[row]):
        mine = np.flatnonzero(chrom[row] == code)
        mine = mine[count[mine] > np.quantile(count[mine], loop_quantile)]
        sources.append(row[mine])
        targets.append(column[mine])
        weights.append(rankdata(count[mine]) / max(len(mine), 1))
    return np.concatenate(sources), np.concatenate(targets), np.concatenate(weights)


def build_graph(
    genes: pd.DataFrame, bins: pd.DataFrame, bulk: Any, *, loop_quantile: float
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables of vertices and edges that `write_graph` takes; `bulk` as for `contact_edges`."""
    names = bin_names(bins)
    kinds = np.repeat(["RNA", "Hi-C"], [len(genes), len(bins)])
    tables = pd.concat([genes[["chrom", "start"]], bins[["chrom", "start"]].set_index(names)])
    vertices = tables.rename(columns={"start": "chrom_pos"}).assign(feature_type=kinds)
    gene_rows, overlapped = overlap_bins(genes, bins)
    source, target, weight = contact_edges(bulk, bins, loop_quantile=loop_quantile)
    every, symbols = vertices.index.to_numpy(), genes.index.to_numpy()
    parts = [
        pd.DataFrame(
            {"source": symbols[gene_rows], "target": names[overlapped], "weight": 1.0, "type": "overlap"}
        ),
        pd.DataFrame({"source": names[source], "target": names[target], "weight": weight, "type": "hic"}),
        pd.DataFrame({"source": every, "target": every, "weight": 1.0, "type": "self-loop"}),
    ]
    return vertices, pd.concat(parts, ignore_index=True).assign(sign=1.0)
