"""Draw predictions: cells in the plane, and the measured and expected contact map of a cell."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_amp import figures
from lightning_amp.data.describe_embedding import principal_components
from lightning_amp.data.files.strata_layout import FeatureLayout
from lightning_amp.data.files.write_results import bin_table
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.lightning.callbacks.collect_predictions import Embeddings

Labels = Mapping[str, NDArray[np.str_]]
"""Modality -> [cell]."""
MIN_UMAP_CELLS = 5
MAP_BINS = 300
"""Bins in the picture of a contact map; a whole genome would be a grey square."""


def project(embedding: NDArray[np.float32], *, method: str) -> tuple[NDArray[np.float64], tuple[str, str]]:
    """Return cells in the plane, and the names of its axes: too few cells for UMAP go by PCA.

    Args:
        embedding: [cell, dim]
        method: "pca" or "umap"

    Returns:
        [cell, 2] and the names, with the share of the variance where the axis is a principal component
    """
    if method == "pca" or len(embedding) < MIN_UMAP_CELLS:
        return _principal_plane(embedding.astype(np.float64))
    # late, for it compiles itself on import
    from umap import UMAP

    reducer = UMAP(n_neighbors=min(15, len(embedding) - 1), random_state=0, n_jobs=1)
    return np.asarray(reducer.fit_transform(embedding), dtype=np.float64), ("UMAP1", "UMAP2")


def _principal_plane(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], tuple[str, str]]:
    scores, variances = principal_components(x)
    shares = np.pad(variances, (0, 1)) / max(variances.sum(), np.finfo(np.float64).tiny)
    plane = np.pad(scores[:, :2], ((0, 0), (0, max(0, 2 - scores.shape[1]))))
    return plane, (_component(1, shares), _component(2, shares))


def _component(i: int, shares: NDArray[np.float64]) -> str:
    return f"PC{i} ({shares[i - 1]:.0%} of the variance)"


def draw_cells(
    path: Path, embeddings: Embeddings, labels: Mapping[str, Labels], *, projection: Literal["pca", "umap"]
) -> None:
    """Draw the cells of all modalities in the plane, once for each kind of label and once by modality.

    Args:
        path: the picture
        embeddings: modality -> [cell, dim]
        labels: heading of a panel -> modality -> [cell]
        projection: how the plane is chosen
    """
    together = np.concatenate(list(embeddings.values()))
    known = np.isfinite(together).all(axis=1)
    xy, axis_names = project(together[known], method=projection)
    by_modality = {name: np.full(len(values), name) for name, values in embeddings.items()}
    panels = {**labels, "modality": by_modality}
    shown = {
        heading: np.concatenate([of[modality] for modality in embeddings])[known].tolist()
        for heading, of in panels.items()
    }
    title = f"Embedding of {known.sum()} cells"
    figures.embedding(path, xy=xy, labels=shown, title=title, axis_names=axis_names)


def draw_maps(path: Path, cell: str, imputed: NDArray[np.float32], data: SingleCellDataModule) -> None:
    """Draw what was measured of one cell with what the model expects, at the coarsest resolution.

    There are no data of pairs of bins that are no features, and of bins that have no contact in any cell.
    """
    table = data.tables["hic"]
    assert data.layout is not None, "a data module with Hi-C cells has their layout"
    row = int(np.flatnonzero(table.obs_names == cell)[0])
    measured = table.counts[[row]].toarray()[0]
    maps = {"measured": _map(measured, data.layout), "expected by the model": _map(imputed, data.layout)}
    empty = np.nansum(_map(np.asarray(table.counts.sum(axis=0)).ravel(), data.layout), axis=0) == 0
    for contacts in maps.values():
        contacts[empty] = contacts[:, empty] = np.nan
    bins = bin_table(data.layout, data.layout.strata[0])[: len(empty)]
    figures.contact_maps(
        path,
        maps=maps,
        chromosomes=bins["chrom"].tolist(),
        starts=bins["start"].tolist(),
        title=f"{cell}: contacts of the first {len(bins)} bins",
    )


def _map(contacts: NDArray[np.float32], layout: FeatureLayout) -> NDArray[np.float32]:
    """Return the symmetric matrix [bin, bin] of a cell's features, [feature]; NaN for pairs that are no features."""
    strata = [s for s in layout.strata if s.resolution == layout.strata[0].resolution]
    size = min(MAP_BINS, strata[0].n_features)
    matrix = np.full((size, size), np.nan, dtype=np.float32)
    for stratum in strata:
        inside = stratum.anchors + stratum.k < size
        first = stratum.anchors[inside]
        matrix[first, first + stratum.k] = contacts[stratum.start : stratum.stop][inside]
    return np.fmax(matrix, matrix.T)
