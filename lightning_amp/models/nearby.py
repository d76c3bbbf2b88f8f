"""Correct the expected contacts of a cell by its own contacts at nearby pairs of bins.

    nearby_p = e_p (1 + sum_n k_n x_n) / (1 + sum_n k_n e_n)        n: pairs at most one bin from p at either end
    k        = [1 2 1] x [1 2 1], the pair itself included

A latent has what the cells of a type have in common; a cell's contacts also cluster in places of its own. The quotient
is the mean of a rate that the nearby pairs share, with the prior Gamma(1, 1), given the cell's contacts. Every stratum
of a cell is scaled to the sum that it was expected to have.
"""

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lightning_amp.models.inputs import StrataInputs
from lightning_amp.shapes import Counts

KERNEL = (1.0, 2.0, 1.0)
STEPS = (-1, 0, 1)


def nearby(expected: Counts, x: Counts, strata: StrataInputs) -> Counts:
    """Return the expected contacts of some cells, corrected by their contacts x."""
    own, others = torch.zeros_like(expected), torch.zeros_like(expected)
    for column, weight in _neighbours(strata):
        at = column.to(x.device)
        there = weight * (at >= 0)
        own += x[:, at] * there
        others += expected[:, at] * there
    found = expected * (1 + own) / (1 + others)
    sizes = torch.tensor([len(nodes) for nodes in strata.nodes])
    group = torch.arange(len(sizes)).repeat_interleave(sizes).to(x.device)
    wanted, sums = (
        torch.zeros(len(x), len(sizes), dtype=found.dtype, device=x.device).index_add_(1, group, values)
        for values in (expected, found)
    )
    return found * (wanted / sums.clamp_min(torch.finfo(sums.dtype).tiny))[:, group]


def _neighbours(strata: StrataInputs) -> list[tuple[Int[Tensor, " feature"], float]]:
    """Return the column of a neighbour of every feature, -1 for none, and its weight; for all nine."""
    distance = np.repeat(strata.distances, [len(nodes) for nodes in strata.nodes])
    anchor = np.concatenate(strata.nodes)
    n, most = strata.n_anchors, int(distance.max())
    columns = np.full((most + 3, n + 2), -1)
    columns[distance, anchor + 1] = np.arange(len(anchor))
    found = []
    for left, a in zip(STEPS, KERNEL, strict=True):
        for right, b in zip(STEPS, KERNEL, strict=True):
            difference = distance + right - left
            # the pair with its ends in order
            first = np.where(difference < 0, anchor + distance + right, anchor + left)
            column = columns[np.abs(difference), np.clip(first + 1, 0, n + 1)]
            if left == right != 0:
                # two bins of the diagonal are neighbours if there is a pair of them, else they are of two chromosomes
                joined = columns[1, np.clip(np.minimum(anchor, anchor + left) + 1, 0, n + 1)] >= 0
                column = np.where((distance == 0) & ~joined, -1, column)
            found.append((torch.from_numpy(column), a * b))
    return found
