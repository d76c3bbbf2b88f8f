"""Encode cells as latents u, sample them, and compare their distributions: divergence and alignment.

    x -> log1p(total x / library) -> depth x (Linear, LeakyReLU 0.2, BatchNorm, Dropout) -> h
    loc = Linear(h)      std = softplus(Linear(h)) + 1e-7

    with a projection (representation.py):   r = projection(x) -> the same layers -> h,   loc = r + Linear(h) / 50

Zero counts stay zero up to the first Linear, which reads only the entries (data/sparse_counts.py). With a projection,
the Linear of loc is zero at first: latents begin as the principal components and are trained from there.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_amp.data.batch import CellBatch
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.models.keyed_noise import KeyedDropout, keyed_normal, keyed_uniform
from lightning_amp.models.representation import Projection
from lightning_amp.shapes import Counts, Library, PerCell, Scalar

Rows = Float[Tensor, "row dim"]
LEAST_LIBRARY = 1e-8
"""Least library: replaces 0 for a cell without counts, whose likelihood is then 1 in the limit."""


class Latent(NamedTuple):
    """Mean and standard deviation of a normal distribution, and a sample, each [row, dim]."""

    loc: Tensor
    std: Tensor
    sample: Tensor


def sample(loc: Rows, std: Rows, *, draw: Int[Tensor, " row"] | None, stream: int = 0) -> Latent:
    """Sample Normal(loc, std), with the rows' keys or, without keys, the default generator."""
    return Latent(loc, std, loc + std * noise_for(loc, draw=draw, stream=stream))


def noise_for(like: Rows, *, draw: Int[Tensor, " row"] | None, stream: int) -> Rows:
    """Return standard normal noise, from the rows' keys or, without keys, the default generator."""
    if draw is None:
        return torch.randn_like(like)
    return keyed_normal(draw, like.shape[1], stream=stream, dtype=like.dtype)


def one_of(samples: Sequence[Rows], *, draw: Int[Tensor, " row"] | None, stream: int) -> Rows:
    """Return each row of one of the samples, drawn from the rows' keys or, without keys, by the default generator."""
    found = samples[0]
    uniform = torch.rand_like(found[:, :1]) if draw is None else keyed_uniform(draw, 1, stream=stream)
    for i, other in enumerate(samples[1:], start=1):
        found = torch.where(uniform * len(samples) >= i, other, found)
    return found


def library_of(cells: CellBatch) -> Library:
    """Return the library (total count) of each cell, positive."""
    return cells["library"].clamp_min(LEAST_LIBRARY)


LEAK = 0.2


def normal_kl(loc: Rows, std: Rows) -> Scalar:
    """Return the divergence of Normal(loc, std) from the standard normal: sum over channels, mean over rows."""
    return divergence(loc, std).mean()


def divergence(loc: Rows, std: Rows) -> Float[Tensor, " row"]:
    """Return the divergence of Normal(loc, std) from the standard normal, summed over channels."""
    return (0.5 * (loc.square() + std.square() - 1) - std.log()).sum(dim=1)


class Discriminator(nn.Module):
    """Classifier of a cell's modality from its latent."""

    def __init__(self, dim: int, n_modalities: int, *, width: int, depth: int):
        super().__init__()
        sizes = [dim] + [width] * depth
        hidden = [(nn.Linear(a, b), nn.LeakyReLU(LEAK)) for a, b in pairwise(sizes)]
        self.layers = nn.Sequential(*(layer for pair in hidden for layer in pair), nn.Linear(sizes[-1], n_modalities))

    def forward(self, u: PerCell) -> Float[Tensor, "cell modality"]:
        """Return the logits of the modalities."""
        logits: Tensor = self.layers(u)
        return logits


def alignment_loss(discriminator: Discriminator, latents: dict[int, PerCell], *, frozen: bool) -> Scalar:
    """Return the discriminator's cross-entropy: mean over the cells of a modality, then over modalities.

    `latents` maps the class of a modality to its latents; `frozen` detaches the parameters: only latents get gradients.
    """
    parameters = {n: p.detach() if frozen else p for n, p in discriminator.named_parameters()}
    total = torch.zeros((), device=next(iter(latents.values())).device)
    for label, u in latents.items():
        logits = torch.func.functional_call(discriminator, parameters, (u,))
        total = total + F.cross_entropy(logits, torch.full((len(u),), label, device=u.device))
    return total / len(latents)


LEAST_STD = 1e-7
CORRECTION = 0.02
"""Factor of what the layers add to the components. The first steps of RMSprop change every weight by ten times the
learning rate, whatever its gradient: with a factor of 1, 80 steps took the clusters of 866 cortex cells apart."""
FIRST_STD = -2.0
"""First bias of std with a projection, a deviation of 0.13: the smaller components have deviations of about 0.2."""


class Encoder(nn.Module):
    """Encoder of one modality; its first layer, which grows with the features, is called `first`."""

    def __init__(
        self,
        n_features: int,
        dim: int,
        *,
        hidden_dim: int,
        hidden_depth: int,
        dropout: float,  # probability of a zero after each hidden layer
        # counts are scaled to this many per cell before log1p; None for data that are not counts
        total: float | None,
        stream: int,  # first of the `hidden_depth` streams of random numbers that dropout uses
        projection: Projection | None = None,  # its components are what the layers read; None: the counts
    ):
        super().__init__()
        self.total = total
        self.projection = projection
        self.first = nn.Linear(n_features if projection is None else len(projection.bias), hidden_dim)
        self.hidden = nn.ModuleList(nn.Linear(hidden_dim, hidden_dim) for _ in range(hidden_depth - 1))
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden_dim) for _ in range(hidden_depth))
        self.dropouts = nn.ModuleList(KeyedDropout(dropout, stream=stream + i) for i in range(hidden_depth))
        self.loc = nn.Linear(hidden_dim, dim)
        self.std = nn.Linear(hidden_dim, dim)
        if projection is not None:
            nn.init.zeros_(self.loc.weight)
            nn.init.zeros_(self.loc.bias)
            nn.init.constant_(self.std.bias, FIRST_STD)

    def forward(
        self, x: Counts | SparseCounts, library: Library, draw: Int[Tensor, " cell"] | None = None
    ) -> tuple[PerCell, PerCell]:
        """Return mean and standard deviation of u; library must be positive."""
        h = r = self._read(x, library)
        for layer, norm, dropout in zip((self.first, *self.hidden), self.norms, self.dropouts, strict=True):
            h = dropout(norm(F.leaky_relu(layer(h), LEAK)), draw)
        loc = self.loc(h)
        if self.projection is not None:
            assert isinstance(r, Tensor), "a projection returns a tensor"
            # a latent of more dims than there are components begins as zero in these
            kept = r[:, : loc.shape[1]]
            loc = CORRECTION * loc + F.pad(kept, (0, loc.shape[1] - kept.shape[1]))
        return loc, F.softplus(self.std(h)) + LEAST_STD

    def _read(self, x: Counts | SparseCounts, library: Library) -> Tensor | SparseCounts:
        """Return what the layers read: components, or scaled counts and their logarithms."""
        if self.projection is not None:
            components: Tensor = self.projection(x)
            return components
        if self.total is None:
            return x
        scale = self.total / library
        if isinstance(x, SparseCounts):
            # log1p(0) is 0, so x stays sparse
            return x.with_values((x.value * scale[x.row, 0]).log1p())
        return (x * scale).log1p()
