"""Rotate the principal components of modalities towards each other, by the guidance graph or by paired cells.

Components of two modalities have no order in common. Distances between the cells of a modality do not change by an
orthogonal matrix Q; it is chosen such that vertices that the graph joins vary along the same directions:

    C_m = covariance of the components of modality m and its vertices' values, standardised      [dim, vertex]
    M   = sum over edges (i, j) of sign w C_first[:, i] C_m[:, j]^T = U S V^T           (i of the first, j of m)
    Q   = U V^T                                                                                 (orthogonal Procrustes)

Of paired cells, C_m are the components themselves, [dim, cell], and M = C_first C_m^T: no graph is needed.

A gene's value is its normalised count. A bin's is the sum of its normalised contacts with itself and the next bin, for
these follow the expression of its genes; contacts further away do not.
"""

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from lightning_amp.models.inputs import HIC, GraphInputs, ModelInputs
from lightning_amp.models.representation import Projection

NEAR = 1
"""Largest distance in bins of the contacts that stand for a bin's activity."""


def rotate(
    projections: dict[str, Projection],
    counts: dict[str, Any],  # SciPy CSR matrices of the training cells
    inputs: ModelInputs,
    dim: int,  # components that latents have
) -> None:
    """Rotate the projections of all modalities but the first one towards it; one without a common edge is kept."""
    if inputs.paired:
        found = {name: one.components(counts[name]).T[:dim] for name, one in projections.items()}
    else:
        found = {name: _covariance(one, counts[name], name, inputs)[:dim] for name, one in projections.items()}
    first, *others = found
    for name in others:
        # directions that the first one does not have can be chosen freely
        n = len(found[name])
        target = np.pad(found[first][:n], ((0, max(n - len(found[first]), 0)), (0, 0)))
        shared = target @ found[name].T if inputs.paired else _over_edges(target, found[name], inputs.graph)
        if shared.any():
            left, _, right = np.linalg.svd(shared)
            projections[name].rotate(left @ right)


def _covariance(projection: Projection, counts: Any, modality: str, inputs: ModelInputs) -> NDArray[np.float64]:
    """Return the covariance of components and standardised values of the modality's vertices, [dim, vertex]."""
    z = projection.normalised(counts)
    weight, bias = projection.weight.double().cpu().numpy(), projection.bias.double().cpu().numpy()
    components, values = z @ weight.T + bias, z @ _vertices_of_features(modality, inputs)
    mean = np.asarray(values.mean(axis=0)).ravel()
    variance = np.asarray(values.multiply(values).mean(axis=0)).ravel() - mean**2
    # components have the mean 0, so that values need not be centred
    covariance = np.asarray((values.T @ components).T) / len(components)
    steady = variance <= 1e-12
    return np.where(steady, 0.0, covariance / np.sqrt(np.where(steady, 1.0, variance)))


def _vertices_of_features(modality: str, inputs: ModelInputs) -> Any:
    """Return a sparse matrix that sums the features of each vertex, [feature, vertex]."""
    own, n_vertices = inputs.modalities[modality], inputs.graph.n_vertices
    feature, vertex = np.arange(own.n_features), own.vertices
    if modality == HIC and inputs.strata is not None:
        nodes, distances = inputs.strata.nodes, inputs.strata.distances
        near = np.repeat(np.array(distances) <= NEAR, [len(one) for one in nodes])
        feature, vertex = feature[near], own.vertices[np.concatenate(nodes)][near]
    return sp.csr_matrix((np.ones(len(feature)), (feature, vertex)), shape=(own.n_features, n_vertices))


def _over_edges(one: NDArray[np.float64], other: NDArray[np.float64], graph: GraphInputs) -> NDArray[np.float64]:
    """Return the sum over edges of the products of their ends, in both directions."""
    edges = sp.csr_matrix((graph.weight * graph.sign, (graph.source, graph.target)), shape=(graph.n_vertices,) * 2)
    edges = (edges + edges.T).tocsr()
    return np.asarray((edges @ other.T).T @ one.T).T
