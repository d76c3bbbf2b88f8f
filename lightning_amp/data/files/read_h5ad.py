"""Open text and h5ad files; read sizes, names and columns without the whole matrix; find values that are no counts.

Not by `anndata.read_h5ad(backed="r")`, which reads the whole `var`: of 3.6 million Hi-C features this takes 4.7 s and
950 MiB, against 1.1 s and 250 MiB for the columns that are needed. Of CSC and dense matrices only some columns are
read; CSR is read whole, a few rows at a time.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

import h5py
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import is_numeric_dtype
from scipy import sparse

from lightning_amp.data.files.new_hdf5 import PACKED, new_hdf5
from lightning_amp.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"
DEPTH_COLUMNS = ("depth", "read_depth", "n_counts")


@contextmanager
def open_hdf5(path: Path, *, what: str) -> Iterator[Any]:
    """Open an HDF5 file for reading and yield it; messages call it `what`."""
    if not path.is_file():
        found = "a directory" if path.is_dir() else "nothing"
        raise DataError(f"{path}: expected a {what}, found {found}; give the path of an existing file")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        # a file of another kind needs other advice than a damaged one
        if not h5py.is_hdf5(path):
            with path.open("rb") as raw:
                start = raw.read(8)
            found = f"a file that starts with {start!r}"
            if start.startswith(GZIP_MAGIC):
                found = f"a file that is compressed with gzip; decompress it first: gunzip {path}"
            raise DataError(f"{path}: expected a {what}, which is HDF5; found {found}") from error
        raise DataError(f"{path}: the {what} is truncated or damaged ({error}); copy it again") from error
    with file:
        try:
            yield file
        except OSError as error:
            raise DataError(f"{path}: the {what} is damaged ({error}); copy it again") from error


@contextmanager
def open_h5ad(path: Path) -> Iterator[Any]:
    """Open an h5ad and yield the file, after a check that obs and var are groups."""
    with open_hdf5(path, what="h5ad file") as file:
        for name in ("obs", "var"):
            if isinstance(file.get(name), h5py.Dataset):
                raise DataError(
                    f"{path}: {name!r} is a compound data set, as anndata before 0.7 wrote it; read and "
                    "write the file once with a current anndata"
                )
            if name not in file:
                raise DataError(
                    f"{path}: an h5ad has groups 'obs' and 'var', found {sorted(file)!r}; give a file "
                    "written by anndata"
                )
        yield file


def names_of(frame: Any) -> Any:
    """Return the data set with the names (index) of an obs or var group."""
    found = frame.get(str(frame.attrs.get("_index", "_index")))
    if found is None:
        raise DataError(
            f"{frame.file.filename}: {frame.name!r} names no index column, found columns {sorted(frame)!r}; "
            "write the file again with anndata"
        )
    return found["values"] if isinstance(found, h5py.Group) else found


def read_strings(dataset: Any, *, start: int = 0, stop: int | None = None) -> list[str]:
    """Return a slice of a string data set as Python strings."""
    return [v.decode() if isinstance(v, bytes) else str(v) for v in dataset[start:stop]]


def shape_of(matrix: Any) -> tuple[int, int]:
    """Return the shape of a dense or sparse matrix."""
    n_rows, n_columns = matrix.shape if isinstance(matrix, h5py.Dataset) else matrix.attrs["shape"]
    return int(n_rows), int(n_columns)


def first_column(table: pd.DataFrame, names: Iterable[str], default: str) -> pd.Series:
    """Return the first of some columns that a table has, with the default where there is no value, or no column."""
    found = next((table[name].astype(object) for name in names if name in table), None)
    return pd.Series(default, table.index) if found is None else found.where(found.notna(), default)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModalityHeader:
    """Sizes of an h5ad."""

    path: Path
    n_cells: int
    n_features: int
    n_nonzero: int | None  # stored values of the raw counts, or None when they are stored densely
    has_counts_layer: bool  # whether raw counts are in layers["counts"]; otherwise they are X
    depth: NDArray[np.float64] | None  # contacts per cell, float64 of shape [cell], or None
    n_batches: int  # experimental batches among the cells, 1 without a column `batch`


def read_header(h5ad_path: str | Path) -> ModalityHeader:
    """Read the header of an h5ad."""
    # imported late: it takes half a second
    from anndata.io import read_elem

    path = Path(h5ad_path)
    with open_h5ad(path) as file:
        obs, n_features = read_elem(file["obs"]), len(names_of(file["var"]))
        has_layer = "layers" in file and "counts" in file["layers"]
        matrix = file["layers/counts"] if has_layer else file.get("X")
        if matrix is None:
            raise DataError(f"{path}: neither X nor layers['counts'] found; write raw counts into one of them")
        shape = shape_of(matrix)
        if shape != (len(obs), n_features):
            raise DataError(
                f"{path}: {matrix.name!r} has shape {shape!r} but obs and var have "
                f"{(len(obs), n_features)!r}; the file is damaged, write it again"
            )
        column = next((name for name in DEPTH_COLUMNS if name in obs and is_numeric_dtype(obs[name])), None)
        return ModalityHeader(
            path=path,
            n_cells=len(obs),
            n_features=n_features,
            n_nonzero=int(matrix["indptr"][-1]) if isinstance(matrix, h5py.Group) else None,
            has_counts_layer=has_layer,
            depth=None if column is None else obs[column].to_numpy(np.float64),
            n_batches=obs["batch"].nunique(dropna=False) if "batch" in obs else 1,
        )


BLOCK = 2**24
"""Values that are checked at a time: the checks make temporary copies."""


def fault_of_counts(values: NDArray[Any], *, whole: bool = True) -> tuple[str, Any] | None:
    """Return the kind and an example of a value that is no raw count, or None; `whole`: fractions are a fault."""
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        faults = {"missing or infinite": ~np.isfinite(block), "negative": block < 0}
        if whole:
            faults["fractional"] = block != np.floor(block)
        for fault, wrong in faults.items():
            if wrong.any():
                return fault, block[wrong.argmax()].item()
    return None


@contextmanager
def open_stream(path: Path, *, what: str) -> Iterator[BinaryIO]:
    """Open a plain or gzip-compressed file for reading bytes; messages call it `what`."""
    if not path.is_file():
        found = "a directory" if path.is_dir() else "nothing"
        raise DataError(f"{path}: expected the {what}, found {found}; give the path of an existing file")
    try:
        with path.open("rb") as raw:
            compressed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            if not compressed:
                yield raw
                return
            with gzip.open(raw) as stream:
                yield cast(BinaryIO, stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: the compressed {what} is truncated or damaged ({error}); copy or download it again"
        ) from error


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
                # parts are appended: in the end there may be more entries than int32 counts
                part.indptr = part.indptr.astype(np.int64)
                if first:
                    sparse_dataset(file[name]).append(part)
                else:
                    write_elem(file, name, part, dataset_kwargs=PACKED)
                check()
    aside.replace(path)


BLOCK_ENTRIES = 2**19
"""Number of entries that are read together."""


def read_columns(path: Path, source: str, columns: slice) -> sparse.csr_matrix:
    """Read some columns of the matrix `source`, such as "X" or "layers/counts", as CSR [cell, own column], float32."""
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
        for start in range(0, len(matrix["data"]), BLOCK_ENTRIES):
            own = slice(start, start + BLOCK_ENTRIES)
            # the indices of CSC are cells
            totals += np.bincount(matrix["indices"][own], matrix["data"][own], minlength=n_cells)
    return totals


def is_by_columns(matrix: Any) -> bool:
    """Whether a matrix is stored as CSC."""
    return isinstance(matrix, h5py.Group) and matrix.attrs["encoding-type"] == "csc_matrix"


def _blocks_of_rows(matrix: Any, columns: slice) -> Iterator[sparse.csr_matrix]:
    """Yield some columns of a dense or CSR matrix, as CSR, a few rows at a time."""
    n_rows = shape_of(matrix)[0]
    if isinstance(matrix, h5py.Dataset):
        step = max(1, BLOCK_ENTRIES // (columns.stop - columns.start))
        for row in range(0, n_rows, step):
            yield sparse.csr_matrix(matrix[row : row + step, columns], dtype=np.float32)
        return
    # imported late: cells in memory need no reader of files
    from anndata.io import sparse_dataset

    stored, ends, row = sparse_dataset(matrix), matrix["indptr"][:], 0
    while row < n_rows:
        # as many whole rows as fit in a block, and one where a single row has more entries than that
        stop = max(row + 1, int(np.searchsorted(ends, ends[row] + BLOCK_ENTRIES, side="right")) - 1)
        yield stored[row:stop].astype(np.float32, copy=False)[:, columns]
        row = stop
