"""Reads the cells of every modality from h5ad files, and makes training batches of them.

An item of the data set is the batch of a whole step; the sampler gives the rows (`StepIndices`). Counts stay sparse in
memory; the rows of one step become dense, except in modalities that are returned as `SparseCounts`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch.utils.data import Dataset

from lightning_amp.data.batch import Batch, CellBatch, CellRows
from lightning_amp.data.cell_keys import draw_keys
from lightning_amp.data.files.read_columns import read_columns, read_totals
from lightning_amp.data.files.read_h5ad import fault_of_counts, names_of, open_h5ad, read_header, read_strings
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import DataError

COUNT_MODALITIES = ("hic", "rna", "atac")  # methylation may hold rates


@dataclass(frozen=True, kw_only=True, slots=True)
class StepIndices:
    """Rows of one step of one rank: modality -> rows of its file, and the step's key for `draw_keys`, the same on
    every rank."""

    rows: Mapping[str, NDArray[np.int64]]
    draw_key: int


class CellTable:
    """One modality's cells: raw counts as CSR in memory, with library sizes, experimental batches and names.

    Args:
        path: h5ad file; counts are taken from layers["counts"] when present, else from X
        modality: "hic", "rna" and "atac" must hold whole numbers
        columns: the features whose counts are kept; library sizes are of all

    Raises:
        DataError: the file cannot be read, or its counts are negative, fractional, not finite or all zero
    """

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
        self._check_counts(source)
        self.obs_names: NDArray[np.str_] = obs.index.to_numpy().astype(str)
        labels = obs["batch"].astype(str) if "batch" in obs else np.full(self.n_cells, "0")
        self.batch_names, codes = np.unique(labels, return_inverse=True)
        self.batch: NDArray[np.int64] = codes.astype(np.int64)
        self.n_batches = len(self.batch_names)

    def read_obs(self) -> pd.DataFrame:
        """Read the table of cells; not kept."""
        from anndata.io import read_elem

        with open_h5ad(self.path) as file:
            obs: pd.DataFrame = read_elem(file["obs"])
        return obs

    def read_var(self) -> pd.DataFrame:
        """Read the table of features; not kept."""
        from anndata.io import read_elem

        with open_h5ad(self.path) as file:
            var: pd.DataFrame = read_elem(file["var"])
        return var

    def feature_names(self) -> list[str]:
        """Read the feature names in file order; not kept, since a Hi-C modality has a million of them."""
        with open_h5ad(self.path) as file:
            return read_strings(names_of(file["var"]))

    @property
    def share(self) -> float:
        """Share of the counts that are not zero."""
        return float(self.counts.nnz / np.prod(self.counts.shape, dtype=np.float64))

    def rows(self, indices: NDArray[np.int64], *, sparse: bool = False) -> CellRows:
        """Return some rows of the file as tensors, in the given order, repeats allowed; x as `SparseCounts` if
        `sparse`."""
        counts = self.counts[indices]
        return CellRows(
            x=SparseCounts.from_csr(counts) if sparse else torch.from_numpy(counts.toarray()),
            library=torch.from_numpy(self.contacts[indices].astype(np.float32)[:, None]),
            batch=torch.from_numpy(self.batch[indices]),
            index=torch.from_numpy(np.array(indices, dtype=np.int64)),
        )

    def _check_counts(self, source: str) -> None:
        where = f"{self.path}, {source}"
        fault = fault_of_counts(self.counts.data, whole=self.modality in COUNT_MODALITIES)
        if fault:
            raise DataError(
                f"{where}: found {fault[0]} values, e.g. {fault[1]!r}; raw counts are needed, "
                "store them in layers['counts']"
            )
        if not self.contacts.any():
            raise DataError(f"{where}: none of its {self.n_cells!r} cells has a count; drop this modality")


class MultiModalDataset(Dataset[Batch]):
    """Data set of several modalities whose item is the batch of a whole step; x of modalities in `sparse` is
    `SparseCounts`."""

    def __init__(self, tables: Mapping[str, CellTable], *, sparse: Collection[str] = ()) -> None:
        self.tables = dict(tables)
        self.sparse = frozenset(sparse)

    def __getitem__(self, step: StepIndices) -> Batch:
        return {modality: self._cells(modality, rows, step.draw_key) for modality, rows in step.rows.items()}

    def _cells(self, modality: str, rows: NDArray[np.int64], draw_key: int) -> CellBatch:
        draw = torch.from_numpy(draw_keys(draw_key, modality, rows))
        cells = self.tables[modality].rows(rows, sparse=modality in self.sparse)
        return CellBatch(**cells, draw=draw)
