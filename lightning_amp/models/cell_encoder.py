"""Encode a cell's data as the mean and the deviation of its latent u.

    x -> log1p(total x / library) -> depth x (Linear, LeakyReLU 0.2, BatchNorm, Dropout) -> h
    loc = Linear(h)      std = softplus(Linear(h)) + 1e-7

Zero counts stay zero up to the first Linear, which reads only the entries (data/sparse_product.py).

Legend: cell, feature, dim (of the latent).
"""

import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.models.keyed_noise import KeyedDropout
from lightning_amp.shapes import Counts, Library, PerCell

LEAK = 0.2
LEAST_STD = 1e-7


class Encoder(nn.Module):
    """Encoder of one modality; its first layer, which grows with the features, is called `first`.

    Args:
        hidden_depth: number of hidden layers, at least 1.
        dropout: probability of a zero after each hidden layer.
        total: counts are scaled to this many per cell before log1p; None for data that are not counts.
        stream: first of the `hidden_depth` streams of random numbers that dropout uses.
    """

    def __init__(
        self,
        n_features: int,
        dim: int,
        *,
        hidden_dim: int,
        hidden_depth: int,
        dropout: float,
        total: float | None,
        stream: int,
    ):
        super().__init__()
        self.total = total
        self.first = nn.Linear(n_features, hidden_dim)
        self.hidden = nn.ModuleList(nn.Linear(hidden_dim, hidden_dim) for _ in range(hidden_depth - 1))
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden_dim) for _ in range(hidden_depth))
        self.dropouts = nn.ModuleList(KeyedDropout(dropout, stream=stream + i) for i in range(hidden_depth))
        self.loc = nn.Linear(hidden_dim, dim)
        self.std = nn.Linear(hidden_dim, dim)

    def forward(
        self, x: Counts | SparseCounts, library: Library, draw: Int[Tensor, " cell"] | None = None
    ) -> tuple[PerCell, PerCell]:
        """Mean and standard deviation of u; library must be positive."""
        h = x if self.total is None else _normalised(x, self.total / library)
        for layer, norm, dropout in zip((self.first, *self.hidden), self.norms, self.dropouts, strict=True):
            h = dropout(norm(F.leaky_relu(layer(h), LEAK)), draw)
        return self.loc(h), F.softplus(self.std(h)) + LEAST_STD


def _normalised(x: Counts | SparseCounts, scale: Library) -> Counts | SparseCounts:
    if isinstance(x, SparseCounts):
        return x.with_values((x.value * scale[x.row, 0]).log1p())
    return (x * scale).log1p()
