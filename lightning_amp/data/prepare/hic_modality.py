"""Number the features of a Hi-C modality, and write the contacts of single cells to an h5ad."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from lightning_amp.data.files.new_hdf5 import new_hdf5, start_matrix, write_annotations
from lightning_amp.data.files.strata_layout import feature_name
from lightning_amp.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class FeatureGrid:
    """Bins that are kept, and the column of every pair of them."""

    bins: pd.DataFrame  # columns chrom, start, end of the kept bins; the row is the anchor
    # anchor of each bin of the file, -1 for one left out, of shape [bin of the file]
    row_of_bin: NDArray[np.int64]
    # column of (stratum, anchor), -1 where the pair leaves its chromosome, [stratum, anchor]
    column_of: NDArray[np.int64]
    n_features: int
    cis_only: bool  # whether pairs stay on one chromosome
    left_out: tuple[str, ...]  # chromosomes of the file that are not kept

    @property
    def n_strata(self) -> int:
        """Number of strata."""
        return len(self.column_of)

    def locate(
        self, bin1: NDArray[np.int64], bin2: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the anchors of both bins (the lower first) and the column of each pixel, -1 for what is not kept,
        [pixel].
        """
        row1, row2 = self.row_of_bin[bin1], self.row_of_bin[bin2]
        stratum = row2 - row1
        # the bins of a pixel ascend, so that no stratum is negative where both are kept
        kept = (row1 >= 0) & (row2 >= 0) & (stratum < self.n_strata)
        column = np.full(len(bin1), -1, dtype=np.int64)
        # -1 stays where a pair leaves its chromosome: bins are numbered through, so that its distance may be small
        column[kept] = self.column_of[stratum[kept], row1[kept]]
        return row1, row2, column

    def var(self) -> pd.DataFrame:
        """Return the table of features, indexed by their names."""
        stratum, anchor = np.nonzero(self.column_of >= 0)
        chrom = pd.Categorical(self.bins["chrom"])
        start, end = self.bins["start"].to_numpy(), self.bins["end"].to_numpy()
        partner = anchor + stratum
        names = map(feature_name, np.asarray(chrom)[anchor], start[anchor], end[anchor], stratum.tolist())
        return pd.DataFrame(
            {
                "chrom": chrom[anchor],
                "chromStart": start[anchor],
                "chromEnd": end[anchor],
                "target_chrom": chrom[partner],
                "target_chromStart": start[partner],
                "target_chromEnd": end[partner],
                "stratum": stratum.astype(np.int32),
                "anchor": anchor.astype(np.int32),
                "highly_variable": True,
            },
            index=pd.Index(list(names), dtype=object),
        )


def build_grid(
    bins: pd.DataFrame,  # the file's bin table: chrom, start, end
    *,
    strata: int,
    chromosomes: list[str],
    # leave out pairs that would cross a chromosome's end; otherwise they count as contacts of the last bins of one
    # chromosome with the first bins of the next
    cis_only: bool = True,
    source: str | Path = "bins",
) -> FeatureGrid:
    """Lay out the features of some chromosomes."""
    keep = bins["chrom"].isin(chromosomes).to_numpy()
    kept = bins[keep].reset_index(drop=True)
    sizes = kept["chrom"].value_counts(sort=False)
    # Beyond the longest chromosome a cis stratum is empty; shorter chromosomes just have fewer pairs.
    most = int(sizes.max()) if cis_only else len(kept)
    if not 1 <= strata <= most:
        raise DataError(
            f"{source}: {strata!r} strata are not possible; allowed are 1 to {most!r}, the number of bins of the "
            f"longest chromosome kept ({sizes.idxmax()!r}); ask for fewer or use a finer resolution"
        )
    row_of_bin = np.where(keep, np.cumsum(keep) - 1, -1)
    # codes ascend because factorize numbers chromosomes in their order in the file, which the search below needs
    codes = pd.factorize(kept["chrom"])[0]
    # for every bin one past the last bin of its chromosome
    end = np.searchsorted(codes, codes, side="right") if cis_only else np.full(len(kept), len(kept))
    exists = np.arange(len(kept)) + np.arange(strata)[:, None] < end
    # columns are numbered along a stratum, then along the next one
    column_of = np.where(exists, np.cumsum(exists).reshape(exists.shape) - 1, -1)
    left_out = tuple(bins["chrom"][~keep].drop_duplicates())
    return FeatureGrid(kept, row_of_bin, column_of, int(exists.sum()), cis_only, left_out)


FLUSH_AT = 4_000_000
"""Pixels that wait in memory until they are added to a sum."""
APPEND_AT = 1_000_000
"""Entries that wait in memory until they are appended to the file."""


