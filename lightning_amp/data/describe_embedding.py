"""Computes principal components of an embedding, and how many neighbours in another modality are of a cell's type."""

from collections.abc import Mapping
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

NEIGHBOURS = 15
MOST_QUERIES = 2_000
"""Most cells of a modality whose neighbours are searched, evenly spaced; more take time and change little."""
BLOCK = 256


def same_type_share(
    embeddings: Mapping[str, NDArray[np.float32]], types: Mapping[str, NDArray[np.str_]]
) -> tuple[float, float] | None:
    """Return the share of a cell's nearest neighbours in another modality that are of its type, and chance's.

    The mean over pairs of modalities, in both directions, of the mean over cells; neighbours are 15, or all where
    there are fewer. Cells that were not embedded (NaN), or of a type that the other modality has not, do not count.

    Args:
        embeddings: modality -> [cell, dim]
        types: modality -> [cell]

    Returns:
        None where no two modalities have a type in common
    """
    known = {name: np.isfinite(values).all(axis=1) for name, values in embeddings.items()}
    found = []
    for one, other in permutations(embeddings, 2):
        there, there_types = embeddings[other][known[other]], types[other][known[other]]
        rows = np.flatnonzero(known[one] & np.isin(types[one], there_types))
        if not len(rows):
            continue
        queries = rows[np.unique(np.linspace(0, len(rows) - 1, MOST_QUERIES).astype(int))]
        same = types[one][queries, None] == there_types
        nearest = _nearest(embeddings[one][queries], there, min(NEIGHBOURS, len(there)))
        found.append((np.take_along_axis(same, nearest, axis=1).mean(), same.mean()))
    if not found:
        return None
    share, chance = np.mean(found, axis=0)
    return float(share), float(chance)


def _nearest(points: NDArray[np.float32], others: NDArray[np.float32], n: int) -> NDArray[np.int64]:
    """Return the rows of the n of `others` that are nearest to each point, in no order, [point, neighbour]."""
    there = others.astype(np.float64)
    squares = (there**2).sum(axis=1)
    found = []
    for start in range(0, len(points), BLOCK):
        # squared distances but for what is the same for all others
        far = squares - 2 * points[start : start + BLOCK].astype(np.float64) @ there.T
        found.append(np.argpartition(far, n - 1, axis=1)[:, :n])
    return np.concatenate(found)


def describe_embedding(embedding: NDArray[np.float32]) -> dict[str, dict[str, Any]]:
    """Return obsm and uns of an embedding: obsm["X_amp"], obsm["X_pca"], and the variances in uns["pca"].

    Args:
        embedding: [cell, dim]; NaN for a cell that was not predicted
    """
    known = np.isfinite(embedding).all(axis=1)
    scores, variances = principal_components(embedding[known].astype(np.float64))
    pca = np.full((len(embedding), scores.shape[1]), np.nan, dtype=np.float32)
    pca[known] = scores
    ratio = variances / max(variances.sum(), np.finfo(np.float64).tiny)
    about = {"variance": variances, "variance_ratio": ratio, "params": {"use_rep": "X_amp"}}
    return {"obsm": {"X_amp": embedding.astype(np.float32), "X_pca": pca}, "uns": {"pca": about}}


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
