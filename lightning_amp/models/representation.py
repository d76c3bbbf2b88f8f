"""Project counts on the principal components of the training cells: the fixed first layer of an encoder.

    S_cg = sum of x_c over the features of group g      (a stratum of Hi-C; all features of another modality)
    z_cf = log1p(x_cf depth_g / S_cg)                   (depth_g: mean of S_cg for Hi-C, else the usual total)
    r_c  = W (z_c - mean z)                             (W: components, divided by the deviation of the first one)

Every stratum is scaled to the same depth in all cells, so that neither a cell's depth nor its decay with distance is
the first component. Zero counts stay zero up to the product, which reads only the entries.

The buffers are zero until `fit`, and part of checkpoints: new cells get the projection of the training cells.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor, nn

from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.models.inputs import HIC, TOTALS, ModelInputs
from lightning_amp.shapes import Counts


class Projection(nn.Module):
    """Normalise the counts of one modality and project them."""

    group: Tensor
    depth: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        groups: Sequence[int],  # features of each group; a group is a run of columns
        dim: int,  # components
        *,
        total: float | None,  # depth of every group; None: the mean of the training cells
        counts: bool = True,  # values that are not counts, such as rates, are only projected
    ):
        super().__init__()
        self.groups, self.total, self.counts = tuple(groups), total, counts
        of_feature = torch.arange(len(groups)).repeat_interleave(torch.tensor(groups))
        self.register_buffer("group", of_feature, persistent=False)
        self.register_buffer("depth", torch.full((len(groups),), 1.0 if total is None else total))
        self.register_buffer("weight", torch.zeros(dim, sum(groups)))
        self.register_buffer("bias", torch.zeros(dim))

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{self.weight.shape[1]} features in {len(self.groups)} groups, {len(self.weight)} components"

    def forward(self, x: Counts | SparseCounts) -> Float[Tensor, "cell component"]:
        """Return the components of some cells."""
        # as for a linear layer, which takes SparseCounts
        return F.linear(self.normalise(x), self.weight, self.bias)  # type: ignore[arg-type]

    def normalise(self, x: Counts | SparseCounts) -> Counts | SparseCounts:
        """Scale every group of a cell to the same depth, and take the logarithm of one more."""
        if not self.counts:
            return x
        n_groups = len(self.groups)
        if isinstance(x, SparseCounts):
            place = x.row * n_groups + self.group[x.column]
            sums = self.depth.new_zeros(len(x) * n_groups).index_add_(0, place, x.value.to(self.depth.dtype))
            # an entry is at least 1, and so is its group's sum
            scale = self.depth.repeat(len(x)) / sums.clamp_min(1)
            return x.with_values((x.value * scale[place]).log1p())
        sums = x.new_zeros(len(x), n_groups).index_add_(1, self.group, x)
        return (x * (self.depth / sums.clamp_min(1))[:, self.group]).log1p()

    @torch.no_grad()
    def fit(self, counts: Any) -> None:
        """Set the components from the counts of the training cells, a SciPy CSR matrix [cell, feature]."""
        if self.counts and self.total is None:
            sums = self._sums(counts)
            self.depth.copy_(torch.from_numpy(sums.mean(axis=0)))
        components, mean = principal_axes(self.normalised(counts), len(self.weight))
        self.weight.zero_()[: len(components)].copy_(torch.from_numpy(components))
        self.bias.zero_()[: len(components)].copy_(torch.from_numpy(-components @ mean))

    def normalised(self, counts: Any) -> Any:
        """Return the same as `normalise`, of a SciPy CSR matrix."""
        z = counts.astype(np.float64)
        if self.counts:
            cell = np.repeat(np.arange(z.shape[0]), np.diff(z.indptr))
            group = self.group.cpu().numpy()[z.indices]
            depth = self.depth.double().cpu().numpy()
            z.data = np.log1p(z.data * depth[group] / np.maximum(self._sums(counts)[cell, group], 1))
        return z

    def components(self, counts: Any) -> NDArray[np.float64]:
        """Return the same as `forward`, of a SciPy CSR matrix, in double precision."""
        weight, bias = self.weight.double().cpu().numpy(), self.bias.double().cpu().numpy()
        found: NDArray[np.float64] = np.asarray(self.normalised(counts) @ weight.T) + bias
        return found

    @torch.no_grad()
    def rotate(self, rotation: NDArray[np.float64]) -> None:
        """Rotate the first components, as many as the orthogonal matrix has."""
        turned, own = torch.from_numpy(rotation).to(self.weight), slice(len(rotation))
        self.weight[own] = turned @ self.weight[own]
        self.bias[own] = turned @ self.bias[own]

    def _sums(self, counts: Any) -> NDArray[np.float64]:
        """Return the sums of a SciPy matrix over groups, [cell, group]."""
        first = list(accumulate(self.groups, initial=0))
        sums = (counts[:, a:b].sum(axis=1, dtype=np.float64) for a, b in pairwise(first))
        return np.stack([np.asarray(one).ravel() for one in sums], axis=1)


def projection_of(modality: str, inputs: ModelInputs, dim: int) -> Projection:
    """Return a modality's projection before it is fitted; strata of Hi-C are scaled one by one."""
    if modality == HIC and inputs.strata is not None:
        return Projection([len(nodes) for nodes in inputs.strata.nodes], dim, total=None)
    total = TOTALS[modality]
    return Projection([inputs.modalities[modality].n_features], dim, total=total, counts=total is not None)


def principal_axes(z: Any, n: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return at most n principal axes [component, feature] of sparse rows [cell, feature], and the mean row.

    Scores on the first axis have deviation 1, those on the others less. The largest entry of an axis is positive, so
    that the same rows give the same axes. Fewer axes where there are not as many.
    """
    mean = np.asarray(z.mean(axis=0)).ravel()
    rank, squares = min(n, min(z.shape) - 1), float((z.data**2).sum())
    # nothing to find in one row, or in rows that are all the same
    if rank < 1 or squares - z.shape[0] * float((mean**2).sum()) <= 1e-12 * squares:
        return np.zeros((0, z.shape[1])), mean
    # the mean is subtracted from products, for the centred rows would be dense
    centred = LinearOperator(
        z.shape,
        matvec=lambda v: z @ np.ravel(v) - mean @ np.ravel(v),
        rmatvec=lambda u: z.T @ np.ravel(u) - mean * np.ravel(u).sum(),
        dtype=np.float64,
    )
    first = np.random.default_rng(0).standard_normal(min(z.shape))
    _, values, axes = svds(centred, k=rank, v0=first, solver="arpack")
    order = np.argsort(-values, kind="stable")
    values, axes = values[order], axes[order]
    # directions that no cell varies along
    axes = axes[values > 1e-6 * values[0]]
    largest = np.abs(axes).argmax(axis=1)
    axes = axes * np.sign(axes[np.arange(len(axes)), largest])[:, None]
    return axes * np.sqrt(z.shape[0] - 1) / values[0], mean
