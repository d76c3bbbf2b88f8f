"""Create HDF5 files, h5ad and cooler's, on a disk that may run full, without a crash.

libhdf5 (2.0 too) frees a chunked data set whose last write fails and keeps its identifier. Closing it is a segmentation
fault: a file that h5py or cooler opens by name kills the process on a full disk. So HDF5 writes through a Python file
that accepts everything. After a write has failed, the next ones are kept in memory; they are few, because callers check
after each write. A .scool of 4 cells with 3.6 million pixels each takes cooler 4.6 s and this 2.7 s.

Pixels are bin1_id, bin2_id (not below bin1_id) and count, sorted by both.
"""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
from pandas.api.types import infer_dtype
from scipy import sparse


@contextmanager
def new_hdf5(path: Path) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Yield a new HDF5 file, and a check that raises the error of the first write that has failed.

    The caller removes the file after an error.
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
            # the position moves on as if it had been written: HDF5 relies on that
            self._later.append((self.tell(), bytes(rest)))
            self.seek(len(rest), io.SEEK_CUR)
        return n_bytes

    def readinto(self, buffer: Any) -> int:
        """Read what has been written, zeros where nothing was."""
        view, start = memoryview(buffer).cast("B"), self.tell()
        n_read = super().readinto(view) or 0
        # HDF5 takes a short read for a damaged file, and what was to be written there may be among `_later` below
        view[n_read:] = bytes(len(view) - n_read)
        # HDF5 reads its own metadata back, also what did not get to the disk
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
    write_elem(file, "obs", _with_categories(obs))
    write_elem(file, "var", _with_categories(var))
    write_elem(file, "uns", uns)
    for name in ("layers", "obsm", "obsp", "varm", "varp"):
        if name not in file:
            write_elem(file, name, {})


def _with_categories(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose text is categories where some is missing, as `AnnData.write_h5ad` has it."""
    found = table.copy()
    for name, column in table.items():
        text = column.astype(object) if isinstance(column.dtype, pd.StringDtype) else column
        # other columns, such as numbers, have a value of their type for what is missing
        if text.dtype == object and text.isna().any() and infer_dtype(text, skipna=True) in ("string", "empty"):
            text = pd.Categorical(text)
        found[name] = text
    return found


COOLER_PACKED: dict[str, Any] = {"compression": "gzip", "compression_opts": 6, "shuffle": True}
URL = "https://github.com/open2c/cooler"
UNKNOWN_ASSEMBLY = "unknown"


@contextmanager
def new_scool(
    path: Path,
    bins: pd.DataFrame,  # chrom, start, end, in the order of the genome
    *,
    n_cells: int,
    assembly: str = UNKNOWN_ASSEMBLY,
) -> Iterator[Callable[[str, pd.DataFrame], None]]:
    """Yield a function that adds a cell, its name and pixels, to a .scool with one bin table for all cells."""
    about = _about(bins, assembly)
    with new_hdf5(path) as (file, check):
        _write_bins(file, bins)
        file.attrs.update(about | {"format": "HDF5::SCOOL", "format-version": 1, "ncells": n_cells})

        def add(name: str, pixels: pd.DataFrame) -> None:
            group = file.create_group(f"cells/{name}")
            # hard links: all cells share one bin table
            group["chroms"] = file["chroms"]
            for column in ("chrom", "start", "end"):
                group[f"bins/{column}"] = file[f"bins/{column}"]
            _write_pixels(group, pixels, about)
            check()

        yield add


def write_scool(
    path: Path,
    bins: pd.DataFrame,
    cells: Iterable[tuple[str, pd.DataFrame]],  # name and pixels of each cell
    *,
    n_cells: int,
    assembly: str = UNKNOWN_ASSEMBLY,
) -> None:
    """Write a .scool, with one cell in memory at a time."""
    with new_scool(path, bins, n_cells=n_cells, assembly=assembly) as add:
        for name, pixels in cells:
            add(name, pixels)


def write_cool(
    path: Path,
    bins: pd.DataFrame,  # chrom, start, end, in the order of the genome
    pixels: pd.DataFrame,
    *,
    assembly: str = UNKNOWN_ASSEMBLY,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a .cool of one map, without balancing weights."""
    with new_hdf5(path) as (file, _):
        _write_bins(file, bins)
        _write_pixels(file, pixels, _about(bins, assembly, metadata))


def is_fixed(bins: pd.DataFrame) -> bool:
    """Return whether bins have one width, except the last of a chromosome, and leave nothing out."""
    widths = bins["end"] - bins["start"]
    full = (widths == widths.max()) | (bins["chrom"] != bins["chrom"].shift(-1))
    placed = bins["start"] == bins.groupby("chrom", sort=False).cumcount() * widths.max()
    return bool((full & placed).all())


def _write_bins(group: Any, bins: pd.DataFrame) -> None:
    chroms = bins.groupby("chrom", sort=False)["end"].max()
    _put(group, "chroms/name", chroms.index.to_numpy().astype("S"))
    _put(group, "chroms/length", chroms.to_numpy(np.int32))
    codes = pd.Categorical(bins["chrom"], chroms.index).codes
    numbers = h5py.enum_dtype({name: i for i, name in enumerate(chroms.index)}, basetype=np.int32)
    _put(group, "bins/chrom", codes.astype(np.int32), dtype=numbers)
    for name in ("start", "end"):
        _put(group, f"bins/{name}", bins[name].to_numpy(np.int32))


def _write_pixels(group: Any, pixels: pd.DataFrame, about: dict[str, Any]) -> None:
    for name in ("bin1_id", "bin2_id", "count"):
        _put(group, f"pixels/{name}", pixels[name].to_numpy())
    first = np.searchsorted(pixels["bin1_id"].to_numpy(), np.arange(about["nbins"] + 1))
    _put(group, "indexes/bin1_offset", first)
    offsets = np.searchsorted(group["bins/chrom"][:], np.arange(about["nchroms"] + 1))
    _put(group, "indexes/chrom_offset", offsets)
    kind = {"format": "HDF5::Cooler", "format-version": 3, "storage-mode": "symmetric-upper"}
    group.attrs.update(about | kind | {"nnz": len(pixels), "sum": float(pixels["count"].sum())})


def _put(group: Any, name: str, values: Any, dtype: Any = None) -> None:
    group.create_dataset(name, data=values, dtype=dtype, maxshape=values.shape, **COOLER_PACKED)


def _about(bins: pd.DataFrame, assembly: str, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the attributes that a file shares with its cells."""
    fixed = is_fixed(bins)
    return {
        "nchroms": bins["chrom"].nunique(),
        "nbins": len(bins),
        "bin-type": "fixed" if fixed else "variable",
        "bin-size": int((bins["end"] - bins["start"]).max()) if fixed else "null",
        "genome-assembly": assembly,
        "metadata": json.dumps(metadata or {}),
        "format-url": URL,
        "generated-by": "lightning-amp",
        "creation-date": datetime.now(UTC).replace(tzinfo=None).isoformat(),
    }
