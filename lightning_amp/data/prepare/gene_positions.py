"""Read gene positions from GTF or BED, and build the guidance graph of genes and bins.

Positions are 0-based and half-open whatever the file's own convention. A gene without a strand counts as "+". Edges of
the graph are listed once each:

    overlap     gene - bin that its promoter (transcription start and 2 kb upstream) touches; weight 1
    hic         bin - bin in frequent contact, weight by rank; and neighbouring bins, weight 1
    self-loop   every vertex; weight 1
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from lightning_amp.data.files.read_h5ad import open_stream
from lightning_amp.data.files.strata_layout import feature_name
from lightning_amp.errors import DataError

PROMOTER_BP = 2_000
SYMBOL = re.compile(r'\bgene_name "([^"]+)"')
IDENTIFIER = re.compile(r'\bgene_id "([^"]+)"')


class Gene(NamedTuple):
    """One line of an annotation: symbol and position, 0-based and half-open."""

    gene: str
    chrom: str
    start: int
    end: int
    strand: str


def read_genes(path: str | Path) -> pd.DataFrame:
    """Read the genes of a .gtf or .bed file (.gz): chrom, start, end, strand, indexed by symbol in file order.

    Of a GTF only `gene` lines count; if it has none, its `transcript` lines. BED needs the columns chrom, start, end,
    name. Of entries with one symbol the longest is kept; how many were left out is in `.attrs["n_duplicated"]`.
    """
    path = Path(path)
    lowered = path.name.lower().removesuffix(".gz")
    if lowered.endswith((".gtf", ".gff2")):
        found = _collect(path, partial(_parse_gtf, "gene")) or _collect(path, partial(_parse_gtf, "transcript"))
    elif lowered.endswith(".bed"):
        found = _collect(path, _parse_bed)
    else:
        raise DataError(f"{path}: expected a gene annotation, found the name {path.name!r}; allowed: .gtf, .bed (.gz)")
    if not found:
        raise DataError(f"{path}: found no gene and no transcript in the annotation; give one that lists genes")
    return _keep_longest(found)


def as_genes(table: pd.DataFrame) -> pd.DataFrame:
    """Return the genes of a table in memory as `read_genes` does those of a file; rows without a position are left out.

    Columns are chrom, start, end (or chromStart, chromEnd, as in `var` of an AnnData) and, optionally, strand; 0-based
    and half-open; the index holds the symbols.
    """
    table = table.rename(columns={"chromStart": "start", "chromEnd": "end"})
    absent = [name for name in ("chrom", "start", "end") if name not in table]
    if absent:
        raise DataError(
            f"genes: a table with chrom, start (or chromStart), end (or chromEnd) and the symbols as index is needed; "
            f"missing are {absent!r}, found {list(table)!r}"
        )
    placed = table.dropna(subset=["chrom", "start", "end"])
    strands = placed["strand"].astype(object).fillna(".") if "strand" in placed else ["."] * len(placed)
    columns = (placed.index, placed["chrom"], placed["start"], placed["end"], strands)
    found = []
    for symbol, chrom, start, end, strand in zip(*columns, strict=True):
        try:
            found.append(_gene(str(symbol), str(chrom), int(start), int(end), strand))
        except ValueError as error:
            raise DataError(f"genes: row {symbol!r} is malformed ({error}); correct or remove it") from error
    if not found:
        raise DataError(f"genes: none of its {len(table)} rows has a position; give a table that lists genes")
    return _keep_longest(found)


def _keep_longest(found: list[Gene]) -> pd.DataFrame:
    table = pd.DataFrame(found).set_index("gene")
    longest = (table["end"] - table["start"]).to_numpy()
    # stable: of entries that are equally long the first in the file is kept
    order = np.argsort(-longest, kind="stable")
    first = table.index[order].duplicated()
    kept = table.iloc[np.sort(order[~first])]
    kept.attrs["n_duplicated"] = len(table) - len(kept)
    return kept


def promoters(genes: pd.DataFrame) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return start and end (half-open, base pairs) of the transcription start and the 2 kb upstream of it, [gene]."""
    start, end = genes["start"].to_numpy(np.int64), genes["end"].to_numpy(np.int64)
    minus = (genes["strand"] == "-").to_numpy()
    # a gene on the minus strand begins at its end, and upstream is to the right
    low = np.where(minus, end - 1, np.maximum(start - PROMOTER_BP, 0))
    high = np.where(minus, end + PROMOTER_BP, start + 1)
    return low, high


