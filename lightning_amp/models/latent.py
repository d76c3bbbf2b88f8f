"""Latents of cells or vertices, their noise, the library a cell is decoded with, and terms of the GLUE loss."""

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_amp.models.keyed_noise import keyed_normal
from lightning_amp.shapes import Library, PerCell, Scalar

if TYPE_CHECKING:
    from lightning_amp.data.batch import CellBatch

LEAST_LIBRARY = 1e-8
"""Stands in for the library of a cell without counts, whose likelihood is then 1 in the limit."""


class Latent(NamedTuple):
    """Normal distribution and a sample of it, each [row, dim]."""

    loc: Tensor
    std: Tensor
    sample: Tensor


def sample(
    loc: Float[Tensor, "row dim"],
    std: Float[Tensor, "row dim"],
    *,
    draw: Int[Tensor, " row"] | None,
    stream: int = 0,
) -> Latent:
    """Draw from Normal(loc, std), by the rows' keys or, without them, by the default generator."""
    return Latent(loc, std, loc + std * noise_for(loc, draw=draw, stream=stream))


def noise_for(
    like: Float[Tensor, "row dim"], *, draw: Int[Tensor, " row"] | None, stream: int
) -> Float[Tensor, "row dim"]:
    """Standard normal noise, by the rows' keys or, without them, by the default generator."""
    if draw is None:
        return torch.randn_like(like)
    return keyed_normal(draw, like.shape[1], stream=stream, dtype=like.dtype)


def library_of(cells: "CellBatch") -> Library:
    """Library of each cell, positive."""
    return cells["library"].clamp_min(LEAST_LIBRARY)


LEAK = 0.2


def normal_kl(loc: Float[Tensor, "row dim"], std: Float[Tensor, "row dim"]) -> Scalar:
    """Divergence of Normal(loc, std) from the standard normal, summed over channels, mean over rows."""
    return divergence(loc, std).mean()


def divergence(loc: Float[Tensor, "row dim"], std: Float[Tensor, "row dim"]) -> Float[Tensor, " row"]:
    """Divergence of Normal(loc, std) from the standard normal, summed over channels."""
    return (0.5 * (loc.square() + std.square() - 1) - std.log()).sum(dim=1)


class Discriminator(nn.Module):
    """Guesses from a cell's latent which modality the cell is of."""

    def __init__(self, dim: int, n_modalities: int, *, width: int, depth: int):
        super().__init__()
        sizes = [dim] + [width] * depth
        hidden = [(nn.Linear(a, b), nn.LeakyReLU(LEAK)) for a, b in pairwise(sizes)]
        self.layers = nn.Sequential(
            *(layer for pair in hidden for layer in pair), nn.Linear(sizes[-1], n_modalities)
        )

    def forward(self, u: PerCell) -> Float[Tensor, "cell modality"]:
        """Logits of the modalities."""
        logits: Tensor = self.layers(u)
        return logits


def alignment_loss(discriminator: Discriminator, latents: dict[int, PerCell], *, frozen: bool) -> Scalar:
    """Cross-entropy of the discriminator's guesses: mean over the cells of a modality, then over modalities.

    Args:
        latents: class of a modality -> latent of its cells.
        frozen: compute with detached parameters, so that backward reaches the latents only.
    """
    parameters = {n: p.detach() if frozen else p for n, p in discriminator.named_parameters()}
    total = torch.zeros((), device=next(iter(latents.values())).device)
    for label, u in latents.items():
        logits = torch.func.functional_call(discriminator, parameters, (u,))
        total = total + F.cross_entropy(logits, torch.full((len(u),), label, device=u.device))
    return total / len(latents)
