"""Computes principal components and the nearest-neighbour graph of an embedding, under scanpy's names."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_amp.data.neighbours import NEIGHBOURS, neighbour_graph

MOST_CELLS = 100_000
"""Most cells for which the graph is computed: its time grows with the square of their number, to some minutes."""


def describe_embedding(embedding: NDArray[np.float32]) -> dict[str, dict[str, Any]]:
    """Return obsm, obsp and uns of an embedding, under scanpy's names.

    obsm["X_amp"] is the embedding, obsm["X_pca"] its principal components with their variances in uns["pca"]. The graph
    (obsp["distances"], obsp["connectivities"], uns["neighbors"]) is left out where a cell was not predicted (NaN), and
    of less than 3 or more than 100,000 cells.

    Args:
        embedding: [cell, dim]
    """
    known = np.isfinite(embedding).all(axis=1)
    scores, variances = principal_components(embedding[known].astype(np.float64))
    pca = np.full((len(embedding), scores.shape[1]), np.nan, dtype=np.float32)
    pca[known] = scores
    ratio = variances / max(variances.sum(), np.finfo(np.float64).tiny)
    about = {"variance": variances, "variance_ratio": ratio, "params": {"use_rep": "X_amp"}}
    described: dict[str, dict[str, Any]] = {
        "obsm": {"X_amp": embedding.astype(np.float32), "X_pca": pca},
        "obsp": {},
        "uns": {"pca": about},
    }
    if known.all() and 3 <= len(embedding) <= MOST_CELLS:
        distances, connectivities = neighbour_graph(embedding)
        described["obsp"] = {"distances": distances, "connectivities": connectivities}
        described["uns"]["neighbors"] = {
            "connectivities_key": "connectivities",
            "distances_key": "distances",
            "params": {
                "n_neighbors": min(NEIGHBOURS, len(embedding)),
                "method": "umap",
                "metric": "euclidean",
                "random_state": 0,
                "use_rep": "X_amp",
            },
        }
    return described


def principal_components(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return scores [cell, component] and variances [component], largest first.

    Args:
        x: [cell, dim]
    """
    centred = x - x.mean(axis=0) if len(x) else x
    axes, squares, _ = np.linalg.svd(centred.T @ centred)
    # the largest loading is positive, so that every run and machine has the same signs
    axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])])
    return centred @ axes, squares / max(len(x) - 1, 1)
