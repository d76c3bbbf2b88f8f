"""Numbers the features of a Hi-C modality: every pair (bin i, bin i + k) with k < strata, in stratum-major order."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lightning_amp.data.files.strata_layout import feature_name
from lightning_amp.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class FeatureGrid:
    """Bins that are kept, and the column of every pair of them.

    Attributes:
        bins: Columns chrom, start, end of the kept bins; the row is the anchor.
        row_of_bin: Anchor of each bin of the file, -1 for one left out, of shape [bin of the file].
        column_of: Column of (stratum, anchor), -1 where the pair leaves its chromosome, [stratum, anchor].
        cis_only: Whether pairs stay on one chromosome.
        left_out: Chromosomes of the file that are not kept.
    """

    bins: pd.DataFrame
    row_of_bin: NDArray[np.int64]
    column_of: NDArray[np.int64]
    n_features: int
    cis_only: bool
    left_out: tuple[str, ...]

    @property
    def n_strata(self) -> int:
        """Number of strata."""
        return len(self.column_of)

    def locate(
        self, bin1: NDArray[np.int64], bin2: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the anchors of both bins (the lower first) and the column of each pixel, -1 for what is not kept,
        [pixel]."""
        row1, row2 = self.row_of_bin[bin1], self.row_of_bin[bin2]
        stratum = row2 - row1
        kept = (row1 >= 0) & (row2 >= 0) & (stratum < self.n_strata)
        column = np.full(len(bin1), -1, dtype=np.int64)
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
    bins: pd.DataFrame,
    *,
    strata: int,
    chromosomes: list[str],
    cis_only: bool = True,
    source: str | Path = "bins",
) -> FeatureGrid:
    """Lay out the features of some chromosomes.

    Args:
        bins: The file's bin table: chrom, start, end.
        cis_only: Leave out pairs that would cross a chromosome's end; otherwise they count as contacts of the
            last bins of one chromosome with the first bins of the next.

    Raises:
        DataError: Fewer than one stratum, or more than the longest chromosome has bins.
    """
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
    codes = pd.factorize(kept["chrom"])[0]
    end = np.searchsorted(codes, codes, side="right") if cis_only else np.full(len(kept), len(kept))
    exists = np.arange(len(kept)) + np.arange(strata)[:, None] < end
    column_of = np.where(exists, np.cumsum(exists).reshape(exists.shape) - 1, -1)
    left_out = tuple(bins["chrom"][~keep].drop_duplicates())
    return FeatureGrid(kept, row_of_bin, column_of, int(exists.sum()), cis_only, left_out)
