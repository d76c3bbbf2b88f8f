"""Rewrites the matrices of a prepared h5ad as CSC, of which a rank can read a range of columns alone."""

from itertools import pairwise
from pathlib import Path

import numpy as np

from lightning_amp.data.files.new_hdf5 import new_hdf5
from lightning_amp.data.files.read_columns import read_columns
from lightning_amp.data.files.read_h5ad import open_h5ad, shape_of
from lightning_amp.data.files.write_h5ad import PACKED

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
