"""Data sets that read only a rank's own columns or bins of the cells in a file."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_amp.data.files.read_columns import read_columns
from lightning_amp.data.files.read_h5ad import open_h5ad, shape_of
from lightning_amp.data.prepare.read_scool import ScoolFile
from lightning_amp.errors import DataError


class OwnColumns(Dataset[Tensor]):
    """Some columns of the cells of an h5ad; an item is a float32 tensor [own column].

    Each worker reads the rows of a dense matrix when they are needed. The own columns of a sparse matrix are read once
    and stay in memory; from CSR, this reads the whole file, a few rows at a time.

    Args:
        path: The h5ad.
        columns: As `lightning_amp.own_part` gives them; None is all.
        source: Path of the matrix in the file: "X" or, for example, "layers/counts".

    Raises:
        DataError: The file has no such matrix or columns.
    """

    def __init__(self, path: str | Path, columns: slice | None = None, *, source: str = "X") -> None:
        self.path, self.source = Path(path), source
        with open_h5ad(self.path) as file:
            if source not in file:
                raise DataError(f"{self.path}: there is no {source!r}, found {sorted(file)!r}")
            self.n_cells, self.n_features = shape_of(file[source])
            dense = isinstance(file[source], h5py.Dataset)
        self.columns = _run(columns, self.n_features, f"{self.path}, {source}, columns")
        self._counts = None if dense else read_columns(self.path, source, self.columns)
        self._open: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return self.n_cells

    def __getitem__(self, cell: int) -> Tensor:
        return self.rows([cell])[0]

    def __getitems__(self, cells: Sequence[int]) -> list[Tensor]:
        """The items of a batch, in one read."""
        return [*self.rows(cells)]

    def rows(self, cells: Sequence[int] | np.ndarray) -> Tensor:
        """Read cells as [cell, own column], in the given order; a cell may be repeated."""
        if self._counts is not None:
            return torch.from_numpy(self._counts[cells].toarray())
        # a file that was opened in another process reads wrong bytes
        if self._open is None or self._open[0] != os.getpid():
            self._open = os.getpid(), h5py.File(self.path, "r")[self.source]
        unique, where = np.unique(np.asarray(cells), return_inverse=True)
        return torch.from_numpy(self._open[1][unique, self.columns][where].astype(np.float32, copy=False))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open file out of the copy for a worker that is not forked."""
        return {**vars(self), "_open": None}


class OwnBins(Dataset[Tensor]):
    """Contacts of own bins with later bins for the cells of a .scool; an item is a float32 tensor [stratum, own bin].

    Element (k, i) counts the contacts of the i-th own bin with the k-th bin after it on its chromosome.

    Args:
        path: The .scool.
        bins: As `lightning_amp.own_part` gives them; None is all.
        strata: Number of strata.

    Raises:
        DataError: The file is not a .scool, or has no such bins.
    """

    def __init__(self, path: str | Path, bins: slice | None = None, *, strata: int) -> None:
        self._file, self.strata = ScoolFile(Path(path)), strata
        self.cells, chromosomes = self._file.cells, self._file.bins["chrom"].to_numpy().astype(str)
        self.n_bins = len(chromosomes)
        self.bins = _run(bins, self.n_bins, f"{path}, bins")
        self._chromosome = np.unique(chromosomes, return_inverse=True)[1]

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, cell: int) -> Tensor:
        return self.__getitems__([cell])[0]

    def __getitems__(self, cells: Sequence[int]) -> list[Tensor]:
        """The items of a batch; the file is opened once."""
        found = torch.zeros(len(cells), self.strata, self.bins.stop - self.bins.start)
        names = [self.cells[cell] for cell in cells]
        for item, (_, table) in zip(found.numpy(), self._file.iterate(names, self.bins), strict=True):
            first, second, count = (table[name].to_numpy() for name in ("bin1_id", "bin2_id", "count"))
            kept = (second - first < self.strata) & (self._chromosome[first] == self._chromosome[second])
            np.add.at(item, ((second - first)[kept], first[kept] - self.bins.start), count[kept])
        return [*found]


def _run(chosen: slice | None, n: int, what: str) -> slice:
    """Return a slice as the first and one past the last of n."""
    start, stop, step = (chosen or slice(None)).indices(n)
    if step != 1 or start >= stop or (chosen is not None and (chosen.stop or 0) > n):
        raise DataError(
            f"{what}={chosen!r} is not supported; allowed is a slice with step 1 within the {n!r} that exist"
        )
    return slice(start, stop)
