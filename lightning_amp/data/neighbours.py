"""Finds nearest neighbours of cells in an embedding, and the share of the same type in another modality."""

from collections.abc import Mapping
from itertools import permutations
from typing import Any

import numpy as np
import scipy.sparse as sp
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
        nearest, _ = _nearest(embeddings[one][queries], there, min(NEIGHBOURS, len(there)))
        found.append((np.take_along_axis(same, nearest, axis=1).mean(), same.mean()))
    if not found:
        return None
    share, chance = np.mean(found, axis=0)
    return float(share), float(chance)


def neighbour_graph(embedding: NDArray[np.float32]) -> tuple[Any, Any]:
    """Return distances and connectivities of cells as scanpy keeps them, sparse [cell, cell].

    Connectivities are the fuzzy sets of UMAP (McInnes et al. 2018, arXiv 1802.03426, algorithms 2 and 3). As in scanpy,
    a cell counts as one of its 15 neighbours.

    Args:
        embedding: [cell, dim] of two cells or more, all finite
    """
    n_cells, n_neighbours = len(embedding), min(NEIGHBOURS, len(embedding))
    nearest, far = _nearest(embedding, embedding, n_neighbours - 1, apart=True)
    offsets = np.arange(n_cells + 1) * (n_neighbours - 1)

    def graph(values: NDArray[Any]) -> Any:
        made = sp.csr_matrix((values.ravel(), nearest.ravel(), offsets), shape=(n_cells, n_cells))
        made.sort_indices()
        return made

    connected = graph(_memberships(far, n_neighbours))
    both = connected + connected.T - connected.multiply(connected.T)
    return graph(far), sp.csr_matrix(both, dtype=np.float32)


def _memberships(far: NDArray[np.float64], n_neighbours: int) -> NDArray[np.float64]:
    """Return how much each neighbour belongs to a cell: exp(-(distance - nearest) / sigma), with the sigma for which a
    row adds up to log2(n_neighbours)."""
    nearest = np.where(far > 0, far, np.inf).min(axis=1, keepdims=True)
    beyond = np.maximum(far - np.where(np.isfinite(nearest), nearest, 0), 0)
    low, high, sigma = np.zeros(len(far)), np.full(len(far), np.inf), np.ones(len(far))
    for _ in range(64):
        above = np.exp(-beyond / sigma[:, None]).sum(axis=1) > np.log2(n_neighbours)
        low, high = np.where(above, low, sigma), np.where(above, sigma, high)
        sigma = np.where(np.isinf(high), 2 * low, (low + high) / 2)
    least = 1e-3 * far.sum(axis=1) / n_neighbours
    return np.asarray(np.exp(-beyond / np.maximum(np.maximum(sigma, least), 1e-300)[:, None]))


def _nearest(
    points: NDArray[np.float32], others: NDArray[np.float32], n: int, *, apart: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the rows of the n of `others` that are nearest to each point, in no order, and how far they are, [point,
    neighbour].

    Args:
        points: [point, dim]
        others: [other, dim]
        n: how many
        apart: the two are the same cells, and none is its own neighbour
    """
    there = others.astype(np.float64)
    squares = (there**2).sum(axis=1)
    found, distances = [], []
    for start in range(0, len(points), BLOCK):
        here = points[start : start + BLOCK].astype(np.float64)
        # squared distances but for what is the same for all others
        far = squares - 2 * here @ there.T
        if apart:
            far[np.arange(len(here)), start + np.arange(len(here))] = np.inf
        nearest = np.argpartition(far, n - 1, axis=1)[:, :n]
        found.append(nearest)
        distances.append(np.linalg.norm(here[:, None] - there[nearest], axis=2))
    return np.concatenate(found), np.concatenate(distances)
