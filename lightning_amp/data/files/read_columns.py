"""Reads a range of columns of the matrix of an h5ad, in memory proportional to their entries; stores h5ad so as CSC.

Of CSC and dense matrices only these columns are read; CSR is read whole, a few rows at a time.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from lightning_amp.data.files.new_hdf5 import PACKED, new_hdf5
from lightning_amp.data.files.read_h5ad import open_h5ad, shape_of

MOST = 2**26
"""About how many entries are in memory at a time."""


def store_by_columns(path: Path) -> None:
    """Store X and the layers of an h5ad, which are float32 CSR, as CSC; reads it once for every `MOST` entries."""
    from anndata.io import sparse_dataset, write_elem

    aside = path.with_name(f"{path.name}.columns")
    with open_h5ad(path) as source, new_hdf5(aside) as (file, check):
        file.attrs.update(source.attrs)
        for name in source.keys() - {"X"}:
            source.copy(name, file)
        for name in ("X", *(f"layers/{layer}" for layer in source["layers"])):
            runs = -(-len(source[name]["data"]) // MOST)
            ends = np.linspace(0, shape_of(source[name])[1], runs + 1, dtype=int).tolist()
            for first, stop in pairwise(ends):
                part = read_columns(path, name, slice(first, stop)).tocsc()
                part.indptr = part.indptr.astype(np.int64)
                if first:
                    sparse_dataset(file[name]).append(part)
                else:
                    write_elem(file, name, part, dataset_kwargs=PACKED)
                check()
    aside.replace(path)


BLOCK = 2**19
"""Number of entries that are read together."""


def read_columns(path: Path, source: str, columns: slice) -> sparse.csr_matrix:
    """Read a range of columns of all cells as CSR of [cell, own column], float32.

    Args:
        path: The h5ad.
        source: Path of the matrix in the file, such as "X" or "layers/counts".
        columns: The columns, as whole numbers from the first to one past the last.

    Raises:
        DataError: The file cannot be read.
    """
    with open_h5ad(path) as file:
        if is_by_columns(file[source]):
            from anndata.io import sparse_dataset

            found = sparse_dataset(file[source])[:, columns].astype(np.float32, copy=False).tocsr()
        else:
            found = sparse.vstack(list(_blocks_of_rows(file[source], columns)), format="csr")
    found.sum_duplicates()
    return found


def read_totals(path: Path, source: str) -> NDArray[np.float64]:
    """Sum the matrix of an h5ad over its columns, [cell]; exact for whole numbers, and no entry is kept."""
    with open_h5ad(path) as file:
        matrix = file[source]
        n_cells, n_features = shape_of(matrix)
        if not is_by_columns(matrix):
            blocks = _blocks_of_rows(matrix, slice(0, n_features))
            return np.concatenate([np.asarray(b.sum(axis=1, dtype=np.float64)).ravel() for b in blocks])
        totals = np.zeros(n_cells)
        for start in range(0, len(matrix["data"]), BLOCK):
            own = slice(start, start + BLOCK)
            totals += np.bincount(matrix["indices"][own], matrix["data"][own], minlength=n_cells)
    return totals


def is_by_columns(matrix: Any) -> bool:
    """Whether a matrix is stored as CSC."""
    return isinstance(matrix, h5py.Group) and matrix.attrs["encoding-type"] == "csc_matrix"


def _blocks_of_rows(matrix: Any, columns: slice) -> Iterator[sparse.csr_matrix]:
    """Yield some columns of a dense or CSR matrix, as CSR, a few rows at a time."""
    n_rows = shape_of(matrix)[0]
    if isinstance(matrix, h5py.Dataset):
        step = max(1, BLOCK // (columns.stop - columns.start))
        for row in range(0, n_rows, step):
            yield sparse.csr_matrix(matrix[row : row + step, columns], dtype=np.float32)
        return
    # imported late: cells in memory need no reader of files
    from anndata.io import sparse_dataset

    stored, ends, row = sparse_dataset(matrix), matrix["indptr"][:], 0
    while row < n_rows:
        stop = max(row + 1, int(np.searchsorted(ends, ends[row] + BLOCK, side="right")) - 1)
        yield stored[row:stop].astype(np.float32, copy=False)[:, columns]
        row = stop
