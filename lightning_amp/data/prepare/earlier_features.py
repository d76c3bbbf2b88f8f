"""Read the features of a data directory, so that new cells are prepared for a model that was trained on it."""

from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import scipy.sparse as sp

from lightning_amp.data.files.directory import find
from lightning_amp.data.files.read_h5ad import open_h5ad
from lightning_amp.data.prepare.hic_modality import FeatureGrid
from lightning_amp.data.prepare.rna_modality import RnaCounts
from lightning_amp.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EarlierFeatures:
    """Bins, strata and genes of a data directory that `prepare` wrote."""

    root: Path
    strata: int
    cis_only: bool
    chromosomes: list[str]
    anchors: list[str]  # names of the features of stratum 0
    genes: pd.DataFrame  # chrom, start, end and strand, indexed by gene

    def check_bins(self, grid: FeatureGrid, source: Path) -> None:
        """Raise a DataError unless the bins of a grid are those of the directory."""
        own = grid.var().index[: len(grid.bins)].tolist()
        if own != self.anchors:
            raise DataError(
                f"{source}: found {len(own):,} bins, such as {own[0]!r}, and {self.root} has {len(self.anchors):,},"
                f" such as {self.anchors[0]!r}; give a .scool of the same assembly and resolution"
            )

    def take(self, rna: RnaCounts) -> tuple[RnaCounts, pd.DataFrame]:
        """Return counts and positions of the directory's genes, in its order.

        A gene that the file lacks has no counts in any cell; `.attrs["genes"]` of the positions has their number.

        Raises:
            DataError: The file has less than half of the genes.
        """
        found = rna.genes.get_indexer(self.genes.index)
        missing = self.genes.index[found < 0].tolist()
        if 2 * len(missing) > len(self.genes):
            raise DataError(
                f"{rna.source}: {len(missing):,} of the {len(self.genes):,} genes of {self.root} are missing, e.g."
                f" {missing[:3]!r}; the file has e.g. {rna.genes[:3].tolist()!r}: set var_names to such names"
            )
        # the column after the last one is empty, and stands for genes that are missing
        empty = sp.csr_array((rna.counts.shape[0], 1), dtype=rna.counts.dtype)
        padded = sp.csc_array(sp.hstack([rna.counts, empty]))  # a matrix in SciPy 1.11
        genes = self.genes.copy()
        genes.attrs["genes"] = {
            "read": len(rna.genes),
            "not_in_earlier": len(rna.genes) - len(genes) + len(missing),
            "filled_with_zeros": len(missing),
        }
        return replace(rna, counts=padded[:, found].tocsr(), genes=genes.index), genes


def read_earlier_features(root: str | Path) -> EarlierFeatures:
    """Read the features of a directory that `prepare` wrote, with Hi-C and RNA.

    Raises:
        DataError: There is no such directory, or it has not what `prepare` writes.
    """
    from anndata.io import read_elem

    directory = find(root)
    if directory.hic is None or directory.rna is None:
        raise DataError(f"{root}: like={str(root)!r} needs Hi-C and RNA, found {sorted(directory.modalities)!r}")
    with open_h5ad(directory.hic) as file:
        if "uns" not in file or "amp" not in file["uns"]:
            raise DataError(f"{directory.hic}: prepare did not write it; like= takes a directory that prepare wrote")
        amp, var = read_elem(file["uns/amp"]), read_elem(file["var"])
    with open_h5ad(directory.rna) as file:
        genes = read_elem(file["var"])[["chrom", "chromStart", "chromEnd", "strand"]]
    return EarlierFeatures(
        root=Path(root),
        strata=int(amp["strata"]),
        cis_only=bool(amp["cis_only"]),
        chromosomes=var["chrom"].drop_duplicates().tolist(),
        anchors=var.index[var["stratum"] == 0].tolist(),
        genes=genes.rename(columns={"chromStart": "start", "chromEnd": "end"}),
    )
