"""Chooses the genes of the RNA modality: variable ones whose promoter is in a Hi-C bin."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from lightning_amp.data.files.chromosome_names import spell_as
from lightning_amp.data.prepare.guidance_graph import overlap_bins
from lightning_amp.data.prepare.rna_counts import RnaCounts
from lightning_amp.data.prepare.same_assembly import check_same_assembly
from lightning_amp.errors import DataError

N_TREND_BINS = 20


def choose_genes(
    rna: RnaCounts,
    genes: pd.DataFrame,
    bins: pd.DataFrame,
    *,
    n_genes: int,
    annotation: str | Path,
) -> tuple[RnaCounts, pd.DataFrame]:
    """Return the counts and positions of the most variable genes whose promoter touches a kept bin.

    How many genes there were, and are left out for which reason, is in `.attrs["genes"]` of the positions.

    Args:
        genes: Positions of genes, chromosomes in any spelling.
        bins: chrom, start, end of the bins that are kept.
        n_genes: How many of the genes on kept chromosomes count as most variable.
        annotation: The file of `genes`, for messages.

    Raises:
        DataError: The annotation is of another assembly than the bins, or the two files share no symbol, or none on the
            kept chromosomes.
    """
    check_same_assembly(genes, bins, annotation=annotation)
    shared = rna.genes[rna.genes.isin(genes.index)]
    if shared.empty:
        raise DataError(
            f"{rna.source}: none of its {len(rna.genes)} genes is in {annotation}; found e.g. "
            f"{rna.genes[:3].tolist()!r} and {genes.index[:3].tolist()!r}; set var_names to the annotation's "
            "names (gene_name of a GTF)"
        )
    present = bins["chrom"].drop_duplicates().tolist()
    positions = genes.loc[shared]
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

    Counts are normalised to 10,000 a cell and log1p is taken; genes are put by their mean into 20 groups of
    equal size, and a gene's score is the distance of its log variance from the median of its group. Genes
    without any count are never marked; equal scores go by gene order.
    """
    totals = np.maximum(counts.sum(axis=1), 1)
    logged = sp.csr_array(counts, dtype=np.float64, copy=True)
    logged.data = np.log1p(logged.data * np.repeat(1e4 / totals, np.diff(logged.indptr)))
    mean = np.asarray(logged.mean(axis=0)).ravel()
    logged.data **= 2
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