def _collect(path: Path, parse: Callable[[str], Gene | None]) -> list[Gene]:
    """Apply a line parser to all lines; a line that does not parse is reported with its number."""
    found = []
    with open_stream(path, what="gene annotation") as stream:
        for number, raw in enumerate(stream, start=1):
            line = raw.decode(errors="replace").rstrip("\r\n")
            if not line.strip() or line.startswith(("#", "track", "browser")):
                continue
            try:
                gene = parse(line)
            except ValueError as error:
                raise DataError(
                    f"{path}: line {number} is malformed ({error}): {line[:120]!r}; correct or remove it"
                ) from error
            if gene is not None:
                found.append(gene)
    return found


def _parse_gtf(feature: str, line: str) -> Gene | None:
    """Parse a GTF line of one feature type; other lines give None."""
    fields = line.split("\t")
    if len(fields) < 9:
        raise ValueError("fewer than 9 tab-separated columns")
    if fields[2] != feature:
        return None
    symbol = SYMBOL.search(fields[8]) or IDENTIFIER.search(fields[8])
    if symbol is None:
        raise ValueError("neither gene_name nor gene_id")
    # GTF counts from 1, and includes the end
    return _gene(symbol[1], fields[0], int(fields[3]) - 1, int(fields[4]), fields[6])


def _parse_bed(line: str) -> Gene:
    fields = line.split("\t")
    if len(fields) < 4:
        raise ValueError("fewer than 4 tab-separated columns")
    strand = fields[5] if len(fields) > 5 else "."
    return _gene(fields[3], fields[0], int(fields[1]), int(fields[2]), strand)


def _gene(symbol: str, chrom: str, start: int, end: int, strand: str) -> Gene:
    if not 0 <= start < end:
        raise ValueError(f"position {start}-{end} is empty or negative")
    if strand not in {"+", "-", "."}:
        raise ValueError(f"strand {strand!r} is none of '+', '-', '.'")
    return Gene(symbol, chrom, start, end, strand)


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
        # half-open on both sides: a bin that ends where the promoter begins is not touched, nor one that begins where
        # it ends
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

    On each chromosome the observed contacts between bins at least two apart are compared; those above the quantile, in
    [0, 1), weigh rank / number, so that the weight is in (0, 1]. Neighbouring bins are always joined, with weight 1.
    `bulk` has the contacts summed over cells, COO [bin, bin], upper triangle, within chromosomes.
    """
    chrom = pd.factorize(bins["chrom"])[0]
    low = np.flatnonzero(chrom[:-1] == chrom[1:])
    sources, targets, weights = [low], [low + 1], [np.ones(len(low))]
    # neighbours are joined anyway
    distant = bulk.col - bulk.row >= 2
    row, column, count = bulk.row[distant].astype(np.int64), bulk.col[distant].astype(np.int64), bulk.data[distant]
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
        pd.DataFrame({"source": symbols[gene_rows], "target": names[overlapped], "weight": 1.0, "type": "overlap"}),
        pd.DataFrame({"source": names[source], "target": names[target], "weight": weight, "type": "hic"}),
        pd.DataFrame({"source": every, "target": every, "weight": 1.0, "type": "self-loop"}),
    ]
    return vertices, pd.concat(parts, ignore_index=True).assign(sign=1.0)
