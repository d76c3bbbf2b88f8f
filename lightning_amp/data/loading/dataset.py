"""Read cells of h5ad files as training batches, or only a rank's own columns or bins of them.

An item of the data set is the batch of a whole step; the sampler gives the rows (`StepIndices`). Counts stay sparse in
memory; the rows of one step become dense, except in modalities that are returned as `SparseCounts`.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor
from torch.utils.data import Dataset

from lightning_amp.data.batch import Batch, CellBatch, CellRows, draw_keys
from lightning_amp.data.files.read_h5ad import (
    fault_of_counts,
    names_of,
    open_h5ad,
    read_columns,
    read_header,
    read_strings,
    read_totals,
    shape_of,
)
from lightning_amp.data.prepare.read_scool import ScoolFile
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import DataError

COUNT_MODALITIES = ("hic", "rna", "atac")  # methylation may hold rates


@dataclass(frozen=True, kw_only=True, slots=True)
class StepIndices:
    """Rows of one step of one rank: modality -> rows of its file, and the step's key for `draw_keys`, the same on
    every rank; and the modalities whose rows are another rank's, which a sum over ranks leaves out.
    """

    rows: Mapping[str, NDArray[np.int64]]
    draw_key: int
    repeated: Collection[str] = ()


class CellTable:
    """One modality's cells: raw counts as CSR in memory, with library sizes, experimental batches and names.

    Counts are those of layers["counts"], else of X; "hic", "rna" and "atac" must hold whole numbers. With `columns`
    only those features are kept; library sizes are of all.
    """

    # columns of the file that `take` has kept, in their order; None for all of them
    _taken: NDArray[np.int64] | None = None

    def __init__(self, path: Path, modality: str, columns: slice | None = None) -> None:
        self.path = Path(path)
        self.modality, self.columns = modality, columns
        # imported late: cells in memory need no reader of files
        from anndata.io import read_elem

        header = read_header(self.path)
        self.n_cells, self.n_features = header.n_cells, header.n_features
        source = "layers/counts" if header.has_counts_layer else "X"
        self.contacts: NDArray[np.float64]
        if columns is None:
            with open_h5ad(self.path) as file:
                self.counts = sparse.csr_matrix(read_elem(file[source]), dtype=np.float32)
            # entries that a file lists twice are parts of one count
            self.counts.sum_duplicates()
            self.contacts = np.asarray(self.counts.sum(axis=1, dtype=np.float64)).ravel()
        else:
            self.counts = read_columns(self.path, source, columns)
            self.contacts = read_totals(self.path, source)
        if self.counts.nnz <= np.iinfo(np.int32).max:
            # of one type, for scipy converts all indices of a mixed pair each time that rows are taken
            self.counts.indptr = self.counts.indptr.astype(np.int32, copy=False)
            self.counts.indices = self.counts.indices.astype(np.int32, copy=False)
        obs = self.read_obs()
        where = f"{self.path}, {source}"
        fault = fault_of_counts(self.counts.data, whole=modality in COUNT_MODALITIES)
        if fault:
            raise DataError(
                f"{where}: found {fault[0]} values, e.g. {fault[1]!r}; raw counts are needed, "
                "store them in layers['counts']"
            )
        if not self.contacts.any():
            raise DataError(f"{where}: none of its {self.n_cells!r} cells has a count; drop this modality")
        self.obs_names: NDArray[np.str_] = obs.index.to_numpy().astype(str)
        labels = obs["batch"].astype(str) if "batch" in obs else np.full(self.n_cells, "0")
        self.batch_names, codes = np.unique(labels, return_inverse=True)
        self.batch: NDArray[np.int64] = codes.astype(np.int64)
        self.n_batches = len(self.batch_names)

    def read_obs(self) -> pd.DataFrame:
        """Read the table of cells; not kept."""
        return self._table("obs")

    def read_var(self) -> pd.DataFrame:
        """Read the table of features; not kept."""
        table = self._table("var")
        return table if self._taken is None else table.iloc[self._taken]

    def _table(self, name: str) -> pd.DataFrame:
        from anndata.io import read_elem

        with open_h5ad(self.path) as file:
            table: pd.DataFrame = read_elem(file[name])
        return table

    def feature_names(self) -> list[str]:
        """Read the feature names in file order; not kept, since a Hi-C modality has a million of them."""
        with open_h5ad(self.path) as file:
            names = read_strings(names_of(file["var"]))
        return names if self._taken is None else [names[column] for column in self._taken]

    def take(self, columns: Sequence[int]) -> None:
        """Keep some features, in the given order; the library size of a cell is then the sum of these."""
        self._taken = np.asarray(columns) if self._taken is None else self._taken[columns]
        self.counts = self.counts[:, columns].tocsr()
        self.contacts = np.asarray(self.counts.sum(axis=1, dtype=np.float64)).ravel()
        self.n_features = len(columns)

    def code_batches(self, names: Sequence[str]) -> None:
        """Number the experimental batches by their places in `names`; a batch that is not there becomes the first."""
        codes = np.array([names.index(name) if name in names else 0 for name in self.batch_names.tolist()])
        self.batch = codes.astype(np.int64)[self.batch]
        self.batch_names, self.n_batches = np.array(names), len(names)

    @property
    def share(self) -> float:
        """Share of the counts that are not zero."""
        return float(self.counts.nnz / np.prod(self.counts.shape, dtype=np.float64))

    def rows(self, indices: NDArray[np.int64], *, sparse: bool = False) -> CellRows:
        """Return some rows of the file as tensors, in the given order, repeats allowed; x as `SparseCounts` if
        `sparse`.
        """
        counts = self.counts[indices]
        return CellRows(
            x=SparseCounts.from_csr(counts) if sparse else torch.from_numpy(counts.toarray()),
            library=torch.from_numpy(self.contacts[indices].astype(np.float32)[:, None]),
            batch=torch.from_numpy(self.batch[indices]),
            index=torch.from_numpy(np.array(indices, dtype=np.int64)),
        )

    def batch_of(self, indices: NDArray[np.int64], *, sparse: bool = False, draw_key: int = 0) -> CellBatch:
        """Return some rows of the file as the cells of a step, with the keys of their random draws."""
        draw = torch.from_numpy(draw_keys(draw_key, self.modality, indices))
        return CellBatch(**self.rows(indices, sparse=sparse), draw=draw)  # type: ignore[typeddict-item]

    def batches_of(
        self, indices: NDArray[np.int64], n: int, *, sparse: bool = False, draw_key: int = 0
    ) -> Iterator[tuple[NDArray[np.int64], CellBatch]]:
        """Yield some rows of the file in order, `n` at a time: their indices, and the cells as `batch_of` has them."""
        for start in range(0, len(indices), n):
            part = indices[start : start + n]
            yield part, self.batch_of(part, sparse=sparse, draw_key=draw_key)


class MultiModalDataset(Dataset[Batch]):
    """Data set of several modalities whose item is the batch of a whole step; x of modalities in `sparse` is
    `SparseCounts`.
    """

    def __init__(self, tables: Mapping[str, CellTable], *, sparse: Collection[str] = ()) -> None:
        self.tables = dict(tables)
        self.sparse = frozenset(sparse)

    def __getitem__(self, step: StepIndices) -> Batch:
        batch: Batch = {}
        for modality, rows in step.rows.items():
            sparse = modality in self.sparse
            batch[modality] = self.tables[modality].batch_of(rows, sparse=sparse, draw_key=step.draw_key)
            if modality in step.repeated:
                batch[modality]["repeated"] = True
        return batch


class OwnColumns(Dataset[Tensor]):
    """Read this rank's columns from an h5ad; an item is one cell as a float32 tensor [own column].

    Each worker reads the rows of a dense matrix when they are needed. The own columns of a sparse matrix are read once
    and stay in memory; from CSR, this reads the whole file, a few rows at a time.

    Args:
        path: The h5ad.
        columns: Slice of columns, from `lightning_amp.own_part`; None reads all.
        source: Path of the matrix in the file: "X" or, for example, "layers/counts".

    Raises:
        DataError: The file has no such matrix or columns.
    """

    def __init__(self, path: str | Path, columns: slice | None = None, *, source: str = "X") -> None:
        self.path, self.source = Path(path), source
        with open_h5ad(self.path) as file:
            if source not in file:
                raise DataError(f"{self.path}: there is no {source!r}, found {sorted(file)!r}; name one of these")
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
        # h5py takes ascending indices only, each once
        unique, where = np.unique(np.asarray(cells), return_inverse=True)
        return torch.from_numpy(self._open[1][unique, self.columns][where].astype(np.float32, copy=False))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open file out of the copy for a worker that is not forked."""
        return {**vars(self), "_open": None}


class OwnBins(Dataset[Tensor]):
    """Read the contacts of this rank's bins from a .scool; an item is one cell as float32 [stratum, own bin].

    Element (k, i) counts the contacts of the i-th own bin with the k-th bin after it on its chromosome.

    Args:
        path: The .scool.
        bins: Slice of bins, from `lightning_amp.own_part`; None reads all.
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
            # not `+=`, which counts a pixel once that is listed twice
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