class Pseudobulk:
    """Running sum of contact maps over the same bins, in memory that does not grow with the number of cells."""

    def __init__(self, n_bins: int) -> None:
        self.n_bins = n_bins
        self._sum: Any = sp.csr_array((n_bins, n_bins), dtype=np.float64)
        self._waiting: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []
        self._n_waiting = 0

    def add(self, row: NDArray[np.int64], column: NDArray[np.int64], count: NDArray[Any]) -> None:
        """Add the pixels of a cell: lower bin, upper bin and contacts, [pixel] each."""
        # cells wait for each other: every addition copies the whole sum
        self._waiting.append((row, column, count))
        self._n_waiting += len(row)
        if self._n_waiting >= FLUSH_AT:
            self._flush()

    def total(self) -> Any:
        """Return the sum so far as a SciPy COO array of shape [bin, bin], upper triangle."""
        self._flush()
        return self._sum.tocoo()

    def _flush(self) -> None:
        if self._waiting:
            row, column, count = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
            shape = (self.n_bins, self.n_bins)
            self._sum = self._sum + sp.csr_array((count.astype(np.float64), (row, column)), shape=shape)
            self._waiting, self._n_waiting = [], 0


def write_hic(
    path: Path,
    cells: Iterable[tuple[str, pd.DataFrame]],  # name and pixels (bin1_id, bin2_id, count) of each cell
    *,
    grid: FeatureGrid,
    labels: pd.DataFrame,  # one row for each cell, indexed by the names in `cells`: celltype, batch, read_depth
    min_depth: int,
    settings: dict[str, Any],  # written to `uns["amp"]` with the number of dropped cells
    source: str | Path,
) -> Any:
    """Write the Hi-C modality, with a few cells in memory at a time.

    A cell is dropped when it has fewer than `min_depth` contacts on the kept chromosomes (at any distance), or none in
    the strata. Returns the contacts within chromosomes, summed over the cells kept, as a SciPy COO array [anchor,
    anchor].
    """
    bulk = Pseudobulk(len(grid.bins))
    chrom = pd.factorize(grid.bins["chrom"])[0]
    kept, depths, n_seen, n_shallow, best = [], [], 0, 0, 0.0
    waiting: list[tuple[Any, Any]] = []
    with new_hdf5(path) as (file, check):
        matrix = start_matrix(file, grid.n_features)

        def flush() -> None:
            if waiting:
                columns, values = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
                ends = np.cumsum([0, *(len(part) for part, _ in waiting)])
                entries = (values.astype(np.float32), columns.astype(np.int32), ends)
                # many cells at once: `append` takes 8 ms a call
                matrix.append(sp.csr_matrix(entries, shape=(len(waiting), grid.n_features)))
                waiting.clear()
                check()

        for cell, pixels in cells:
            n_seen += 1
            count = pixels["count"].to_numpy()
            row1, row2, column = grid.locate(pixels["bin1_id"].to_numpy(), pixels["bin2_id"].to_numpy())
            present = (row1 >= 0) & (row2 >= 0)
            # contacts at any distance count, those beyond the strata too
            depth = float(count[present].sum())
            best = max(best, depth)
            stored = (column >= 0) & (count > 0)
            n_shallow += depth < min_depth
            if depth < min_depth or not stored.any():
                continue
            # a repeated pixel is added up: cooler writes none, other tools may
            columns, where = np.unique(column[stored], return_inverse=True)
            values = np.bincount(where, weights=count[stored])
            waiting.append((columns, values))
            if sum(len(part) for part, _ in waiting) >= APPEND_AT:
                flush()
            cis = present & (chrom[row1] == chrom[row2])
            bulk.add(row1[cis], row2[cis], count[cis])
            kept.append(cell)
            depths.append(float(values.sum()))
        if not kept:
            raise DataError(
                f"{source}: no cell is left of {n_seen!r}: min_depth={min_depth!r} contacts a cell are required, "
                f"the deepest has {best!r} on the kept chromosomes; lower min_depth or check the cells"
            )
        flush()
        ends = file["X/indptr"][:]
        if ends[-1] <= np.iinfo(np.int32).max:
            # as narrow as the indices: scipy copies all indices for each slice of mixed integers
            del file["X/indptr"]
            file["X/indptr"] = ends.astype(np.int32)
        obs = labels.loc[kept].assign(depth=depths, dataset="train")
        obs.index = pd.Index(kept, dtype=object)
        dropped = {"n_dropped_cells": n_seen - len(kept), "n_shallow_cells": n_shallow, "min_depth": min_depth}
        amp = settings | {"schema": 1, "chromosomes_left_out": np.array(grid.left_out, dtype=object)} | dropped
        write_annotations(file, obs=obs, var=grid.var(), uns={"amp": amp})
    return bulk.total()
