"""Create HDF5 and h5ad files on a disk that may run full, without a crash.

libhdf5 (2.0 too) frees a chunked data set whose last write fails and keeps its identifier. Closing it is a segmentation
fault: a file that h5py or cooler opens by name kills the process on a full disk. So HDF5 writes through a Python file
that accepts everything. After a write has failed, the next ones are kept in memory; they are few, because callers check
after each write.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
from scipy import sparse


@contextmanager
def new_hdf5(path: Path) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Yield a new HDF5 file, and a check that raises the error of the first write that has failed.

    The caller removes the file after an error.

    Raises:
        OSError: Not all could be written, such as on a full disk.
    """
    with _Patient(path) as raw:
        with h5py.File(raw, "w") as file:
            yield file, raw.check
        raw.check()


class _Patient(io.FileIO):
    """A file whose writes never fail; `check` raises the error of the first one that did. Unbuffered."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self._later: list[tuple[int, bytes]] = []
        self.error: OSError | None = None

    def check(self) -> None:
        """Raise the error of the first write that has failed."""
        if self.error is not None:
            raise self.error

    def write(self, data: Any) -> int:
        """Write to the file, after an error to memory."""
        rest = memoryview(data).cast("B")
        n_bytes = len(rest)
        try:
            while rest and self.error is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.error = error
        if rest:
            self._later.append((self.tell(), bytes(rest)))
            self.seek(len(rest), io.SEEK_CUR)
        return n_bytes

    def readinto(self, buffer: Any) -> int:
        """Read what has been written, zeros where nothing was."""
        view, start = memoryview(buffer).cast("B"), self.tell()
        n_read = super().readinto(view) or 0
        view[n_read:] = bytes(len(view) - n_read)
        for at, data in self._later:
            low, high = max(at, start), min(at + len(data), start + len(view))
            if low < high:
                view[low - start : high - start] = data[low - at : high - at]
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the file's length."""
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = self.error or error
            return self.tell()


PACKED: dict[str, Any] = {"chunks": (65_536,), "shuffle": True, "compression": "gzip", "compression_opts": 1}
"""How sparse matrices are stored."""


def start_matrix(file: Any, n_features: int) -> Any:
    """Write X without cells to an open h5py file, and return anndata's sparse data set; `append` adds cells to it."""
    from anndata.io import sparse_dataset, write_elem

    empty = sparse.csr_matrix((0, n_features), dtype=np.float32)
    empty.indptr = empty.indptr.astype(np.int64)  # a file may have more entries than int32 counts
    write_elem(file, "X", empty, dataset_kwargs=PACKED)
    return sparse_dataset(file["X"])


def write_annotations(file: Any, *, obs: pd.DataFrame, var: pd.DataFrame, uns: dict[str, Any]) -> None:
    """Write everything of an h5ad but X and layers to the open h5py file."""
    from anndata.io import write_elem

    file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
    write_elem(file, "obs", obs)
    write_elem(file, "var", var)
    write_elem(file, "uns", uns)
    for name in ("layers", "obsm", "obsp", "varm", "varp"):
        if name not in file:
            write_elem(file, name, {})
