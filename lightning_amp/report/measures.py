"""Measure embeddings and contact maps against labels and against simple baselines; arrays in, numbers out."""

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import cdist

from lightning_amp.data.files.strata_layout import StratumLayout
from lightning_amp.data.files.write_results import NEIGHBOURS

Floats = NDArray[np.float64]
Labels = NDArray[np.str_]
COMPONENTS = 20


def adjusted_rand(one: NDArray[np.generic], other: NDArray[np.generic]) -> float:
    """Return the adjusted Rand index of two partitions of cells: 1 if they are equal, 0 on average by chance."""
    table = np.zeros((len(np.unique(one)), len(np.unique(other))))
    np.add.at(table, (np.unique(one, return_inverse=True)[1], np.unique(other, return_inverse=True)[1]), 1)

    def pairs(counts: NDArray[np.float64]) -> float:
        return float((counts * (counts - 1) / 2).sum())

    both, rows, columns = pairs(table), pairs(table.sum(axis=1)), pairs(table.sum(axis=0))
    chance = rows * columns / max(pairs(np.array(table.sum())), 1.0)
    most = (rows + columns) / 2
    return 1.0 if most == chance else (both - chance) / (most - chance)


def cluster(points: Floats, n: int) -> NDArray[np.int64]:
    """Return the cluster of each point, of n clusters of Ward's method."""
    found: NDArray[np.int64] = fcluster(linkage(points, "ward"), n, "maxclust").astype(np.int64)
    return found


def silhouette(points: Floats, labels: Labels) -> float:
    """Return the mean silhouette width of labels: near 1 if they lie apart, 0 if they overlap, below 0 if mixed up.

    A cell that is alone with its label counts as 0.
    """
    names, codes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    far = cdist(points, points)
    sums = np.stack([far[:, codes == code].sum(axis=1) for code in range(len(names))], axis=1)
    own = np.arange(len(points)), codes
    inside = sums[own] / np.maximum(sizes[codes] - 1, 1)
    means = sums / sizes
    means[own] = np.inf
    outside = means.min(axis=1)
    widths = (outside - inside) / np.maximum(np.maximum(outside, inside), np.finfo(np.float64).tiny)
    return float(np.where(sizes[codes] > 1, widths, 0.0).mean())


def same_label_share(points: Floats, labels: Labels) -> tuple[float, float]:
    """Return the share of a cell's 15 nearest neighbours that have its label, and chance's."""
    same = labels[:, None] == labels
    chance = (same.sum(axis=1) - 1) / (len(points) - 1)
    return float(np.take_along_axis(same, _nearest(points), axis=1).mean()), float(chance.mean())


def _nearest(points: Floats) -> NDArray[np.intp]:
    """Return the 15 nearest other points of each point, in no order."""
    far = cdist(points, points)
    np.fill_diagonal(far, np.inf)
    n = min(NEIGHBOURS, len(points) - 1)
    return np.argpartition(far, n - 1, axis=1)[:, :n]


def other_label_shares(points: Floats, labels: Labels) -> dict[str, tuple[float, float]]:
    """Return by label the share of its points' 15 nearest neighbours that have another label, and chance's."""
    other = labels[_nearest(points)] != labels[:, None]
    found = {}
    for name in np.unique(labels).tolist():
        own = labels == name
        found[name] = float(other[own].mean()), float((~own).sum() / (len(labels) - 1))
    return found


def components_of_counts(counts: Floats) -> Floats:
    """Return principal components of counts [cell, feature]: each cell scaled to the median depth, log1p, centred."""
    depth = counts.sum(axis=1, keepdims=True)
    x = np.log1p(counts * (np.median(depth) / np.maximum(depth, 1.0)))
    x -= x.mean(axis=0)
    # of [cell, cell], because there are more features than cells
    values, vectors = np.linalg.eigh(x @ x.T)
    scores: Floats = (vectors * np.sqrt(np.maximum(values, 0.0)))[:, ::-1][:, :COMPONENTS]
    return scores


def by_distance(contacts: NDArray[np.floating], strata: list[StratumLayout]) -> Floats:
    """Return the sum of contacts [feature] of each stratum."""
    return np.array([contacts[stratum.start : stratum.stop].sum(dtype=np.float64) for stratum in strata])


def standardised(contacts: NDArray[np.floating], strata: list[StratumLayout]) -> Floats:
    """Return contacts [..., feature] minus the mean of their stratum, over its deviation, scaled to length 1.

    The product of two such maps is their correlation at the same distance. Strata that are constant count as 0.
    """
    parts = []
    for stratum in strata:
        part = contacts[..., stratum.start : stratum.stop].astype(np.float64)
        part = part - part.mean(axis=-1, keepdims=True)
        deviation = part.std(axis=-1, keepdims=True)
        parts.append(part / np.where(deviation > 0, deviation, np.inf))
    whole = np.concatenate(parts, axis=-1)
    length = np.linalg.norm(whole, axis=-1, keepdims=True)
    found: Floats = whole / np.where(length > 0, length, np.inf)
    return found
