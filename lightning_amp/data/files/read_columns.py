"""Reads some columns of the matrix of an h5ad, in memory proportional to the columns.

From CSC and dense matrices only these columns are read; from CSR every entry is, a few rows at a time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from lightning_amp.data.files.h5ad_header import shape_of
from lightning_amp.data.files.hdf5 import open_h5ad

BLOCK = 2**19
"""Number of entries that are read together."""


def read_columns(path: Path, source: str, columns: slice) -> sparse.csr_matrix:
    """Read some columns of all cells as CSR of [cell, own column], float32.

    Args:
        path: The h5ad.
        source: Path of the matrix in the file, such as "X" or "layers/counts".
        columns: The columns, as whole numbers from the first to one past the last.

    Raises:
        DataError: The file cannot be read.
    """
    with open_h5ad(path) as file:
        matrix = file[source]
        found = sparse.csr_matrix((shape_of(matrix)[0], columns.stop - columns.start), dtype=np.float32)
        lengths, by_columns, n = np.zeros(found.shape[0], np.int64), is_by_columns(matrix), 0
        if by_columns:
            # counted first, so that the entries are never in memory twice
            for _, _, block in _blocks(matrix, columns):
                lengths += np.diff(block.indptr)
            most = int(lengths.sum())
        else:
            most = len(matrix["data"]) if isinstance(matrix, h5py.Group) else int(np.prod(found.shape))
        place = np.cumsum(lengths) - lengths
        # pages that nothing is written to take no memory
        data, indices = np.empty(most, np.float32), np.empty(most, np.int32)
        for row, column, block in _blocks(matrix, columns):
            each, where = np.diff(block.indptr), np.arange(n, n + block.nnz)
            if by_columns:
                where += np.repeat(place - block.indptr[:-1], each) - n
                place += each
            else:
                lengths[row : row + len(each)] = each
            data[where], indices[where] = block.data, block.indices + column
            n += block.nnz
    ends = np.concatenate([[0], np.cumsum(lengths)])
    # set here, because the constructor checks all indices
    found.data, found.indices, found.has_canonical_format = data[:n], indices[:n], True
    found.indptr = ends.astype(np.int32 if n < 2**31 else np.int64)
    return found


def read_totals(path: Path, source: str) -> NDArray[np.float64]:
    """Sum the matrix of an h5ad over its columns, [cell]; exact for whole numbers, and no entry is kept."""
    with open_h5ad(path) as file:
        n_cells, n_features = shape_of(file[source])
        totals = np.zeros(n_cells)
        for row, _, block in _blocks(file[source], slice(0, n_features)):
            totals[row : row + block.shape[0]] += np.asarray(block.sum(axis=1, dtype=np.float64)).ravel()
    return totals


def is_by_columns(matrix: Any) -> bool:
    """Whether a matrix is stored as CSC."""
    # imported late: cells in memory need no reader of files
    from anndata.io import sparse_dataset

    return isinstance(matrix, h5py.Group) and sparse_dataset(matrix).format == "csc"


def _blocks(matrix: Any, columns: slice) -> Iterator[tuple[int, int, Any]]:
    """CSR blocks of the own columns, with the first row and the first own column of each."""
    if isinstance(matrix, h5py.Dataset):
        step = max(1, BLOCK // (columns.stop - columns.start))
        for row in range(0, matrix.shape[0], step):
            yield row, 0, sparse.csr_matrix(matrix[row : row + step, columns], dtype=np.float32)
        return
    from anndata.io import sparse_dataset

    stored, by_columns, ends = sparse_dataset(matrix), is_by_columns(matrix), matrix["indptr"][:]
    first, last = (columns.start, columns.stop) if by_columns else (0, len(ends) - 1)
    # a block of columns has all cells, whose number of entries is worked out anew for each
    most = max(BLOCK, 4 * shape_of(matrix)[0]) if by_columns else BLOCK
    while first < last:
        stop = min(max(first + 1, int(np.searchsorted(ends, ends[first] + most, side="right")) - 1), last)
        block = (stored[:, first:stop] if by_columns else stored[first:stop]).astype(np.float32, copy=False)
        block.sum_duplicates()
        yield (0, first - columns.start, block.tocsr()) if by_columns else (first, 0, block[:, columns])
        first = stop
