"""Stores the matrices of a prepared h5ad as CSC, so that a rank reads its own columns and no others."""

from pathlib import Path

import h5py
import numpy as np

from lightning_amp.data.files.h5ad_header import shape_of
from lightning_amp.data.files.hdf5 import open_h5ad
from lightning_amp.data.files.new_hdf5 import new_hdf5
from lightning_amp.data.files.read_columns import BLOCK, read_columns
from lightning_amp.data.files.write_h5ad import CHUNK

MOST = 2**26
"""Entries of columns that are turned together."""


def store_by_columns(path: Path) -> None:
    """Store X and the layers of an h5ad as CSC; they are float32 CSR, and the rest of the file stays.

    The file is read once for every `MOST` entries, so that memory does not grow with it.
    """
    aside = path.with_name(f"{path.name}.columns")
    with open_h5ad(path) as source, new_hdf5(aside) as (file, check):
        file.attrs.update(source.attrs)
        for name in source:
            if name not in ("X", "layers"):
                source.copy(name, file)
        file.create_group("layers").attrs.update(source["layers"].attrs)
        for name in ("X", *(f"layers/{layer}" for layer in source["layers"])):
            _turn(path, source[name], file.create_group(name))
            check()
    aside.replace(path)


def _turn(path: Path, rows: h5py.Group, columns: h5py.Group) -> None:
    shape, n = shape_of(rows), len(rows["data"])
    lengths = np.zeros(shape[1], np.int64)
    for first in range(0, n, BLOCK):
        lengths += np.bincount(rows["indices"][first : first + BLOCK], minlength=shape[1])
    ends = np.concatenate([[0], np.cumsum(lengths)])
    columns.attrs.update(rows.attrs)
    columns.attrs["encoding-type"] = "csc_matrix"
    columns.create_dataset("indptr", data=ends.astype(np.int32 if n < 2**31 else np.int64))
    for name in ("data", "indices"):
        columns.create_dataset(
            name,
            shape=(n,),
            dtype=rows[name].dtype,
            chunks=(min(CHUNK, n),),
            compression=rows[name].compression,
            compression_opts=rows[name].compression_opts,
            shuffle=rows[name].shuffle,
        )
    first = 0
    while first < shape[1]:
        stop = max(first + 1, int(np.searchsorted(ends, ends[first] + MOST, side="right")) - 1)
        found = read_columns(path, rows.name, slice(first, stop)).tocsc()
        columns["data"][ends[first] : ends[stop]] = found.data
        columns["indices"][ends[first] : ends[stop]] = found.indices
        first = stop
