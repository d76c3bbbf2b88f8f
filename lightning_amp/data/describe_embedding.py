"""Computes principal components of an embedding, under scanpy's names."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


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
