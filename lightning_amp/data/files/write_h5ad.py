"""Writes h5ad files, with a sparse matrix that is written a few cells at a time."""

from typing import Any

import numpy as np
import pandas as pd
from scipy import sparse

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
