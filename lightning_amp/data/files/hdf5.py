"""HDF5 access for readers that must not touch the matrix: opening, and columns of an h5ad's obs and var.

Uses h5py only: it starts faster than anndata, reads slices, and never loads what was not asked for.
Known limit: of the column encodings, plain, categorical (both layouts) and nullable arrays are read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_amp.errors import DataError


@contextmanager
def open_hdf5(path: Path, *, what: str) -> Iterator[Any]:
    """Open an HDF5 file for reading and yield it; messages call it `what`.

    Raises:
        DataError: The file is absent, not HDF5, truncated, or a read from it fails.
    """
    if not path.is_file():
        found = "a directory" if path.is_dir() else "nothing"
        raise DataError(f"{path}: asked for a {what}, found {found}; give the path of an existing file")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        if not h5py.is_hdf5(path):
            with path.open("rb") as raw:
                start = raw.read(8)
            raise DataError(
                f"{path}: asked for a {what}, which is HDF5; found a file that starts with {start!r}"
            ) from error
        raise DataError(f"{path}: the {what} is truncated or damaged ({error}); copy it again") from error
    with file:
        try:
            yield file
        except OSError as error:
            raise DataError(f"{path}: the {what} is damaged ({error}); copy it again") from error


@contextmanager
def open_h5ad(path: Path) -> Iterator[Any]:
    """Open an h5ad and yield the file, once it is known to have obs and var as groups.

    Raises:
        DataError: The file cannot be opened, is no h5ad, or was written by anndata < 0.7.
    """
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


def index_of(frame: Any) -> Any:
    """Return the data set that holds the index (names) of an obs or var group."""
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


def read_factor(column: Any) -> tuple[NDArray[np.int64], list[str]]:
    """Return codes [row] and labels of a text column, however anndata encoded it; missing values have code -1."""
    if isinstance(column, h5py.Group) and "codes" in column:
        return column["codes"][:].astype(np.int64), read_strings(column["categories"])
    if isinstance(column, h5py.Dataset) and "categories" in column.attrs:  # anndata 0.7
        categories = column.file[column.attrs["categories"]]
        return column[:].astype(np.int64), read_strings(categories)
    values = column["values"] if isinstance(column, h5py.Group) else column
    number: dict[Any, int] = {}
    codes = np.fromiter((number.setdefault(v, len(number)) for v in values[:]), np.int64, len(values))
    return codes, [v.decode() if isinstance(v, bytes) else str(v) for v in number]


def is_integer(column: Any) -> bool:
    """Tell whether a column is a plain data set of integers (and not the codes of an old categorical)."""
    plain = isinstance(column, h5py.Dataset) and "categories" not in column.attrs
    return plain and bool(np.issubdtype(column.dtype, np.integer))
