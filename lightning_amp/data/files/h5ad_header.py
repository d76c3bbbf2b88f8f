"""The sizes of a modality's h5ad, read without its matrix."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_amp.data.files.hdf5 import index_of, open_h5ad, read_factor
from lightning_amp.errors import DataError

DEPTH_COLUMNS = ("depth", "read_depth", "n_counts")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModalityHeader:
    """What an h5ad says about itself.

    Attributes:
        n_nonzero: Stored values of the raw counts, or None when they are stored densely.
        has_counts_layer: Whether raw counts lie in layers["counts"]; otherwise they are X.
        depth: Contacts per cell, float64 of shape [cell], or None.
        n_batches: Experimental batches among the cells, 1 without a column `batch`.
    """

    path: Path
    n_cells: int
    n_features: int
    n_nonzero: int | None
    has_counts_layer: bool
    depth: NDArray[np.float64] | None
    n_batches: int


def read_header(h5ad_path: str | Path) -> ModalityHeader:
    """Read the header of an h5ad.

    Raises:
        DataError: No h5ad, or a matrix whose shape disagrees with obs and var.
    """
    path = Path(h5ad_path)
    with open_h5ad(path) as file:
        n_cells, n_features = len(index_of(file["obs"])), len(index_of(file["var"]))
        has_layer = "layers" in file and "counts" in file["layers"]
        matrix = file["layers/counts"] if has_layer else file.get("X")
        if matrix is None:
            raise DataError(
                f"{path}: neither X nor layers['counts'] found; write raw counts into one of them"
            )
        shape = shape_of(matrix)
        if shape != (n_cells, n_features):
            raise DataError(
                f"{path}: {matrix.name!r} has shape {shape!r} but obs and var have "
                f"{(n_cells, n_features)!r}; the file is damaged, write it again"
            )
        column = next((c for c in DEPTH_COLUMNS if _is_numeric(file["obs"].get(c))), None)
        return ModalityHeader(
            path=path,
            n_cells=n_cells,
            n_features=n_features,
            n_nonzero=int(matrix["indptr"][-1]) if isinstance(matrix, h5py.Group) else None,
            has_counts_layer=has_layer,
            depth=None if column is None else file["obs"][column][:].astype(np.float64),
            n_batches=_count_batches(file["obs"].get("batch")),
        )


def shape_of(matrix: Any) -> tuple[int, ...]:
    """Return the shape of a dense or sparse matrix; h5sparse wrote another attribute before anndata 0.7."""
    if isinstance(matrix, h5py.Dataset):
        return tuple(int(n) for n in matrix.shape)
    return tuple(int(n) for n in matrix.attrs.get("shape", matrix.attrs.get("h5sparse_shape", ())))


def _is_numeric(column: Any) -> bool:
    return isinstance(column, h5py.Dataset) and bool(np.issubdtype(column.dtype, np.number))


def _count_batches(column: Any) -> int:
    return 1 if column is None else len(np.unique(read_factor(column)[0]))
