"""Reads some columns of the matrix of an h5ad, in memory that falls with the columns.

    CSC      the entries of the own columns are read, and no others
    CSR      every entry is read, a few rows at a time, and those of other columns are dropped
    dense    the own columns are read, a few rows at a time

No temporary is larger than `BLOCK` entries or one row, one column.
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
"""Entries that are read together."""


def read_columns(path: Path, source: str, columns: slice) -> sparse.csr_matrix:
    """Read some columns of all cells as CSR of [cell, own column], float32.

    Args:
        path: The h5ad.
        source: Where in it the matrix lies, such as "X" or "layers/counts".
        columns: The first and one past the last.

    Raises:
        DataError: The file cannot be read.
    """
    with open_h5ad(path) as file:
        matrix = file[source]
        if is_by_columns(matrix):
            return _of_columns(matrix, columns)
        # of the entries that are not written no page is ever taken
        shape, n = shape_of(matrix), 0
        most = len(matrix["data"]) if isinstance(matrix, h5py.Group) else shape[0] * _width(columns)
        data, indices = np.empty(most, np.float32), np.empty(most, np.int32)
        lengths = []
        for _, block in _blocks(matrix, columns):
            own = block if isinstance(matrix, h5py.Dataset) else block[:, columns]
            data[n : n + own.nnz], indices[n : n + own.nnz] = own.data, own.indices
            lengths.append(np.diff(own.indptr))
            n += own.nnz
        indptr = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return _csr(data[:n], indices[:n], indptr, (shape[0], _width(columns)))


def read_totals(path: Path, source: str) -> NDArray[np.float64]:
    """Sum the matrix of an h5ad over all its columns, [cell]; every entry is read, and none is kept.

    Exact for whole numbers; fractions are added up in the order of the file.
    """
    with open_h5ad(path) as file:
        matrix = file[source]
        shape = shape_of(matrix)
        totals, by_columns = np.zeros(shape[0]), is_by_columns(matrix)
        for first, block in _blocks(matrix, slice(0, shape[1])):
            rows = slice(None) if by_columns else slice(first, first + block.shape[0])
            totals[rows] += np.asarray(block.sum(axis=1, dtype=np.float64)).ravel()
    return totals


def is_by_columns(matrix: Any) -> bool:
    """Whether a matrix is stored as CSC."""
    from anndata.io import sparse_dataset

    return isinstance(matrix, h5py.Group) and sparse_dataset(matrix).format == "csc"


def _width(columns: slice) -> int:
    return int(columns.stop - columns.start)


def _of_columns(matrix: Any, columns: slice) -> sparse.csr_matrix:
    """Of a CSC matrix, of which the rows are counted first, so that both forms are never whole in memory."""
    shape = (shape_of(matrix)[0], _width(columns))
    lengths = np.zeros(shape[0], np.int64)
    for _, block in _blocks(matrix, columns):
        lengths += np.diff(block.tocsr().indptr)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    data, indices, place = (
        np.empty(indptr[-1], np.float32),
        np.empty(indptr[-1], np.int32),
        indptr[:-1].copy(),
    )
    for first, block in _blocks(matrix, columns):
        rows = block.tocsr()
        each = np.diff(rows.indptr)
        where = np.arange(rows.nnz) + np.repeat(place - rows.indptr[:-1], each)
        data[where], indices[where] = rows.data, rows.indices + (first - columns.start)
        place += each
    return _csr(data, indices, indptr, shape)


def _csr(data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> sparse.csr_matrix:
    found = sparse.csr_matrix(shape, dtype=np.float32)
    # set, for the constructor looks at all indices and copies what it makes narrower
    found.data, found.indices = data, indices
    found.indptr = indptr.astype(np.int32 if indptr[-1] < 2**31 else np.int64)
    found.has_canonical_format = True
    return found


def _blocks(matrix: Any, columns: slice) -> Iterator[tuple[int, Any]]:
    """Blocks of a matrix with their first column if it is CSC, else their first row; of CSR with all columns."""
    if isinstance(matrix, h5py.Dataset):
        step = max(1, BLOCK // max(1, _width(columns)))
        for first in range(0, matrix.shape[0], step):
            yield first, sparse.csr_matrix(matrix[first : first + step, columns], dtype=np.float32)
        return
    # late: cells that are made in memory need no reader of files
    from anndata.io import sparse_dataset

    stored, by_columns = sparse_dataset(matrix), is_by_columns(matrix)
    ends = matrix["indptr"][:]
    last, first = (columns.stop, columns.start) if by_columns else (len(ends) - 1, 0)
    while first < last:
        full = int(np.searchsorted(ends, ends[first] + BLOCK, side="right")) - 1
        stop = min(max(first + 1, full), last)
        block = stored[:, first:stop] if by_columns else stored[first:stop]
        block = block.astype(np.float32, copy=False)
        block.sum_duplicates()
        yield first, block
        first = stop
